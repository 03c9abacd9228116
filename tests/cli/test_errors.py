"""Commands with wrong arguments: one screen at most, no traceback, and the right exit code."""

import importlib
import math

import pytest

STEP = """
import jax, jax.numpy as jnp

def fails(batch):
    return lambda x: x @ x, jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def long(batch):
    raise RuntimeError("much to say, " * 1000)
"""
USAGE, FAILED = 2, 1


def shows(wanted, *argv):
    return pytest.param(argv, wanted, id=" ".join(argv) or "nothing")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        shows(USAGE),
        shows(USAGE, "trian"),
        shows(USAGE, "--nope"),
        shows(USAGE, "doctor", "--nope"),
        shows(USAGE, "doctor", "now"),
        shows(USAGE, "memory"),
        shows(USAGE, "memory", "lm", "densenet"),
        shows(USAGE, "memory", "lm", "--nope"),
        shows(USAGE, "memory", "lm", "--batch-size", "many"),
        shows(USAGE, "memory", "lm", "--batch-size", "0"),
        shows(USAGE, "memory", "lm", "--batch-size"),
        shows(USAGE, "memory", "lm", "--dtype", "int8"),
        shows(USAGE, "memory", "lm", "--target", "h300"),
        shows(USAGE, "memory", "lm", "--target", "/"),
        shows(USAGE, "memory", "lm", "--target", "x" * 300),
        shows(USAGE, "memory", "lm", "--only", "nothing"),
        shows(USAGE, "memory", "lm", "--width", "7"),
        shows(USAGE, "memory", "lm", "--num-microbatches", "3"),
        shows(USAGE, "memory", "lm", "--plot", "no/where.png"),
        shows(USAGE, "memory", "lm", "--memory-fraction", "nan"),
        shows(USAGE, "memory", "lm", "--multiple-of", "8"),
        shows(USAGE, "memory", "densenet", "--depth", "5"),
        shows(USAGE, "memory", "densenet", "--growth-rate", "-1"),
        shows(USAGE, "memory", "densenet121", "--depth", "22"),
        shows(USAGE, "memory", "alexnet"),
        shows(USAGE, "memory", ""),
        shows(USAGE, "memory", ":"),
        shows(USAGE, "memory", "json:nothing"),
        shows(USAGE, "memory", "os.path:join.more"),
        shows(USAGE, "memory", "math:hypot.__call__"),
        shows(FAILED, "memory", "mine:fails"),
        shows(FAILED, "memory", "mine:long"),
        shows(USAGE, "convert"),
        shows(USAGE, "convert", "nowhere.pth", "--to", "new"),
        shows(USAGE, "convert", "nowhere.pth", "--model", "alexnet", "--to", "new"),
        shows(USAGE, "convert", "nowhere.pth", "--model", "densenet121", "--to", "new"),
        shows(USAGE, "train"),
        shows(USAGE, "train", "vgg"),
        shows(USAGE, "train", "resnet", "--depth", "20"),
        shows(USAGE, "train", "densenet", "--nope"),
        shows(USAGE, "train", "densenet", "--epochs", "x"),
        shows(USAGE, "train", "densenet", "--epochs", "0"),
        shows(USAGE, "train", "densenet", "--save", "all"),
        shows(USAGE, "train", "densenet", "--depth", "5"),
        shows(USAGE, "train", "densenet", "--data", "mnist"),
        shows(USAGE, "train", "densenet", "--data", "cifar10:nowhere"),
        shows(USAGE, "train", "densenet", "--resume", "nowhere"),
        shows(USAGE, "train", "resnet", "--compare-plain"),
        shows(USAGE, "train", "lm", "--data", "text:nowhere"),
        shows(USAGE, "train", "lm", "--width", "7"),
        shows(USAGE, "train", "lm", "--offload", "some"),
    ],
)
def test_one_screen(run, tmp_path, monkeypatch, argv, wanted):
    monkeypatch.setenv("COLUMNS", "80")
    plan = importlib.import_module("effjax.memory.plan")
    monkeypatch.setattr(plan, "check_compiler", lambda: None)
    (tmp_path / "mine.py").write_text(STEP)
    code, out, err = run(*argv)
    shown = out + err
    rows = sum(max(math.ceil(len(line) / 80), 1) for line in shown.splitlines())
    assert code == wanted, shown
    assert 1 <= rows <= 24 and "Traceback" not in shown, shown
