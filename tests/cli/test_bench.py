"""`effjax bench` with benchmarks that measure nothing."""

import json
import shlex

import pytest

from effjax.bench import suite
from effjax.bench._result import Result, Unavailable
from tests.cli.command import one_line

ROWS = [{"name": "theirs", "ratio": 1.0}, {"name": "effjax", "ratio": 0.5}]


def interrupted():
    yield Result("first", "a table", {}, ROWS)
    raise KeyboardInterrupt


def failing():
    yield Result("half", "a table before it fails", {}, ROWS)
    raise ValueError("no good\nat all")


def unavailable():
    raise Unavailable("what it needs")
    yield


FAKES = {
    "works": lambda: iter([Result("one", "a table", {"reference": "theirs"}, ROWS)]),
    "fails": failing,
    "lacks": unavailable,
    "stops": interrupted,
}


@pytest.fixture
def fakes(monkeypatch):
    """In the place of the real ones."""
    sizes = []

    def results_of(name, size):
        sizes.append(size)
        return FAKES[name]()

    known = {name: suite.Benchmark(name, f"that {name}") for name in FAKES}
    monkeypatch.setattr(suite, "BENCHMARKS", known)
    monkeypatch.setattr(suite, "results_of", results_of)
    return sizes


def test_list(run):
    code, out, err = run("bench", "--list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(suite.BENCHMARKS)


def test_one_benchmark(run, fakes, tmp_path):
    code, out, _ = run("bench", "works", "--size", "published", "--out", "new/folder")
    folder = tmp_path / "new" / "folder"
    assert code == 0 and fakes == ["published"]
    record = json.loads((folder / "one.json").read_text())
    argv = shlex.split(record["command"])
    assert argv == "effjax bench works --size published --out new/folder".split()
    assert record["machine"]["cpu"] and record["machine"]["threads"] >= 1
    assert record["rows"] == ROWS and record["versions"]["jax"]
    summary = (folder / "summary.md").read_text()
    assert "| effjax | 0.50 |" in summary and "![a table](one.svg)" in summary
    assert record["machine"]["cpu"] in summary and (folder / "one.svg").exists()
    headline = "works: a table: effjax 0.50 (0.50–0.50) of the time of theirs"
    assert headline in summary and headline in out


def test_one_that_fails_or_lacks_something_keeps_the_others(run, fakes, tmp_path):
    code, out, _ = run("bench", "fails", "lacks", "works", "--out", ".")
    assert code == 1 and fakes == ["small"] * 3
    for name in ("half.json", "one.json", "one.svg", "half.svg"):
        assert (tmp_path / name).exists()
    summary = (tmp_path / "summary.md").read_text()
    for text in (out, summary):
        assert "fails: FAILED, ValueError: no good (see fails.log)" in text
        assert "lacks: left out, what it needs" in text
    assert "at all" in (tmp_path / "fails.log").read_text()
    assert run("bench", "lacks", "--out", "other")[0] == 0


def test_ctrl_c_leaves_what_is_done(run, fakes, tmp_path):
    code, out, err = run("bench", "works", "stops", "fails", "--out", ".")
    assert code == 130 and err == "effjax: interrupted\n" and fakes == ["small"] * 2
    assert "interrupted in stops; what was found is in" in out
    assert "a table" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "one.json").exists() and (tmp_path / "first.json").exists()


def test_all_are_run_in_their_order(run, fakes, monkeypatch):
    monkeypatch.setitem(FAKES, "stops", FAKES["works"])
    code, out, _ = run("bench", "all", "--out", ".")
    assert code == 1
    order = [line.split()[1] for line in out.splitlines() if line.startswith("[")]
    assert order == [f"{name}:" for name in FAKES]


def test_what_is_wrong_is_said_before_anything_runs(run, fakes, tmp_path):
    (tmp_path / "file").touch()
    for argv, words in {
        (): "--list shows them",
        ("works", "deform", "--out", "new"): "'deform' must be one of all, works, fails, lacks",
        ("works",): "--out is missing",
        ("works", "--out", "file"): "--out file: File exists; give a folder",
        ("works", "--out", "file/new"): "--out file/new: Not a directory",
    }.items():
        code, out, err = run("bench", *argv)
        assert (code, out) == (2, "") and one_line(err) and words in err, argv
    assert not fakes and not (tmp_path / "new").exists()


def test_a_package_that_is_missing(run, fakes, monkeypatch):
    def imports(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setitem(FAKES, "works", lambda: imports("optax.contrib"))
    code, out, _ = run("bench", "works", "--out", ".")
    assert code == 0 and 'optax is missing; run pip install "effjax[train]"' in out
    monkeypatch.setitem(FAKES, "works", lambda: imports("effjax.lost"))
    code, out, _ = run("bench", "works", "--out", ".")
    assert code == 1 and "works: FAILED, ModuleNotFoundError: No module named" in out
