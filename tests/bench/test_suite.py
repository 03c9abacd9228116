"""What all benchmarks share, and those that only `effjax bench` has."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from effjax.bench import _plot, _torch, densenet, depth, offload, planner, suite, sync_batch_norm
from effjax.bench._measure import exponent, quartiles, threads, time_in_turn
from effjax.bench._offload_forms import IN_MEMORY, INPUTS_MOVED, Setting, peers
from effjax.bench._result import (
    Bars,
    Curves,
    Result,
    Unavailable,
    as_markdown,
    cpu_name,
    need_compiler,
    show,
)
from tests.programs import needs_gpu_compiler


def by_name(result):
    return {row["name"]: row for row in result.rows}


def test_all_have_results():
    for found in suite.BENCHMARKS.values():
        module = importlib.import_module(f"effjax.bench.{found.module}")
        assert callable(module.results) and callable(module.main), module


def test_a_median_has_its_quartiles():
    assert quartiles([1, 2, 3, 4, 5], 1) == [2, 4] and quartiles([7.0], 1) == [7, 7]
    found = time_in_turn({"a": lambda: 1, "b": lambda: 2}, reference="a", rounds=4)
    assert found["a"]["ratio_quartiles"] == [1, 1] and found["a"]["ratio"] == 1
    low, high = found["b"]["ratio_quartiles"]
    assert low <= found["b"]["ratio"] <= high
    low, high = found["b"]["seconds_quartiles"]
    assert low <= found["b"]["seconds"] <= high


def test_the_exponent_of_growth():
    x = [12, 24, 48, 96]
    assert exponent(x, [3 * n**2 for n in x]) == 2 and exponent(x, x) == 1


def test_the_name_of_the_cpu(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: A CPU @ 2 GHz\nmodel name : another\n")
    assert cpu_name(file) == "A CPU @ 2 GHz"
    file.write_text("processor : 0\n")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_name(file) == cpu_name(tmp_path / "none") == "aarch64"
    assert threads() >= 1


def test_a_table_has_the_columns_that_rows_have(capsys):
    rows = [
        {"name": "theirs [x]", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0], "temp_bytes": 2e6},
        {"name": "effjax", "ratio": 0.5, "ratio_quartiles": [0.4, 0.75], "temp_bytes": None},
    ]
    result = Result("file", "a title", {}, rows, notes=["A note."])
    lines = as_markdown(result).splitlines()
    assert lines[:3] == ["## a title", "", "| program | x reference | quartiles | temp [MB] |"]
    assert lines[4] == "| theirs [x] | 1.00 | 1.00–1.00 | 2.0 |"
    assert lines[5] == "| effjax | 0.50 | 0.40–0.75 |  |" and lines[-1] == "A note."
    show(result)
    out = capsys.readouterr().out
    assert "theirs [x]" in out and "temp [MB]" in out and "A note." in out


def drawn(tmp_path, result):
    """The picture's text."""
    figure = _plot.draw(result)
    assert figure is not None
    _plot.save(figure, tmp_path / "picture.svg")
    first = (tmp_path / "picture.svg").read_bytes()
    _plot.save(_plot.draw(result), tmp_path / "picture.svg")
    assert first == (tmp_path / "picture.svg").read_bytes()
    _plot.save(figure, tmp_path / "picture.png")
    return first.decode()


def test_bars(tmp_path):
    rows = [
        {"name": "theirs", "ratio": 1.0, "ratio_quartiles": [1.0, 1.0]},
        {"name": "effjax", "ratio": 0.52, "ratio_quartiles": [0.4, 0.75]},
        {"name": "part"},
    ]
    svg = drawn(tmp_path, Result("file", "a title", {}, rows))
    assert "0.52" in svg and "a title" in svg and "part" not in svg
    plot = Bars("error", "error", groups=["of", "mean"], log=True)
    rows = [{"name": "a", "of": "x", "mean": 1e4, "error": e} for e in (0.5, 1e-5)]
    svg = drawn(tmp_path, Result("file", "t", {}, rows, plot))
    assert "a, x, mean 10000" in svg and "1.0e-05" in svg
    assert _plot.draw(Result("file", "t", {}, [{"name": "a"}])) is None
    assert _plot.draw(Result("file", "t", {}, rows, None)) is None


def test_curves(tmp_path):
    rows = [
        {"name": name, "layers": n, "bytes": factor * n**power}
        for name, factor, power in (("plain", 3, 2), ("effjax", 5, 1), ("close", 5.01, 1))
        for n in (12, 24, 96)
    ]
    plot = Curves("layers", "bytes", "memory [MB]", 1e6)
    svg = drawn(tmp_path, Result("file", "by depth", {}, rows, plot))
    assert (
        "plain  0.0276  ∝ layers^2.00" in svg
        and "effjax  0.00048  ∝ layers^1.00" in svg
        and ">96<" in svg
    )
    assert _plot.draw(Result("file", "t", {}, [{"name": "a", "layers": 2}], plot)) is None


def test_headlines_say_every_row_of_effjax():
    rows = [{"name": n, "ratio": 0.5, "ratio_quartiles": [0.4, 0.6]} for n in "ab"]
    config = {"ours": ["b"], "reference": "a"}
    found = suite.headlines("name", Result("file", "title", config, rows))
    assert found == ["name: title: b 0.50 (0.40–0.60) of the time of a"]
    rows = [{"name": "a", "exponent": 1.5}, {"name": "b"}]
    found = suite.headlines("name", Result("file", "title", {}, rows, Curves("x", "y", "l")))
    assert found == ["name: title: a ∝ depth^1.50"]


def test_a_peer_that_is_not_there(monkeypatch):
    _torch.find.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _torch.find("torchvision")[0] is None
    assert "pip install torch" in _torch.find("torchvision")[1]

    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist\nand more")

    _torch.find.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.import_module", broken)
    why = "torchvision is installed and does not load (RuntimeError: operator torchvision::nms"
    assert _torch.find("torchvision") == (None, f"{why} does not exist)")
    _torch.find.cache_clear()


def test_without_the_gpu_compiler(monkeypatch):
    def check():
        raise offload.PlanError("the GPU compiler is not installed: pip install x")

    monkeypatch.setattr("effjax.bench._result.check_compiler", check)
    for name in ("planner", "cross-entropy", "resnet"):
        with pytest.raises(Unavailable, match="planned for a GPU: the GPU compiler is not inst"):
            next(suite.results_of(name, "small"))
    with pytest.raises(Unavailable):
        need_compiler()


def test_what_is_kept_grows_less(monkeypatch):
    monkeypatch.setattr(_torch, "find", lambda name: (None, "not here"))
    found = depth.kept((2, 4, 8), 2)
    assert found.notes[-1] == "Without PyTorch: not here."
    exponents = {row["name"]: row["exponent"] for row in found.rows if "exponent" in row}
    assert set(exponents) == set(depth.BLOCKS)
    assert exponents['effjax save="features"'] < 1 < exponents["plain autodiff"]
    kept = {(row["name"], row["layers"]): row["kept_bytes"] for row in found.rows}
    assert kept['effjax save="features"', 8] < kept["jax.checkpoint a layer", 8]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_depth_planned(monkeypatch):
    monkeypatch.setattr(depth, "PLANNED", depth.PLANNED[-2:])
    found = depth.planned((1, 2), 2, "l4")
    assert [(row["name"], row["layers"]) for row in found.rows] == [
        (name, n) for name in depth.PLANNED for n in (1, 2)
    ]
    assert all(row["peak_bytes"] > row["temp_bytes"] > 0 for row in found.rows)


def test_batch_norm_over_devices():
    rows = sync_batch_norm.bench_devices(sync_batch_norm.meshes([8])[0], (8, 2, 3, 4), 1)
    assert [row["name"] for row in rows] == list(sync_batch_norm.NORMS)
    assert all(row["devices"] == 8 and row["difference"] < 1e-4 for row in rows)
    assert all(1 <= row["all_reduces"] <= rows[0]["all_reduces"] for row in rows)
    assert rows[2]["kept"] < rows[0]["kept"]


@pytest.mark.exhaustive
def test_batch_norm_over_devices_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sync_batch_norm.SIZES, "small", (32, 4, 4, 8))
    devices, errors = sync_batch_norm.results("small")
    assert {row["devices"] for row in devices.rows} == {1, 2, 4, 8}
    found = {(row["name"], row["mean"]): row["variance_error"] for row in errors.rows}
    assert found["Flax linen.BatchNorm", 1e4] > 0.1 > 1e-3 > found["effjax.nnx.BatchNorm", 1e4]


@pytest.mark.exhaustive
def test_densenet():
    rows = by_name(densenet.bench(10, 2, 8, 1))
    assert list(rows)[:4] == ["plain", "jax.checkpoint", "effjax conv", "effjax features"]
    assert rows["plain"]["ratio"] == 1
    assert all(row.get("difference", 0) < 1e-3 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_planner():
    found = planner.bench((1, 2), (1,), "l4")
    assert [row["layers"] for row in found.rows] == [1, 2, 1]
    assert all(row["plan_seconds"] > row["trace_seconds"] > 0 for row in found.rows)


@pytest.mark.exhaustive
def test_offload_beside_policies_of_jax():
    setting = Setting(
        layers=2, width=8, heads=2, context=4, batch_size=2, dropout=0.0, vocab_size=16
    )
    forms = {name: peers()[name] for name in (IN_MEMORY, INPUTS_MOVED)}
    found = offload.bench(dataclasses.replace(setting), forms, "step", 1, None)
    assert found.config["ours"] == [] and found.rows[1]["difference"] < 1e-5


@pytest.mark.exhaustive
def test_the_block_in_pytorch():
    pytest.importorskip("torch")
    from effjax.bench import dense_block

    args = dense_block.make_arrays(2, 2, 5, 3, 4, "float32")
    want = jax.jit(dense_block.train_step(dense_block.plain))(*args)
    for step in _torch.block_steps(*args).values():
        got = jax.tree.leaves(step())
        for a, b in zip(got, jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    params, x = depth.shapes(8, 2)
    plain, efficient = (_torch.block_kept_bytes(params, x, e) for e in (False, True))
    assert efficient < plain
    steps = _torch.densenet_steps(10, 2, 8).values()
    losses = [[step() for _ in range(3)] for step in steps]  # they train one network in turn
    assert losses[0][0] > losses[-1][-1]
