"""`effjax` itself: help, version, missing extras."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_train_extra(run, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = run("train", "densenet", "--help")
    assert (code, out) == (2, "")
    assert (
        err == f'effjax: {missing} is missing. Run pip install ".[train]" in a clone of effjax.\n'
    )
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["devices"]


def test_version(run):
    import effjax

    assert run("--version") == (0, f"effjax {effjax.__version__}\n", "")


@pytest.mark.parametrize("command", [["train", "lm"], ["finetune", "model"], ["memory", "lm"]])
def test_an_option_that_is_given_twice(run, command):
    """The first value would be ignored."""
    code, _, err = run(*command, "--seed", "1", "--steps=1", "--seed=2")
    assert (code, err) == (2, "effjax: --seed is given 2 times. Give one.\n")


@pytest.mark.parametrize("argv", [["--help"], ["train", "densenet", "--help"]])
def test_help_does_not_import_jax(argv):
    pytest.importorskip("typer")
    code = (
        f"import sys; from effjax.cli import main; main({argv});"
        "heavy = {'jax', 'numpy', 'flax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Usage: effjax" in ran.stdout
