import json
import sys

import pytest

from tests.cli.command import one_line
from tests.programs import needs_gpu_compiler

OWN = """
import jax, jax.numpy as jnp

def one(batch):
    return lambda x: x + 1, jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def two(batch):
    return {"sum": (jnp.sum, *one(batch)[1:]), "sin": (jnp.sin, *one(batch)[1:])}

def wrong(batch):
    return batch

number = 3
"""


@pytest.fixture
def run_memory(run, tmp_path, monkeypatch):
    """Runs `effjax memory` where the module `own_step` has steps."""
    monkeypatch.delitem(sys.modules, "own_step", raising=False)
    (tmp_path / "own_step.py").write_text(OWN)
    return lambda *argv: run("memory", *argv)


@needs_gpu_compiler
def test_memory_of_own_steps(run_memory, tmp_path):
    code, out, err = run_memory("own_step:one", "--batch-size", "4", "--target", "l4")
    assert (code, err) == (0, "")
    assert "one: 8.2 kB at the peak fits in 17.7 GB (75% of NVIDIA L4)" in out
    code, out, _ = run_memory("own_step:two", "--batch-size", "4", "--plot", "a.png", "--json")
    plans = json.loads(out)
    assert code == 0 and list(plans) == ["sum", "sin"]
    assert plans["sin"]["peak_device_bytes"] == 2 * 4 * 4 * 256
    assert (tmp_path / "a.png").stat().st_size > 1000


@needs_gpu_compiler
@pytest.mark.parametrize("as_json", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_memory_of_the_largest_batch(run_memory, as_json):
    argv = "own_step:one", "--max-batch", "--target", "l4", "--memory-fraction", "0.0001"
    code, out, _ = run_memory(*argv, *(["--json"] if as_json else []))
    largest = int(0.0001 * 22 * 2**30) // 2048
    assert code == 0 and str(largest) in out
    assert not as_json or json.loads(out)["one"]["batch_size"] == largest


@needs_gpu_compiler
def test_memory_of_a_small_densenet(run_memory):
    argv = "densenet", "--depth", "10", "--growth-rate", "1", "--image-size", "4"
    code, out, err = run_memory(*argv, "--only", "effjax conv", "--batch-size", "2")
    assert (code, err) == (0, "")
    assert "effjax conv: " in out and "fits in" in out and "plain" not in out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_of_a_densenet(run_memory):
    argv = "densenet", "--depth", "10", "--growth-rate", "4", "--image-size", "8"
    only = "--only", "effjax conv", "--only", "plain"
    code, out, err = run_memory(*argv, *only, "--batch-size", "4", "--num-devices", "2")
    assert (code, err) == (0, "")
    assert "plain" in out and "effjax conv" in out and "jax.checkpoint" not in out
    assert "all-reduce" in out and "each of 2" in out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_of_a_small_language_model(run_memory):
    argv = "lm", "--layers", "1", "--width", "8", "--context", "4", "--batch-size", "2"
    code, out, err = run_memory(*argv, "--only", "in memory", "--target", "l4")
    assert (code, err) == (0, "")
    assert "in memory: " in out and "fits in 17.7 GB" in out and "offload" not in out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_of_a_language_model(run_memory):
    only = "--only", "in memory", "--only", "offload all, fused"
    argv = "lm", "--layers", "6", "--width", "64", "--context", "16", "--batch-size", "4"
    code, out, err = run_memory(*argv, *only, "--num-microbatches", "2", "--json")
    assert (code, err) == (0, "")
    plans = json.loads(out)
    parameters = 4 * 6 * (12 * 64**2 + 2 * 64)
    assert plans["in memory"]["host"]["arguments"] == 0
    assert plans["in memory"]["device"]["arguments"] >= 3 * parameters
    offloaded = plans["offload all, fused"]
    assert offloaded["host"]["arguments"] == offloaded["host"]["aliased"] == 3 * parameters


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no_such_module:f"], "there is no module no_such_module"),
        (["own_step:nothing"], "own_step has no function 'nothing'"),
        (["own_step:number"], "own_step has no function 'number'"),
        (["own_step:wrong"], "must return (fn, *args) or a dict of such by name, not int"),
        (["own_step:one", "--target", "h300"], "neither one of h200"),
        (["own_step:two", "--only", "cos"], "--only 'cos' must be one of sum, sin"),
        (["own_step:one", "--plot", "no/where.png"], "there is no folder no"),
        (["own_step:one", "--memory-fraction", "2"], "must lie in (0, 1]"),
        (["densenet", "--layers", "2"], "--layers is not an option of densenet"),
        (["lm", "--depth", "22"], "--depth is not an option of lm"),
        (["lm", "--width", "9"], "width (=9) must be divisible by 2 · heads (=4)"),
        (["own_step:one", "--batch-size", "3", "--num-devices", "2"], "divisible by num_devices"),
        (["densenet", "--depth", "11"], "`depth` (=11)"),
        (["densenet", "--depth", "10", "--image-size", "2"], "is too small"),
        (["resnet50"], "must be one of densenet-bc"),
    ],
)
def test_memory_says_what_is_wrong(run_memory, argv, message):
    code, out, err = run_memory(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err


def test_memory_without_the_compiler(run_memory, monkeypatch):
    monkeypatch.setattr("effjax.memory._compile._PLUGINS", ())
    code, out, err = run_memory("own_step:one")
    assert (code, out) == (1, "") and one_line(err) and 'pip install "effjax[plan]"' in err
