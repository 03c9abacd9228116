"""Exported models: a batch of any size, and a process without Flax that runs them.

FeaturePyramid has a ResNet before it, and exported linen networks call those of nnx.
"""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from effjax import models, native
from effjax.models import linen as linen_models
from tests.test_docs import ROOT, blocks
from tests.tiers import vary

PAGE = ROOT / "docs" / "guides" / "export.md"
IMAGES = np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 16, (3, 6)).astype(np.int32)
RESNET = dict(stage_sizes=(1, 1), width=4, stage_with_dcn=(False, True))
DENSENET = dict(block_config=(2, 1), growth_rate=2, num_init_features=4, num_classes=3)


def pyramid(rngs):
    backbone = models.ResNet(**RESNET, num_classes=None, rngs=rngs)
    return nnx.List([backbone, models.FeaturePyramid(backbone.feature_channels, 4, rngs=rngs)])


def decoder(rngs):
    config = models.DecoderConfig("llama", 16, 8, 12, 2, 2, 1, 4)
    return models.Decoder(config, rngs=rngs)


NETWORKS = {
    "DenseNet": (lambda rngs: models.DenseNet(**DENSENET, rngs=rngs), IMAGES),
    "FeaturePyramid": (pyramid, IMAGES),
    "Decoder": (decoder, TOKENS),
}


def check_export(run, x):
    """Export `run` for a batch of any size, and compare it at one size."""
    (n,) = export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
    run = jax.jit(run)
    program = export.export(run, disabled_checks=native.export_checks())(shape)
    program = export.deserialize(program.serialize())
    want, got = jax.tree.leaves(run(x)), jax.tree.leaves(program.call(x))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(a).max()))


@vary("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, train):
    make, x = NETWORKS[name]
    model = nnx.jit(lambda: make(nnx.Rngs(0)))()
    model.train() if train else model.eval()
    graphdef, state = nnx.split(model)

    def run(x):
        model = nnx.merge(graphdef, state, copy=True)
        if isinstance(model, nnx.List):
            return model[1](model[0].features(x))
        return model(x)

    check_export(run, x)


@vary("name", ["ResNet", "DenseNet"])
def test_linen_networks(name):
    options = DENSENET if name == "DenseNet" else RESNET | dict(num_classes=3)
    model = getattr(linen_models, name)(**options)
    variables = jax.jit(model.init)(jax.random.key(0), IMAGES)
    check_export(lambda x: model.apply(variables, x), IMAGES)


@pytest.mark.exhaustive
def test_a_process_without_flax_serves_a_program(tmp_path):
    """The blocks of the page run in two processes."""
    exporter, server = (code for _, code in blocks(PAGE, "python"))
    server += "import sys\nassert not {'flax', 'effjax.ops'} & set(sys.modules)\n"
    for code in (exporter, server):
        path = pathlib.Path(tmp_path / "program.py")
        path.write_text(code.replace("tempfile.gettempdir()", repr(str(tmp_path))))
        result = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
