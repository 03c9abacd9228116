"""What grows in a long run, and what is left of one that is killed."""

import json
import random

import pytest
import typer

from effjax.bench import kill, soak
from effjax.bench.kill import Killed, Trial

pytestmark = pytest.mark.exhaustive


def test_nothing_grows():
    """The same 20,000 steps are in docs/measured; so few show compilations and descriptors."""
    found = soak.soak(500, every=25)
    assert found["compilations"] == found["descriptors"] == 0
    assert found["bytes_a_step"] < 20_000  # allocators still find their size
    losses = [sample["loss"] for sample in found["samples"]]
    assert losses[-1] < losses[0]


def test_what_is_measured_is_said(monkeypatch, tmp_path, capsys):
    grown = {"bytes_a_step": 2000.0, "compilations": 0, "descriptors": 0, "seconds": 1.0}
    monkeypatch.setattr(soak, "soak", lambda *_: grown | {"samples": [{"step": 1}]})
    monkeypatch.setattr("sys.argv", ["soak.py"])
    with pytest.raises(typer.Exit):
        soak.main(json=tmp_path)
    assert "1.907 MiB" in capsys.readouterr().out
    assert json.loads((tmp_path / "soak.json").read_text())["rows"] == [{"step": 1}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        kill.finish(folder / "run", kill.OPTIONS)
        yield kill.final(folder / "run")


@pytest.mark.parametrize("seed", range(2))
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, whole, seed):
    moments = "save", ("step", "start")[seed], "save"
    found = kill.trial(tmp_path / "run", whole, kill.OPTIONS, moments, random.Random(seed))
    assert found.kills and found.same_parameters and found.same_metrics


def test_what_differs_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kill, "finish", lambda *_: None)
    monkeypatch.setattr(kill, "final", lambda *_: None)
    monkeypatch.setattr(kill, "trial", lambda *_: Trial([Killed("save", 1.0)], True, False))
    with pytest.raises(typer.Exit):
        kill.main(trials=1, as_json=tmp_path / "a.json")
    assert "DIFFER" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())[0]["same_parameters"]
