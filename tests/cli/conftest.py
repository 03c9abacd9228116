import pytest

from effjax import cli


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty directory; return its exit code, stdout and stderr."""
    for name in ("typer", "rich", "matplotlib", "sklearn", "PIL"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def small_model(monkeypatch):
    """Replace the network and the digits by small ones."""
    from tests.train import small

    monkeypatch.setattr("effjax.train.images.task.model_builder", small.builder)
    monkeypatch.setattr("effjax.train.images.task.load_dataset", lambda *_: small.dataset())
