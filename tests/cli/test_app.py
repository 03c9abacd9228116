"""`effjax` itself: help and version."""

import subprocess
import sys

import pytest

import effjax


def test_version(run):
    assert run("--version") == (0, f"effjax {effjax.__version__}\n", "")


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
