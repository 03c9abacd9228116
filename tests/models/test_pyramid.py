"""The feature pyramid in both flavors against a NumPy definition, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax import models
from effjax.models import linen as linen_models
from tests.contexts import assert_trees_close
from tests.models.flavors import Linen, Nnx, draw
from tests.oracles import conv
from tests.tiers import vary

CHANNELS = (2, 3, 4)
FLAVORS = {
    "nnx": functools.partial(Nnx, models.FeaturePyramid, in_channels=CHANNELS),
    "linen": functools.partial(Linen, linen_models.FeaturePyramid),
}
EXTRAS = {
    "output, relu": dict(extra_levels=2, extra="conv", extra_from="output", extra_relu=True),
    "none": {},
    "pool": dict(extra="pool"),
    "pools": dict(extra_levels=2),
    "input": dict(extra="conv"),
}


pytestmark = pytest.mark.usefixtures("x64")


def levels(sides=((9, 8), (5, 4), (3, 2))):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(2, *s, c)) for s, c in zip(sides, CHANNELS, strict=True))


def reference(params, features, extra_levels=None, extra=None, extra_from="input", **relu):
    if extra_levels is None:
        extra_levels = {None: 0, "pool": 1, "conv": 2}[extra]

    def apply_conv(name, x, **options):
        kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
        return conv(x, kernel, padding=[(kernel.shape[0] // 2,) * 2] * 2, **options) + bias

    merged, above = [], 0
    for i in reversed(range(len(features))):
        lateral = apply_conv(f"laterals.{i}", features[i])
        if merged:
            rows, columns = (np.arange(n) // 2 for n in lateral.shape[1:3])
            above = merged[0][:, rows][:, :, columns]
        merged.insert(0, lateral + above)
    outputs = [apply_conv(f"outputs.{i}", x) for i, x in enumerate(merged)]
    last = features[-1] if extra_from == "input" else outputs[-1]
    for i in range(extra_levels):
        if extra != "conv":
            outputs.append(outputs[-1][:, ::2, ::2])
            continue
        last = np.maximum(last, 0) if i and relu else last
        last = apply_conv(f"outputs.{len(features) + i}", last, strides=(2, 2))
        outputs.append(last)
    return tuple(outputs)


@vary(
    ("flavor", "extra"),
    [
        ("linen", "output, relu"),
        ("nnx", "output, relu"),
        ("nnx", "input"),
        ("nnx", "pool"),
        ("linen", "pools"),
        ("nnx", "none"),
    ],
)
def test_matches_definition(flavor, extra):
    options, x = EXTRAS[extra], levels()
    model = FLAVORS[flavor](**options, out_channels=2)
    values = [draw(names) for names in model.names(x)]
    want = reference(values[0], x, **options)
    got = jax.jit(model)(*values, x)[0]
    assert len(got) == len(want)
    assert_trees_close(got, want, 1e-12)


@pytest.mark.parametrize(("extra", "count"), [(None, 3), ("pool", 4), ("conv", 5)])
def test_extra_levels_of_torchvision(extra, count):
    """`extra` alone adds the levels of torchvision's LastLevelMaxPool and LastLevelP6P7."""
    model = linen_models.FeaturePyramid(2, extra=extra)
    assert model.clone() == model
    features = levels()
    variables = jax.eval_shape(model.init, jax.random.key(0), features)
    assert len(jax.eval_shape(model.apply, variables, features)) == count
    with pytest.raises(ValueError, match=r"`extra_levels` \(=0\)"):
        linen_models.FeaturePyramid(2, extra=extra or "pool", extra_levels=0)


def test_levels_of_the_same_size():
    """A backbone with a dilated last stage returns such levels."""
    model = nnx.eval_shape(lambda: models.FeaturePyramid((2, 2), 2, rngs=nnx.Rngs(0)))
    x = [jnp.ones((1, 4, 3, 2))] * 2
    assert [p.shape for p in nnx.eval_shape(lambda m: m(x), model)] == [(1, 4, 3, 2)] * 2


def test_backbone_in_half_precision():
    def build():
        options = dict(stage_sizes=(1, 1, 1, 1), width=2, num_classes=None, dtype=jnp.bfloat16)
        backbone = models.ResNet(**options, rngs=nnx.Rngs(0))
        return backbone, models.FeaturePyramid(
            backbone.feature_channels, 4, extra_levels=1, rngs=nnx.Rngs(0)
        )

    backbone, pyramid = nnx.eval_shape(build)
    levels = nnx.eval_shape(
        lambda b, p, x: p(b.features(x)), backbone, pyramid, jnp.ones((1, 70, 64, 3))
    )
    assert [p.shape for p in levels] == [
        (1, 18, 16, 4), (1, 9, 8, 4), (1, 5, 4, 4), (1, 3, 2, 4), (1, 2, 1, 4)
    ]  # fmt: skip
    assert {p.dtype for p in levels} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("options", "features", "match"),
    [
        (dict(extra="max"), levels(), r"`extra` \(='max'\)"),
        (dict(extra_levels=-1), levels(), r"`extra_levels` \(=-1\)"),
        ({}, levels()[:2], r"must be \[N, H, W, C\] for C in \(2, 3, 4\)"),
        ({}, levels(((9, 8), (5, 4), (5, 2))), "or half of them, rounded up"),
    ],
    ids=["extra", "extra_levels", "levels", "size"],
)
def test_rejects_bad_arguments(options, features, match):
    with pytest.raises(ValueError, match=match):
        models.FeaturePyramid(CHANNELS, 2, **options, rngs=nnx.Rngs(0))(features)
