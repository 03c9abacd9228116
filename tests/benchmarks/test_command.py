"""`python -m benchmarks`, its tables, pictures and JSON, with benchmarks that measure nothing."""

import importlib
import json
import pathlib
import sys
import types

import pytest

from benchmarks import __main__ as command
from benchmarks import plots, pytorch
from benchmarks.checks import sass
from benchmarks.measure import quartiles, time_in_turn
from benchmarks.results import (
    Bars,
    Curves,
    Result,
    UnavailableError,
    as_markdown,
    cpu_name,
    headline,
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
    assert "| effjax | 0.50 |" in summary and "![published](works.svg)" in summary
    assert record["machine"]["cpu"] in summary and (folder / "works.svg").exists()
    line = "works: published: effjax 0.50 of the time of theirs"
    assert line in summary and line in capsys.readouterr().out


def test_failures_keep_the_other_results(tmp_path, capsys):
    assert command.main(["fails", "lacks", "misses", "works", "--out", "."]) == 1
    for name in ("fails.json", "works.json", "works.svg", "fails.svg"):
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
        (["works", "deform", "--out", "new"], "'deform' is not one of all, batch-norm,"),
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
    assert command.main(["planner", "tpu", "--out", "new"]) == 0
    out = capsys.readouterr().out
    assert "planner: skipped, the compiler for CUDA is not installed" in out
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


def test_tables_have_the_columns_of_their_rows(capsys):
    rows = [
        {"name": "theirs [x]", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0], "temp_bytes": 2e6},
        {"name": "effjax", "ratio": 0.5, "ratio_quartiles": [0.4, 0.75], "temp_bytes": None},
    ]
    result = Result("file", "a title", {}, rows, notes=["A note."])
    lines = as_markdown(result).splitlines()
    assert lines[:3] == ["## a title", "", "| program | x reference | quartiles | temp [MB] |"]
    assert lines[4] == "| theirs [x] | 1.00 | 1.00–1.00 | 2.0 |"
    assert lines[5] == "| effjax | 0.50 | 0.40–0.75 |  |" and lines[-1] == "A note."
    print_table(result)
    out = capsys.readouterr().out
    assert "theirs [x]" in out and "temp [MB]" in out and "A note." in out


def draw_svg(tmp_path, rows, *plot):
    """Draw rows; return the text of the picture."""
    plots.save(plots.draw(Result("file", "a title", {}, rows, *plot)), tmp_path / "picture.svg")
    return (tmp_path / "picture.svg").read_text()


def test_bars(tmp_path):
    rows = [
        {"name": "theirs", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]},
        {"name": "effjax", "ratio": 0.52, "ratio_quartiles": [0.4, 0.75]},
        {"name": "fragment"},
    ]
    svg = draw_svg(tmp_path, rows)
    assert "0.52" in svg and "a title" in svg and "fragment" not in svg
    rows = [{"name": "a", "of": "x", "mean": 1e4, "error": e} for e in (0.5, 1e-5)]
    svg = draw_svg(tmp_path, rows, Bars("error", "error", groups=["of", "mean"], log=True))
    assert "a, x, mean 10000" in svg and "1.0e-05" in svg
    svg = draw_svg(tmp_path, rows, Bars("error", "error [1/1000]", log=True, unit=1e-3))
    assert ">500<" in svg and ">0.01<" in svg  # values in the unit of the label
    assert plots.draw(Result("file", "t", {}, [{"name": "a"}])) is None
    assert plots.draw(Result("file", "t", {}, rows, None)) is None


def test_curves(tmp_path):
    rows = [
        {"name": name, "layers": n, "bytes": factor * n**power}
        for name, factor, power in (("plain", 3, 2), ("effjax", 5, 1), ("close", 5.01, 1))
        for n in (12, 24, 96)
    ]
    plot = Curves("layers", "bytes", "memory [MB]", 1e6)
    svg = draw_svg(tmp_path, rows, plot)
    assert svg == draw_svg(tmp_path, rows, plot)  # pictures of equal results are equal files
    assert "plain  0.0276  ∝ layers^2.00" in svg and ">96<" in svg
    assert "effjax  0.00048  ∝ layers^1.00" in svg
    assert plots.draw(Result("file", "t", {}, [{"name": "a", "layers": 2}], plot)) is None


def test_a_method_has_one_color():
    """Check that programs of published results have the color of their method."""
    others = (
        "checkpoint_memory", "clipping", "fit_", "finetune", "packed_rows", "optimizers_offload",
        "published", "run_memory", "torch_loop", "trl",
    )  # fmt: skip
    # Their rows are not methods.
    files = [p for p in ROOT.glob("docs/measured/*/*.json") if not p.name.startswith(others)]
    results = [json.loads(path.read_text()) for path in files]
    names = {row["name"] for result in results for row in result.get("rows", ()) if "name" in row}
    gray = {name for name in names if plots.color_of(name) == plots.TEXT}
    counts = *sass.KERNELS, "arguments and results", "each sampled pixel copied"
    assert len(names) > 20 and not {n for n in gray if not n.startswith(counts)}
    ours = 'effjax save="conv"', "effjax conv", 'effjax save="features"', "effjax features"
    conv, same, features, also = map(plots.color_of, ours)
    assert conv == same != features == also
    assert len(set(plots.PALETTE.values())) == len(plots.PALETTE)
    steps = ("plain autodiff", "jax.checkpoint a layer", "jax.checkpoint pass-through",
             "jax.checkpoint pass-through, recompute conv1", *ours[::2])  # fmt: skip
    assert len({plots.color_of(step) for step in steps}) == len(steps)


def test_headlines():
    def line(rows, config, *plot):
        return headline(Result("name", "title", config, rows, *plot))

    rows = [{"name": n, "ratio": 0.5, "ratio_quartiles": [0.4, 0.6]} for n in "ab"]
    config = {"ours": ["b"], "reference": "a"}
    assert line(rows, config) == "title: b 0.50 (0.40–0.60) of the time of a"
    rows = [{"name": "a", "exponent": 1.5}, {"name": "b"}]
    assert line(rows, {}, Curves("x", "y", "label")) == "title: a ∝ depth^1.50"
    rows = [{"name": "plain", "ratio": 1.0}, {"name": "effjax", "ratio": 0.25}]
    peak = Bars("peak_bytes", "peak")
    assert line(rows, {}, peak) == "title: effjax 0.25 of the memory of plain"
