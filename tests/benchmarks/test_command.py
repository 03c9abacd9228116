"""`python -m benchmarks`, its tables and JSON, with benchmarks that measure nothing."""

import importlib
import json
import pathlib
import sys
import types

import pytest

from benchmarks import __main__ as command
from benchmarks import pytorch
from benchmarks.measure import quartiles, time_in_turn
from benchmarks.results import (
    Column,
    Result,
    UnavailableError,
    as_markdown,
    cpu_name,
    headline,
    make_table,
    num_threads,
    print_table,
)

ROOT = pathlib.Path(__file__).parents[2]
ROWS = [{"name": "theirs", "ratio": 1.0}, {"name": "effjax", "ratio": 0.5}]


# The errors after the result of each subject.
SUBJECTS: dict[str, BaseException | None] = {
    "works": None,
    "fails": ValueError("no good\nat all"),
    "lacks": UnavailableError("the GPU compiler is not installed"),
    "misses": ModuleNotFoundError("No module named 'optax.contrib'", name="optax.contrib"),
    "broken": ModuleNotFoundError("No module named 'effjax.lost'", name="effjax.lost"),
    "stops": KeyboardInterrupt(),
}


def subject(name, error):
    def run(size):
        yield Result(name, size, {"reference": "theirs"}, ROWS)
        if error is not None:
            raise error

    return types.SimpleNamespace(run=run)


@pytest.fixture(autouse=True)
def subjects(monkeypatch, tmp_path):
    """Add modules of subjects that measure nothing, and change to an empty folder."""
    for name, error in SUBJECTS.items():
        monkeypatch.setitem(command.SUBJECTS, name, f"it {name}")
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", subject(name, error))
    monkeypatch.chdir(tmp_path)


def test_every_subject_has_a_file(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(command.SUBJECTS)
    for name in command.SUBJECTS:
        assert importlib.import_module(f"benchmarks.{name.replace('-', '_')}").run


def test_one_benchmark(tmp_path, capsys):
    assert command.main(["works", "--size", "published", "--out", "new/folder"]) == 0
    folder = tmp_path / "new" / "folder"
    record = json.loads((folder / "works.json").read_text())
    assert record["command"] == "python -m benchmarks works --size published --out new/folder"
    assert record["machine"]["cpu"] and record["machine"]["threads"] >= 1
    assert record["rows"] == ROWS and record["versions"]["jax"]
    summary = (folder / "summary.md").read_text()
    assert "| effjax | 0.50 |" in summary and record["machine"]["cpu"] in summary
    line = "works: published: effjax 0.50 of theirs"
    assert line in summary and line in capsys.readouterr().out


def test_failures_keep_the_other_results(tmp_path, capsys):
    assert command.main(["fails", "lacks", "misses", "works", "--out", "."]) == 1
    for name in ("fails.json", "works.json"):
        assert (tmp_path / name).exists()
    summary = (tmp_path / "summary.md").read_text()
    for text in (capsys.readouterr().out, summary):
        assert "fails: FAILED, ValueError: no good (see fails.log)" in text
        assert "lacks: skipped, the GPU compiler is not installed" in text
        assert "No module named 'optax.contrib'; run pip install" in text
    assert "at all" in (tmp_path / "fails.log").read_text()
    assert command.main(["lacks", "misses", "--out", "other"]) == 0
    assert command.main(["broken", "--out", "other"]) == 1


def test_all_runs_every_subject_up_to_ctrl_c(monkeypatch, tmp_path, capsys):
    names = ["works", "stops", "fails"]
    monkeypatch.setattr(command, "SUBJECTS", {name: f"it {name}" for name in names})
    assert command.main(["all", "--out", "."]) == 130
    out = capsys.readouterr().out
    run = [line.split()[1] for line in out.splitlines() if line.startswith("[")]
    assert run == ["works:", "stops:"] and "interrupted in stops" in out
    assert {path.stem for path in tmp_path.glob("*.json")} == {"works", "stops"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--list shows the names"),
        (["works", "deform", "--out", "new"], "'deform' is not one of all, sync-batch-norm,"),
        (["works"], "--out is missing"),
        (["works", "--out", "file"], "--out file: File exists"),
    ],
)
def test_rejects_wrong_arguments(tmp_path, capsys, argv, message):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        command.main(argv)
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EFFJAX_COMPILERS", str(tmp_path / "file" / "compilers"))
    assert command.main(["densenet", "tpu", "--out", "new"]) == 0
    out = capsys.readouterr().out
    assert "densenet: skipped, the compiler for CUDA is not installed" in out
    assert "tpu: skipped, the compiler for TPU is not installed" in out


def test_a_missing_peer_is_reported(monkeypatch):
    pytorch.missing.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed (pip install torch torchvision)" in pytorch.missing("torchvision")

    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist\nand more")

    pytorch.missing.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.import_module", import_module)
    reason = "RuntimeError: operator torchvision::nms does not exist)."
    assert pytorch.missing("torchvision").endswith(reason)
    pytorch.missing.cache_clear()


def test_quartiles_enclose_the_median():
    assert quartiles([1, 2, 3, 4, 5], 1) == [2, 4] and quartiles([7.0], 1) == [7, 7]
    times = time_in_turn({"a": lambda: 1, "b": lambda: 2}, reference="a", rounds=4)
    assert times["a"]["ratio_quartiles"] == [1, 1] and times["a"]["ratio"] == 1
    for key in ("ratio", "seconds"):
        low, high = times["b"][f"{key}_quartiles"]
        assert low <= times["b"][key] <= high


def test_cpu_name(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: A CPU @ 2 GHz\nmodel name : another\n")
    assert cpu_name(file) == "A CPU @ 2 GHz" and num_threads() >= 1
    file.write_text("processor : 0\n")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_name(file) == cpu_name(tmp_path / "none") == "aarch64"


def test_printed_tables_have_the_columns_of_their_rows(tmp_path, monkeypatch, capsys):
    rows = [
        {"name": "theirs [x]", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0], "temp_bytes": 2e6},
        {"name": "effjax", "ratio": 0.5, "ratio_quartiles": [0.4, 0.75], "temp_bytes": None},
    ]
    result = Result("file", "a title", {}, rows, notes=["A note."])
    print_table(result)
    out = capsys.readouterr().out
    assert "theirs [x]" in out and "temp [MB]" in out and "A note." in out
    monkeypatch.setitem(
        sys.modules, "benchmarks.works", types.SimpleNamespace(run=lambda _: [result])
    )
    assert command.main(["works", "--out", "."]) == 0
    summary = (tmp_path / "summary.md").read_text()
    assert """## a title

| program | x reference | quartiles | temp [MB] |
|---|---|---|---|
| theirs [x] | 1.00 | 1.00–1.00 | 2.0 |
| effjax | 0.50 | 0.40–0.75 | |

A note.
""" in summary.replace("\n\n\n", "\n\n")


def test_a_line_joins_the_rows_that_agree():
    rows = [
        {"name": name, "layers": layers, "bytes": size, "place": place}
        for name, layers, size, place in (
            ("a", 4, 1500, "host"), ("a", 4, 2500, "host"), ("a", 8, 0, "device"), ("b", 8, 3, ""),
        )
    ]  # fmt: skip
    columns = [
        Column("", lambda row: row["name"].upper()),
        Column("4 [KB]", "bytes", "{:.1f}", 1e3, {"layers": 4}),
        Column("8", "bytes", "{:.1f}", 1e3, {"layers": (8, 16)}),
        Column("in", "place", only={"layers": 4}),
        Column("nowhere", "missing"),
    ]
    table = make_table(rows, columns, ["name"])
    assert table == [
        ["", "4 [KB]", "8", "in"], ["A", "1.5 / 2.5", "0.0", "host"], ["B", "", "0.0", ""]
    ]  # fmt: skip
    assert (
        as_markdown(table)
        == """\
| | 4 [KB] | 8 | in |
|---|---|---|---|
| A | 1.5 / 2.5 | 0.0 | host |
| B | | 0.0 | |
"""
    )


def test_headlines():
    def line(rows, config):
        return headline(Result("name", "title", config, rows))

    rows = [{"name": n, "ratio": 0.5, "ratio_quartiles": [0.4, 0.6]} for n in "ab"]
    config = {"ours": ["b"], "reference": "a"}
    assert line(rows, config) == "title: b 0.50 (0.40–0.60) of a"
    assert line([{"name": "a"}, {"name": "b"}], {}) == "title"
    rows = [{"name": "plain", "ratio": 1.0}, {"name": "effjax", "ratio": 0.25}]
    assert line(rows, {}) == "title: effjax 0.25 of plain"
