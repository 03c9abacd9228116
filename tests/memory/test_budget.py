"""The search for the fastest options that fit, and the cache of compiled programs."""

import dataclasses
import io
import itertools
import json
import math
import os
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from effjax.memory import PlanError, choose_options, find_rates
from effjax.memory.compiler.cache import with_cache
from effjax.memory.compiler.lower import lower
from effjax.memory.compiler.process import CompiledProgram
from effjax.memory.devices import find_target
from effjax.memory.search.budget import _Candidate, _Search
from tests.memory.conftest import f32
from tests.programs import needs_gpu_compiler

GB = 10**9


@dataclasses.dataclass
class FakePlan:
    """The fields of a plan that the search reads."""

    peak_device_bytes: int
    step_seconds: float
    budget: int
    refusal: str = ""
    peak_host_bytes: int = 0
    host_budget: int = 0

    @property
    def fits(self):
        return self.peak_device_bytes <= self.budget and self.peak_host_bytes <= self.host_budget


def search(sizes, seconds, budget, unordered=()):
    """Search in arrays of bytes and seconds; return the search and the places it compiled."""
    places = list(itertools.product(*map(range, sizes.shape)))
    candidates = {place: _Candidate({}, (), 1, 1, 0, 0, 0.0) for place in places}
    result = _Search(candidates, budget, 0, unordered)
    compiled = []
    while (place := result.next()) is not None:
        compiled.append(place)
        result.add(place, FakePlan(int(sizes[place]), float(seconds[place]), budget))
    return result, compiled


@st.composite
def costs(draw, max_dims=3):
    """Draw bytes that never grow along an axis, and seconds that never shrink."""
    shape = draw(hnp.array_shapes(max_dims=max_dims, max_side=5))
    arrays = []
    for _ in range(2):
        values = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, 60)))
        for axis in range(len(shape)):
            values = np.maximum.accumulate(values, axis)
        arrays.append(values)
    return 100 - arrays[0], arrays[1]


@given(costs(), st.integers(30, 110))
@settings(deadline=None)
def test_finds_the_fastest_that_fits(arrays, budget):
    sizes, seconds = arrays
    result, compiled = search(sizes, seconds, budget)
    assert result.is_complete and len(set(compiled)) == len(compiled)
    fits = sizes <= budget
    if not fits.any():
        assert result.best is None
        # Only those with the last values of all options had to be compiled.
        assert compiled == [tuple(n - 1 for n in sizes.shape)] or len(compiled) <= sizes.size
    else:
        assert result.best.seconds == seconds[fits].min()
        assert result.best.device_bytes <= budget
    # The bounds of the others are right.
    for place, candidate in result.candidates.items():
        assert candidate.device_bytes <= sizes[place] and candidate.seconds <= seconds[place]


@given(costs(), st.integers(30, 110), st.randoms())
@settings(deadline=None)
def test_options_that_are_not_ordered_by_time(arrays, budget, random):
    sizes, seconds = arrays
    order = random.sample(range(len(seconds)), len(seconds))  # of the first option
    result, _ = search(sizes, seconds[order], budget, unordered=[0])
    fits = sizes <= budget
    assert (result.best is not None) == fits.any()
    if fits.any():
        assert result.best.seconds == seconds[order][fits].min()


@given(costs(max_dims=1), st.integers(30, 110))
@settings(deadline=None)
def test_a_single_option_is_bisected(arrays, budget):
    _, compiled = search(*arrays, budget)
    assert len(compiled) <= math.ceil(math.log2(arrays[0].size + 1))


@given(costs(max_dims=2), st.integers(30, 110))
@settings(deadline=None)
def test_two_options_take_a_walk_along_the_border(arrays, budget):
    # No fewer programs than n + m - 1 suffice for every border in an n x m grid.
    _, compiled = search(*arrays, budget)
    assert len(compiled) <= sum(arrays[0].shape) + 1


def test_slow_programs_that_do_not_fit_exclude_slower_ones():
    # (1, 1) does not fit. From it, (2, 1) and (2, 2) are known to take 9 s as well.
    sizes = np.array([[9, 8, 4], [8, 7, 4], [8, 7, 3]])
    seconds = np.array([[1, 1, 2], [9, 9, 9], [9, 9, 9]])
    result, compiled = search(sizes, seconds, 5)
    assert result.best.seconds == 2 and not {(2, 1), (2, 2)} & set(compiled)
    assert len(compiled) <= 4


@pytest.fixture
def fake_plans(matmul_plan, monkeypatch):
    """Replace compilation: a step is a function that returns (device bytes, host bytes, seconds).

    The fixture is the list of the steps that were compiled.
    """
    compiled = []
    none = dataclasses.replace(
        matmul_plan.device, arguments=0, outputs=0, aliased=0, generated_code=0
    )
    waits = dict.fromkeys(("to_device_seconds", "to_host_seconds", "collective_seconds"), 0.0)

    def start_plan(fun, *args, target, memory_fraction, host_memory_bytes, cache, num_devices=1):
        compiled.append(fun)
        device, host, seconds = fun(*args)
        result = dataclasses.replace(
            matmul_plan,
            target=target, memory_fraction=memory_fraction, host_memory_bytes=host_memory_bytes,
            device=dataclasses.replace(none, temporaries=device - matmul_plan.constant_bytes),
            host=dataclasses.replace(none, temporaries=host),
            step_time=dataclasses.replace(matmul_plan.step_time, compute_seconds=seconds, **waits),
        )  # fmt: skip
        return lambda pipe: result

    monkeypatch.setattr(sys.modules["effjax.memory.search.budget"], "start_plan", start_plan)
    return compiled


def results(found):
    """Return the result of each combination, by its values."""
    return {tuple(trial.options.values()): trial.result for trial in found.trials}


@needs_gpu_compiler
def test_result(fake_plans):
    numbers = {"all": (40 * GB, 0, 1.0), "some": (20 * GB, 0, 1.3), "none": (10 * GB, 0, 2.0)}
    options = {"keep": list(numbers)}
    found = choose_options(
        lambda keep: (lambda: numbers[keep],), options, target="h100", budget=24 * GB
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
    assert lines[2].split() == ["keep", "peak", "host", "step", "result"]
    assert lines[3].split()[:6] == ["some", "20.0", "GB", "0", "B", "1.3"]
    record = json.loads(json.dumps(found.to_dict()))
    assert record["options"] == {"keep": "some"} and record["plan"]["fits"]
    assert [trial["is_compiled"] for trial in record["trials"]] == [True, True, False]
    assert "HloModule" not in json.dumps(record)


@needs_gpu_compiler
def test_nothing_fits(fake_plans):
    found = choose_options(lambda n: (lambda: (n * GB, 0, 1.0),), {"n": [9, 8, 7]}, budget=GB)
    assert found.options is None and found.plan is None and found.is_complete
    assert str(found).startswith("nothing fits in 1.0 GB of NVIDIA H200")
    assert len(fake_plans) == 2 and results(found)[7,] == "does not fit: 7.0 GB"


@needs_gpu_compiler
def test_seconds_per_example(fake_plans):
    # A step of 64 takes longer than one of 16, and less for each example.
    def make_step(batch_size):
        return (lambda: (batch_size * GB, 0, 1 + batch_size / 10),)

    options = {"batch_size": [64, 32, 16]}
    found = choose_options(make_step, options, budget=100 * GB, examples="batch_size")
    assert found.options == {"batch_size": 64}
    assert found.trials[0].step_seconds == pytest.approx(7.4 / 64)
    assert choose_options(make_step, options, budget=20 * GB, examples="batch_size").options == {
        "batch_size": 16
    }


@needs_gpu_compiler
def test_bounds_without_compilation(fake_plans):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    on_host = jax.ShapeDtypeStruct((GB,), jnp.float32, sharding=place)  # 4 GB
    link = find_rates("h200").to_device

    def make_step(params, keep):
        args = [on_host] if params == "host" else [f32(2 * GB)]  # 4 or 8 GB
        sizes = {"all": 5 * GB, "none": 3 * GB}
        return lambda *_: (8 * GB + sizes[keep], 0, 2 * GB / link), *args

    options = {"params": ["device", "host"], "keep": ["all", "none"]}
    found = choose_options(make_step, options, budget=12 * GB)
    assert found.options == {"params": "device", "keep": "none"} and len(fake_plans) == 2
    for trial in found.trials[2:]:
        assert trial.result == "not compiled, slower: at least 2.00×"
        assert trial.peak_host_bytes == 4 * GB and trial.step_seconds == 4 * GB / link

    # Arguments that do not fit, alone or together with the residuals.
    found = choose_options(make_step, options, budget=7 * GB)
    assert all("device" not in trial.options.values() for trial in found.trials[:2])
    assert results(found)["device", "all"] == "not compiled, does not fit: at least 8.0 GB"
    fake_plans.clear()
    found = choose_options(make_step, options, budget=7 * GB, min_bytes=lambda **_: (7 * GB + 1, 0))
    assert not fake_plans and found.options is None
    found = choose_options(make_step, options, budget=7 * GB, host_memory_bytes=3 * GB)
    assert not fake_plans and results(found)["host", "all"] == (
        "not compiled, does not fit: at least 4.0 GB on the host"
    )


@needs_gpu_compiler
def test_host_memory_excludes_no_others(fake_plans):
    """Check that a step with too much host memory is not taken for one with too much memory."""
    numbers = {0: (9, 0, 1.0), 1: (5, 0, 2.0), 2: (4, 80, 3.0), 3: (3, 0, 4.0)}
    for budget, best in ((9, 0), (5, 1), (4, 3)):
        found = choose_options(
            lambda n: (lambda: (numbers[n][0] * GB, numbers[n][1] * GB, numbers[n][2]),),
            {"n": list(numbers)}, budget=budget * GB, host_memory_bytes=64 * GB,
        )  # fmt: skip
        assert found.options == {"n": best} and found.is_complete


@needs_gpu_compiler
def test_host_memory_of_a_tpu_follows_from_shardings(fake_plans, monkeypatch):
    monkeypatch.setattr(sys.modules["effjax.memory.search.budget"], "find_compiler", str)
    sharding = NamedSharding(AbstractMesh((4,), ("data",)), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    for args, num_devices in (((x,), 4), ((f32(8),), 1)):
        step = (lambda *_: (GB, 100 * GB, 1.0), *args)
        found = choose_options(lambda n, step=step: step, {"n": [1]}, target="v5e")
        assert found.host_memory_bytes == num_devices * 48 * 10**9
        assert (found.plan is not None) == (num_devices == 4)


def test_arrays_that_the_function_may_shard_count_in_part(fake_plans):
    """An array on one device is no lower bound for a program that spans several."""
    for x in (f32(4 * GB), np.broadcast_to(np.float32(0), (4 * GB,)), jnp.zeros(16)):
        step = (lambda *_: (GB, 0, 1.0), x)
        budget = 4 * GB if x.size > 16 else 16
        found = choose_options(
            lambda n, step=step: step, {"n": [1]}, budget=budget, target="h200", num_devices=4
        )
        assert len(fake_plans) == 1 and "not compiled" not in found.trials[0].result
        fake_plans.clear()


def test_limit_of_compiled_programs(fake_plans):
    def make_step(a, b):
        return (lambda: ((20 - a - b) * GB, 0, 1.0 + a + b),)

    options = {"a": list(range(8)), "b": list(range(8))}
    found = choose_options(make_step, options, budget=13 * GB, max_compiles=3)
    assert len(fake_plans) == found.num_compiled == 3 and not found.is_complete
    assert found.plan is None or found.plan.fits
    text = str(found)
    assert "hint: the search ended at `max_compiles`; other options may be faster" in text
    assert "× not compiled, the limit of compiled programs was reached" in text
    assert len(text.splitlines()) < 20  # of 64 combinations
    found = choose_options(make_step, options, budget=13 * GB, max_compiles=64)
    assert found.is_complete and sum(found.options.values()) == 7


@needs_gpu_compiler
def test_combinations_that_do_not_exist_or_fail(fake_plans):
    def fails():
        raise PlanError("unsupported")

    def make_step(n):
        return None if n == 3 else (fails,) if n == 2 else (lambda: (n * GB, 0, 4.0 - n),)

    found = choose_options(make_step, {"n": [3, 2, 1, 0]}, budget=GB)
    assert found.options == {"n": 1} and len(found.trials) == 3
    assert results(found)[2,] == "failed: unsupported"
    with pytest.raises(PlanError, match="unsupported"):
        choose_options(lambda n: (fails,), {"n": [1, 0]}, budget=GB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 10**12}, "`budget` .* must be at most the memory of NVIDIA H200"),
        ({"budget": 0}, "`budget`"),
        (
            {"budget": 10**9, "memory_fraction": 0.5},
            "`memory_fraction` .* must be None",
        ),
        ({"memory_fraction": -1.0}, "`memory_fraction` .* must be in .0, 1."),
        ({"examples": "batch"}, "`examples` .* must be one of the options, n"),
        ({"not_by_time": ["policy"]}, "`not_by_time` .* must be one of the options, n"),
        ({"max_compiles": 0}, "`max_compiles`"),
        ({}, "`options` must have a combination"),
    ],
)
def test_rejects(options, message):
    with pytest.raises(ValueError, match=message):
        choose_options(lambda n: None, {"n": [1]}, **options)


def test_rejects_a_fraction_that_is_no_number():
    with pytest.raises(TypeError, match="`memory_fraction` must be a number, not 'x'"):
        choose_options(lambda n: (jnp.sin, f32(8)), {"n": [1]}, memory_fraction="x")


def test_rejects_steps_without_examples():
    with pytest.raises(ValueError, match="`batch` .*at least 1"):
        choose_options(lambda batch: (jnp.sin, f32(8)), {"batch": [2, 0]}, examples="batch")


def stack_step(save, layers=8):
    """Return the gradients of a stack of layers that keep everything, or their inputs."""

    def layer(x, kernel):
        return jnp.sin(jnp.sin(jnp.sin(x @ kernel))), None

    def loss(kernels, x):
        body = layer if save == "all" else jax.checkpoint(layer, prevent_cse=False)
        return jax.lax.scan(body, x, kernels)[0].sum()

    return jax.jit(jax.grad(loss)), f32(layers, 64, 64), f32(4096, 64)


@needs_gpu_compiler
@pytest.mark.exhaustive  # docs/planner.md searches in the plain tests
def test_compiled_programs_and_their_cache(tmp_path, monkeypatch):
    def search(budget, target="l4", layers=8):
        return choose_options(
            lambda save: stack_step(save, layers), {"save": ["all", "inputs"]}, target=target,
            budget=budget, cache=tmp_path / "plans",
        )  # fmt: skip

    largest = search(10 * GB)
    assert largest.options == {"save": "all"} and largest.num_compiled == 1
    budget = largest.plan.peak_device_bytes - 1
    found = search(budget)
    assert found.options == {"save": "inputs"} and found.plan.fits
    assert found.plan.peak_device_bytes < budget / 1.5

    # All programs come from the cache now. No compiler would start.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("EFFJAX_TEST", "1")  # starts another server
    assert search(budget) == found
    for other in (dict(layers=9), dict(target="h100")):
        with pytest.raises(PlanError, match="exit code 1"):
            search(budget, **other)


def test_cache_without_a_folder(tmp_path):
    (tmp_path / "file").touch()
    program = CompiledProgram(1, {}, {}, "hlo", "", "", "")
    compile_program = with_cache(lambda *_: program, tmp_path / "file" / "plans")
    lowered = lower(jnp.sin, [f32(8)], None, None, (), (), find_target("l4"))
    assert compile_program(lowered, find_target("l4"), None, io.BytesIO()) == program


def test_cache_keeps_the_files_used_last(tmp_path, monkeypatch):
    monkeypatch.setattr("effjax.memory.compiler.cache._MAX_FILES", 2)
    counts = Counter()

    def compile_program(lowered, target, options, pipe):
        counts[target.name] += 1
        return CompiledProgram(1, {}, {}, "hlo", "", "", "")

    compile_or_read = with_cache(compile_program, tmp_path)
    lowered = lower(jnp.sin, [f32(8)], None, None, (), (), find_target("l4"))
    for number, name in enumerate(["l4", "h100", "l4", "h200", "l4", "h100"]):
        compile_or_read(lowered, find_target(name), None, io.BytesIO())
        for file in tmp_path.iterdir():  # file times are coarse
            age = file.stat().st_mtime
            if age > 10**6:
                os.utime(file, (number, number))
    assert counts == {"l4": 1, "h100": 2, "h200": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_cache_reads_no_damaged_file(tmp_path):
    """Of a file that lacks its end, has wrong data, or is none of the cache."""
    program = CompiledProgram(1, {}, {}, "".join(map(str, range(1000))), "", "", "")
    compile_or_read = with_cache(lambda *_: program, tmp_path)
    lowered = lower(jnp.sin, [f32(8)], None, None, (), (), find_target("l4"))
    args = lowered, find_target("l4"), None, io.BytesIO()
    assert compile_or_read(*args) == program
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    for damaged in (data[:-100], data[:20] + 20 * b"\xff" + data[40:], b"", b"{}"):
        file.write_bytes(damaged)
        assert compile_or_read(*args) == program
        assert file.read_bytes()[20:] == data[20:]


def test_cache_distinguishes_flags_of_the_environment(tmp_path, monkeypatch):
    programs = [CompiledProgram(1, {}, {}, name, "", "", "") for name in ("one", "other")]
    lowered = lower(jnp.sin, [f32(8)], None, None, (), (), find_target("l4"))
    for program in programs:
        monkeypatch.setenv("XLA_FLAGS", f"--xla_{program.hlo}=1")
        compile_or_read = with_cache(lambda *_, program=program: program, tmp_path)
        assert compile_or_read(lowered, find_target("l4"), None, io.BytesIO()) == program
