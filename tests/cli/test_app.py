import json
import subprocess
import sys

import pytest

from tests.cli.command import TINY


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_train_extra(run, monkeypatch, missing):
    loaded = [n for n in sys.modules if n.startswith("effjax.cli.") or n.split(".")[0] == missing]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = run("train", "densenet")
    assert (code, out) == (2, "")
    assert err == f'effjax: {missing} is missing; run pip install "effjax[train]"\n'
    code, out, _ = run("doctor")
    assert code == 0 and "native kernels: cpu " in out
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["devices"]


def test_version_and_help(run):
    import effjax

    assert run("--version")[:2] == (0, f"effjax {effjax.__version__}\n")
    for argv in (
        ["--help"],
        ["train", "--help"],
        [*TINY[:2], "--help"],
        ["train", "lm", "--help"],
    ):
        code, out, _ = run(*argv)
        assert code == 0 and "Usage: effjax" in out


def test_help_starts_no_backend():
    pytest.importorskip("typer")
    code = (
        "import sys; from effjax.cli import main; main(['train', 'densenet', '--help']);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends;"
        "assert not {'flax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
