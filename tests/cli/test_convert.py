import os
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

from effjax import convert
from effjax.convert import networks
from effjax.models import DenseNet
from effjax.models.linen import DenseNet as LinenDenseNet
from tests.cli.command import one_line
from tests.convert import cases

SMALL = dict(growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2)


def save(dtype, path):
    """Save the weights with this dtype, and return them."""
    weights = cases.select(cases.load("densenet"), "weights")
    weights = {name: a.astype(dtype) if a.dtype.kind == "f" else a for name, a in weights.items()}
    convert.save_weights(path, {f"module.{name}": array for name, array in weights.items()})
    return weights


@pytest.fixture
def tiny(run, monkeypatch):
    """Return the options of a small network, with a file of its weights."""
    make = lambda **options: LinenDenseNet(**SMALL | options)  # noqa: E731
    monkeypatch.setitem(networks.NETWORKS, "tiny", (make, convert.DENSENET))
    save(np.float32, "in.safetensors")
    return "--model", "tiny", "--num-classes", "3", "--prefix", "module"


def load(path):
    """Return the tree of variables in a file or a folder."""
    if path.endswith(".safetensors"):
        return unflatten_dict(convert.load_weights(path), sep=".")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(os.path.abspath(path))


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_round_trip_of_nnx_and_linen(run, tiny, ending):
    weights = save(np.float32, "in.safetensors")
    trees = {}
    for flavor in ("nnx", "linen"):
        to = f"{flavor}{ending}"
        code, out, err = run("convert", "in.safetensors", *tiny, "--to", to, "--flavor", flavor)
        assert (code, err) == (0, "") and f"written to {to}" in out
        assert out.endswith(f"--model tiny --init-from {to} --data folder:PATH\n")
        trees[flavor] = load(to)
    assert sorted(os.listdir()) == ["in.safetensors", f"linen{ending}", f"nnx{ending}"]
    model = DenseNet(**SMALL, num_classes=3, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.restore_int_paths(trees["nnx"]))
    for variables in (model, trees["linen"]):
        back = convert.to_torch(variables, convert.DENSENET)
        assert back.keys() == weights.keys()
        jax.tree.map(np.testing.assert_array_equal, back, weights)


@pytest.mark.filterwarnings("default:.*arrays are rounded:UserWarning")
def test_rounding_is_a_warning(run, tiny):
    save(np.float64, "weights64.safetensors")
    code, out, err = run("convert", "weights64.safetensors", *tiny, "--to", "new")
    assert code == 0 and "written to new" in out
    assert one_line(err) and "46 of 46 arrays are rounded" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no.safetensors", "--to", "new"], "no.safetensors: No such file or directory"),
        (["bad.safetensors", "--to", "new"], "bad.safetensors: not a complete .safetensors file"),
        (["in.safetensors", "--to", "in.safetensors"], "in.safetensors already exists"),
        (["in.safetensors", "--to", "new.pth"], "must be a new folder or a .safetensors file"),
        (["in.safetensors", "--to", "no/new"], "No such file or directory"),
        (["bare.safetensors", "--to", "new"], "missing: classifier.bias"),
    ],
)
def test_errors_write_nothing(refused, tiny, tmp_path, argv, message):
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "in.safetensors").read_bytes()[:-30])
    convert.save_weights("bare.safetensors", {"module.a": np.ones(2)})
    before = sorted(os.listdir())
    assert message in refused("convert", *tiny, *argv)
    assert sorted(os.listdir()) == before


def test_failed_writes_leave_no_files(refused, tiny, monkeypatch):
    def fail(self, path, *_args, **_kwargs):
        path.mkdir()
        raise OSError(28, "No space left on device", str(path))

    argv = "convert", "in.safetensors", *tiny, "--to", "new"
    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", fail)
    assert "No space left on device" in refused(*argv)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert 'Run pip install ".[train]"' in refused(*argv)
    assert os.listdir() == ["in.safetensors"]
