import os
import sys

import jax
import numpy as np
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
    weights = {
        name: array.astype(dtype) if array.dtype.kind == "f" else array
        for name, array in weights.items()
    }
    convert.save_weights(path, {f"module.{name}": array for name, array in weights.items()})
    return weights


@pytest.fixture
def run_convert(run, monkeypatch):
    """Run `effjax convert` with a small network `tiny` and a file of its weights."""
    make = lambda **options: LinenDenseNet(**SMALL | options)  # noqa: E731
    monkeypatch.setitem(networks.NETWORKS, "tiny", (make, convert.DENSENET))
    save(np.float32, "in.safetensors")
    options = ("--model", "tiny", "--num-classes", "3", "--prefix", "module")
    return lambda *argv: run("convert", *argv, *options[: None if "--model" not in argv else 0])


def restored(path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(os.path.abspath(path))


@pytest.mark.parametrize("kind", ["folder", "safetensors"])
def test_round_trip_of_nnx_and_linen(run_convert, kind):
    ending = "" if kind == "folder" else f".{kind}"
    weights = save(np.float32, "in.safetensors")
    trees = {}
    for flavor in ("nnx", "linen"):
        to = f"{flavor}{ending}"
        code, out, err = run_convert("in.safetensors", "--to", to, "--flavor", flavor)
        assert (code, err) == (0, "") and f"written to {to}" in out
        assert "tiny" in out and "arrays" in out and " of " in out
        assert out.endswith(
            "to train it on your images: effjax train densenet --model tiny "
            f"--init-from {to} --data folder:PATH\n"
        )
        if ending:
            flat = convert.load_weights(to)
            trees[flavor] = unflatten_dict(flat, sep=".")
        else:
            trees[flavor] = restored(to)
    assert {"nnx", "linen"} <= {name.partition(".")[0] for name in os.listdir()}
    assert len(os.listdir()) == 3
    model = DenseNet(**SMALL, num_classes=3, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.restore_int_paths(trees["nnx"]))
    for variables in (model, trees["linen"]):
        back = convert.to_torch(variables, convert.DENSENET)
        assert back.keys() == weights.keys()
        jax.tree.map(np.testing.assert_array_equal, back, weights)


@pytest.mark.filterwarnings("default:.*arrays are rounded:UserWarning")
def test_rounding_is_a_warning(run_convert):
    save(np.float64, "weights64.safetensors")
    code, out, err = run_convert("weights64.safetensors", "--to", "new")
    assert code == 0 and "written to new" in out
    assert one_line(err) and "46 of 46 arrays are rounded" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no.safetensors", "--to", "new"], "no.safetensors: No such file or directory"),
        (["bad.safetensors", "--to", "new"], "bad.safetensors: not a complete .safetensors file"),
        (
            ["in.safetensors", "--to", "in.safetensors"],
            "in.safetensors already exists",
        ),
        (
            ["in.safetensors", "--to", "new.pth"],
            "must be a new folder or a .safetensors file",
        ),
        (["in.safetensors", "--to", "no/new"], "No such file or directory"),
        (["in.safetensors", "--model", "tiny", "--to", "new"], "missing: classifier.bias"),
    ],
)
def test_errors_are_one_line_and_write_nothing(run_convert, tmp_path, argv, message):
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "in.safetensors").read_bytes()[:-30])
    before = sorted(os.listdir())
    code, out, err = run_convert(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err
    assert sorted(os.listdir()) == before


def test_full_disk_leaves_no_files(run_convert, monkeypatch):
    def fail(self, path, *_args, **_kwargs):
        path.mkdir()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", fail)
    code, out, err = run_convert("in.safetensors", "--to", "new")
    assert (code, out) == (2, "") and one_line(err) and "No space left on device" in err
    assert os.listdir() == ["in.safetensors"]


def test_missing_package(run_convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    code, _, err = run_convert("in.safetensors", "--to", "new")
    assert code == 2 and one_line(err) and 'Run pip install ".[train]"' in err
    assert os.listdir() == ["in.safetensors"]
