"""The search for the fastest options that fit, and the cache of compiled programs."""

import io
import json
import math
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from effjax.memory import PlanError, choose_options, find_rates
from effjax.memory.compiler import cache
from effjax.memory.compiler.lower import lower
from effjax.memory.compiler.process import CompiledProgram
from effjax.memory.devices import find_target
from tests.memory.conftest import f32
from tests.programs import needs_tpu_compiler

pytestmark = pytest.mark.usefixtures("numbers_are_steps")

GB = 10**9


def results(found):
    """Return the result of each combination, by its values."""
    return {tuple(trial.options.values()): trial.result for trial in found.trials}


def search(sizes, seconds, budget, **options):
    """Search in arrays of bytes and seconds, with an option for each axis."""

    def make_step(**place):
        index = tuple(place.values())
        return ((int(sizes[index]), 0, float(seconds[index])),)

    axes = {name: range(n) for name, n in zip("abc", sizes.shape, strict=False)}
    return choose_options(make_step, axes, budget=budget, max_compiles=1000, **options)


@st.composite
def costs(draw, min_dims=1, max_dims=3):
    """Draw bytes that never grow along an axis, and seconds that never shrink."""
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=max_dims, max_side=5))
    arrays = []
    for _ in range(2):
        values = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, 60)))
        for axis in range(len(shape)):
            values = np.maximum.accumulate(values, axis)
        arrays.append(values)
    return 100 - arrays[0], arrays[1]


budgets = st.integers(30, 110)


@pytest.mark.parametrize("not_by_time", [[], ["a"]])
@given(costs(), budgets, st.randoms())
def test_finds_the_fastest_that_fits(not_by_time, arrays, budget, random):
    sizes, seconds = arrays
    if not_by_time:
        seconds = seconds[random.sample(range(len(seconds)), len(seconds))]
    found = search(sizes, seconds, budget, not_by_time=not_by_time)
    fits = sizes <= budget
    assert found.is_complete and (found.plan is not None) == fits.any()
    if fits.any():
        assert found.plan.step_seconds == seconds[fits].min()
        assert found.plan.peak_device_bytes <= budget
    for trial in found.trials:  # the bounds of the others are right
        place = tuple(trial.options.values())
        assert trial.peak_device_bytes <= sizes[place] and trial.step_seconds <= seconds[place]


@given(costs(1, 1), costs(2, 2), budgets)
def test_number_of_compiled_programs(line, grid, budget):
    """A single option is bisected; two take a walk along the border of those that fit.

    No fewer programs than n + m - 1 suffice for every border in an n x m grid.
    """
    assert search(*line, budget).num_compiled <= math.ceil(math.log2(line[0].size + 1))
    assert search(*grid, budget).num_compiled <= sum(grid[0].shape) + 1


def test_slow_programs_that_do_not_fit_exclude_slower_ones():
    # (1, 1) does not fit. From it, (2, 1) and (2, 2) are known to take 9 s as well.
    sizes = np.array([[9, 8, 4], [8, 7, 4], [8, 7, 3]])
    seconds = np.array([[1, 1, 2], [9, 9, 9], [9, 9, 9]])
    found = search(sizes, seconds, 5)
    assert found.plan.step_seconds == 2 and found.num_compiled <= 4
    assert all("not compiled, slower" in results(found)[place] for place in ((2, 1), (2, 2)))


def test_report():
    numbers = {"all": (40 * GB, 0, 1.0), "some": (20 * GB, 0, 1.3), "none": (10 * GB, 0, 2.0)}
    found = choose_options(
        lambda keep: (numbers[keep],), {"keep": list(numbers)}, target="h100", budget=24 * GB
    )
    assert found.options == {"keep": "some"} and found.is_complete and found.num_compiled == 2
    assert found.plan.fits and found.plan.available_bytes == found.budget == 24 * GB
    assert results(found) == {
        ("some",): "chosen",
        ("all",): "does not fit: 40.0 GB",
        ("none",): "not compiled, slower: at least 1.00×",
    }
    lines = str(found).splitlines()
    assert lines[0].startswith("keep=some: 20.0 GB at the peak fits in 24.0 GB")
    assert lines[2].split("  ") == [
        "keep",
        "device memory",
        "host memory",
        "step time",
        "chosen or not",
    ]
    assert lines[3].split()[:6] == ["some", "20.0", "GB", "0", "B", "1.3"]
    assert ["≥" in line for line in lines[3:6]] == [False, False, True]
    record = json.loads(json.dumps(found.to_dict()))
    assert record["options"] == {"keep": "some"} and record["plan"]["fits"]
    assert [trial["is_compiled"] for trial in record["trials"]] == [True, True, False]
    assert "HloModule" not in json.dumps(record)

    found = choose_options(lambda n: ((n * GB, 0, 1.0),), {"n": [9, 8, 7]}, budget=GB)
    assert found.options is None and found.plan is None and found.is_complete
    assert str(found).startswith("nothing fits in 1.0 GB of NVIDIA H200")
    assert found.num_compiled == 2 and results(found)[7,] == "does not fit: 7.0 GB"


def test_seconds_per_example():
    # A step of 64 takes longer than one of 16, and less for each example.
    for budget, best, seconds in ((100, 64, 7.4), (20, 16, 2.6)):
        found = choose_options(
            lambda batch: ((batch * GB, 0, 1 + batch / 10),), {"batch": [64, 32, 16]},
            budget=budget * GB, examples="batch",
        )  # fmt: skip
        assert found.options == {"batch": best}
        assert found.trials[0].step_seconds == pytest.approx(seconds / best)


def test_bounds_without_compilation():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    on_host = jax.ShapeDtypeStruct((GB,), jnp.float32, sharding=place)  # 4 GB
    link = find_rates("h200").to_device

    def make_step(params, keep):
        args = [on_host] if params == "host" else [f32(2 * GB)]  # 4 or 8 GB
        sizes = {"all": 5 * GB, "none": 3 * GB}
        return (8 * GB + sizes[keep], 0, 2 * GB / link), *args

    def choose(budget, **more):
        options = {"params": ["device", "host"], "keep": ["all", "none"]}
        return choose_options(make_step, options, budget=budget * GB, **more)

    found = choose(12)
    assert found.options == {"params": "device", "keep": "none"} and found.num_compiled == 2
    for trial in found.trials[2:]:
        assert trial.result == "not compiled, slower: at least 2.00×"
        assert trial.peak_host_bytes == 4 * GB and trial.step_seconds == 4 * GB / link

    # Arguments that do not fit, alone or together with the residuals.
    found = choose(7)
    assert all(trial.options["params"] == "host" for trial in found.trials[:2])
    assert results(found)["device", "all"] == "not compiled, does not fit: at least 8.0 GB"
    found = choose(7, min_bytes=lambda **_: (7 * GB + 1, 0))
    assert found.num_compiled == 0 and found.options is None
    found = choose(7, host_memory_bytes=3 * GB)
    reason = "not compiled, does not fit: at least 4.0 GB on the host"
    assert found.num_compiled == 0 and results(found)["host", "all"] == reason


@pytest.mark.parametrize(("budget", "best"), [(9, 0), (5, 1), (4, 3)])
def test_host_memory_excludes_no_others(budget, best):
    """Check that a step with too much host memory is not taken for one with too much memory."""
    numbers = [(9 * GB, 0, 1.0), (5 * GB, 0, 2.0), (4 * GB, 80 * GB, 3.0), (3 * GB, 0, 4.0)]
    found = choose_options(
        lambda n: (numbers[n],), {"n": range(4)}, budget=budget * GB, host_memory_bytes=64 * GB
    )
    assert found.options == {"n": best} and found.is_complete


@needs_tpu_compiler
@pytest.mark.parametrize("num_devices", [1, 4])
def test_host_memory_of_a_tpu_follows_from_shardings(num_devices):
    sharding = NamedSharding(AbstractMesh((num_devices,), ("data",)), PartitionSpec("data"))
    step = (GB, 100 * GB, 1.0), f32(8, sharding=sharding)
    found = choose_options(lambda n: step, {"n": [1]}, target="v5e")
    assert found.host_memory_bytes == num_devices * 48 * 10**9
    assert (found.plan is not None) == (num_devices == 4)


@pytest.mark.parametrize("kind", ["shape", "numpy", "jax"])
def test_arrays_that_the_function_may_shard_count_in_part(kind):
    """An array on one device is no lower bound for a program that spans several."""
    x = {
        "shape": f32(16), "numpy": np.zeros(16, np.float32), "jax": jnp.zeros(16),
    }[kind]  # fmt: skip
    found = choose_options(lambda n: ((16, 0, 1.0), x), {"n": [1]}, budget=16, num_devices=4)
    assert found.num_compiled == 1


def test_limit_of_compiled_programs():
    def choose(max_compiles):
        options = {"a": range(8), "b": range(8)}
        return choose_options(
            lambda a, b: (((20 - a - b) * GB, 0, 1.0 + a + b),), options, budget=13 * GB,
            max_compiles=max_compiles,
        )  # fmt: skip

    found = choose(3)
    assert found.num_compiled == 3 and not found.is_complete
    assert found.plan is None or found.plan.fits
    text = str(found)
    assert "`max_compiles`" in text and "the limit of compiled programs was reached" in text
    assert len(text.splitlines()) < 20  # of 64 combinations
    found = choose(64)
    assert found.is_complete and sum(found.options.values()) == 7


def test_combinations_that_do_not_exist_or_fail():
    fails = PlanError("unsupported")
    steps = [(0, 0, 4.0), (GB, 0, 3.0), fails, None]
    found = choose_options(lambda n: steps[n] and (steps[n],), {"n": [3, 2, 1, 0]}, budget=GB)
    assert found.options == {"n": 1} and len(found.trials) == 3
    assert results(found)[2,] == "failed: unsupported"
    with pytest.raises(PlanError, match="unsupported"):
        choose_options(lambda n: (fails,), {"n": [1, 0]}, budget=GB)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "`budget` .* NVIDIA H200", {"budget": 10**12}),
        (ValueError, "`budget`", {"budget": 0}),
        (ValueError, "`memory_fraction` .*None", {"budget": 10**9, "memory_fraction": 0.5}),
        (ValueError, "`memory_fraction`", {"memory_fraction": -1.0}),
        (TypeError, "`memory_fraction`.*'x'", {"memory_fraction": "x"}),
        (ValueError, "`examples` .*options, n", {"examples": "batch"}),
        (ValueError, "`n` .*at least 1", {"examples": "n"}),
        (ValueError, "`not_by_time` .*options, n", {"not_by_time": ["policy"]}),
        (ValueError, "`max_compiles`", {"max_compiles": 0}),
        (ValueError, "`options`", {}),
    ],
)
def test_rejects(error, match, options):
    with pytest.raises(error, match=match):
        choose_options(lambda n: (jnp.sin, f32(8)) if options else None, {"n": [2, 0]}, **options)


@pytest.fixture
def cached(monkeypatch):
    """Return a function that compiles for a target, or reads the result from the folder."""
    lowered = lower(jnp.sin, [f32(8)], None, None, (), (), find_target("l4"))

    def cached(folder, program, target="l4"):
        compile_for = lambda _, target, *rest: program(target.name)  # noqa: E731
        monkeypatch.setattr(cache, "compile_for", compile_for)
        return cache.compile_or_read(lowered, find_target(target), None, io.BytesIO(), folder)

    return cached


PROGRAM = CompiledProgram(1, {}, {}, "".join(map(str, range(1000))), "", "", "")


def test_cache_without_a_folder(cached, tmp_path):
    (tmp_path / "file").touch()
    for folder in None, tmp_path / "file" / "plans":
        assert cached(folder, lambda _: PROGRAM) == PROGRAM


def test_cache_keeps_the_files_used_last(cached, tmp_path, monkeypatch):
    monkeypatch.setattr("effjax.memory.compiler.cache._MAX_FILES", 2)
    counts = Counter()
    for number, name in enumerate(["l4", "h100", "l4", "h200", "l4", "h100"]):
        cached(tmp_path, lambda name: counts.update([name]) or PROGRAM, name)
        for file in tmp_path.iterdir():  # file times are coarse
            if file.stat().st_mtime > 10**6:
                os.utime(file, (number, number))
    assert counts == {"l4": 1, "h100": 2, "h200": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_cache_reads_no_damaged_file(cached, tmp_path):
    """Of a file that lacks its end, has wrong data, or is none of the cache."""
    assert cached(tmp_path, lambda _: PROGRAM) == PROGRAM
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    for damaged in (data[:-100], data[:20] + 20 * b"\xff" + data[40:], b"", b"{}"):
        file.write_bytes(damaged)
        assert cached(tmp_path, lambda _: PROGRAM) == PROGRAM
        assert file.read_bytes()[20:] == data[20:]


def test_cache_distinguishes_flags_of_the_environment(cached, tmp_path, monkeypatch):
    for name in ("one", "other"):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_{name}=1")
        program = PROGRAM._replace(hlo=name)
        assert cached(tmp_path, lambda _, program=program: program) == program
