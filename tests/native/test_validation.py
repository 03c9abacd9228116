"""The validation of kernels, with the CPU kernels in place of CUDA kernels, and broken ones."""

import ctypes
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from effjax.validation import checks, child, guards, kernels, programs, run
from tests.native import broken
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

pytestmark = pytest.mark.skipif(
    not native.is_available("cpu"), reason="built without native kernels"
)
TABLE = "tests.native.broken:KERNELS"


@pytest.fixture(scope="module", autouse=True)
def _quick_children():
    with broken.quick_children():
        yield


def validate(names, table=TABLE, dtypes=("float32",), **options):
    return run.validate(
        platform="cpu", table=table, kernels=names, dtypes=dtypes, repeats=4, **options
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return broken.compile_library(tmp_path_factory.mktemp("broken"), "broken.cc")


@pytest.fixture(scope="session")
def guarded_copies(library):
    """Register the broken copy with guards on host memory and on that of a fake driver.

    JAX refuses a second registration, so a worker that comes back to this module keeps the first.
    """
    driver = broken.compile_library(library.parent, "fake_driver.cc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(guards._MEMORIES, "cuda", lambda: guards._CudaMemory(str(driver)))
        for memory in ("cpu", "cuda"):
            handler = guards.wrap(ctypes.CDLL(str(library)).BrokenCopy, memory)
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(f"copy_{memory}", capsule, platform="cpu")
        yield ctypes.CDLL(str(driver))


AFTER, BEFORE = "bytes changed after the end of result 0", "4 bytes changed before the start of"


# All faults, and on the fake driver those that its copies in both directions and fills could miss.
@pytest.mark.parametrize(
    ("memory", "fault", "message"),
    [
        ("cpu", "none", ""),
        ("cpu", "write after", f"4 {AFTER}"),
        ("cpu", "write before", BEFORE),
        ("cpu", "add after", AFTER),
        ("cpu", "change operand", "operand 0 was changed"),
        ("cpu", "read after", ""),
        ("cpu", "skip", ""),
        ("cuda", "none", ""),
        ("cuda", "write before", BEFORE),
        ("cuda", "read after", ""),
    ],
)
def test_guards(guarded_copies, memory, fault, message):
    """A write next to an array by one element is found, and a value from outside changes."""
    x = np.arange(1, 6, dtype=np.float32)
    call = jax.ffi.ffi_call(f"copy_{memory}", jax.ShapeDtypeStruct(x.shape, x.dtype))
    copy = jax.jit(lambda x: call(x, fault=np.int64(broken.FAULTS.index(fault))))
    found, results = [], []
    for pattern in (guards.NAN, guards.FINITE):
        with guards.guards(pattern) as violations:
            results.append(np.asarray(copy(x)))
        found += violations
    assert bool(found) == bool(message) and all(message in text for text in found), found
    if fault in ("read after", "skip"):
        assert np.isnan(results[0][-1])
        assert (results[1][-1] != x[-1]) == (fault == "skip")
    else:
        results += [copy(x)] if fault == "none" else []  # without guards
        for result in results:
            np.testing.assert_array_equal(result, x)
    if memory == "cuda":
        assert ctypes.c_int.in_dll(guarded_copies, "live").value == 0
        assert ctypes.c_int.in_dll(guarded_copies, "synchronizations").value > 0


def test_guards_without_a_driver(library, monkeypatch):
    monkeypatch.setitem(guards._MEMORIES, "cuda", lambda: guards._CudaMemory("libno-driver.so"))
    handler = guards.wrap(ctypes.CDLL(str(library)).BrokenCopy, "cuda")
    jax.ffi.register_ffi_target("copy_nowhere", jax.ffi.pycapsule(handler), platform="cpu")
    call = jax.ffi.ffi_call("copy_nowhere", jax.ShapeDtypeStruct((1,), jnp.float32))
    with guards.guards(guards.NAN) as violations:
        call(jnp.ones(1), fault=np.int64(0)).block_until_ready()
    assert len(violations) == 1 and "guards failed: libno-driver.so" in violations[0]


def test_guards_without_memory(guarded_copies):
    """This is no violation, but the results are not valid."""
    x = jnp.ones(3, jnp.float32)
    call = jax.ffi.ffi_call("copy_cuda", jax.ShapeDtypeStruct(x.shape, x.dtype))
    is_full = ctypes.c_int.in_dll(guarded_copies, "is_full")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(guards.OutOfMemoryError, match="returned error 2"),
        guards.guards(guards.NAN),
    ):
        patch.setattr(is_full, "value", 1)
        call(x, fault=np.int64(0)).block_until_ready()
    with guards.guards(guards.NAN) as violations:
        np.testing.assert_array_equal(call(x, fault=np.int64(0)), x)
    assert not violations


def test_large_arrays_without_memory(monkeypatch):
    """Other processes may use the memory that the device has."""

    def refuse(_):
        raise broken.EXHAUSTED

    monkeypatch.setattr(jax, "block_until_ready", refuse)
    reason = kernels.large(functools.partial(kernels.make_attention, heads=1), images=3)("float32")
    assert isinstance(reason, str) and "GB of device memory" in reason


@pytest.mark.parametrize(
    ("program", "time_limit", "kind", "text"),
    [
        ("print(1); import sys; sys.exit('no GPU')", 60, "crash", "exit code 1: no GPU"),
        ("print(1, end='', flush=True); import os; os.abort()", 60, "crash", r"\(signal 6\)"),
        ("import time; time.sleep(60)", 0.5, "timeout", "no answer in 0.5 s"),
        # Closes its stdout, and hangs.
        ("import os, time; os.close(1); time.sleep(60)", 60, "crash", "Killed"),
    ],
)
def test_ends_of_processes(monkeypatch, program, time_limit, kind, text):
    monkeypatch.setattr(run, "_SECONDS_TO_END", 0.5)
    assert len(list(run.read_lines([sys.executable, "-c", "print(1)"], {}, 60))) == 1
    with pytest.raises(run.ChildError, match=text) as raised:
        list(run.read_lines([sys.executable, "-c", program], {}, time_limit))
    assert raised.value.kind == kind


def runs_of(*values):
    return [[np.array([1.0, v]), np.array([2.0])] for v in values]


def gradients_of(*values):
    return [[np.array([1.0, 3]), np.array([v])] for v in values]


@pytest.mark.parametrize(
    ("runs", "deterministic", "kinds"),
    [
        (runs_of(3, 3, 3), True, []),
        (runs_of(4, 4, 4), True, ["value"]),
        (runs_of(np.nan, np.nan), True, ["value"]),
        (runs_of(3, 4, 3), False, ["repetition"]),
        (runs_of(3, 3 + 1e-9, 3), False, ["repetition"]),
        (gradients_of(2, 2 + 1e-9), False, []),
        (gradients_of(2, 2 + 1e-9), True, ["repetition"]),
        (gradients_of(2.1, 2.1, 2.1), False, ["gradient"]),
        ([[np.zeros((0, 2)), np.array([2.0])]], False, ["value"]),
    ],
)
def test_kinds_of_failures(runs, deterministic, kinds):
    want = [np.array([1.0, 3.0]), np.array([2.0])]
    failures = checks.compare_runs(("x",), runs, want, 1e-6, deterministic)
    assert [failure.kind for failure in failures] == kinds, failures


@vary(
    "make, shared",
    [
        (functools.partial(kernels.make_attention, shapes=((4, 4),), heads=1), ()),
        (functools.partial(kernels.make_deform_conv, size=(8, 8), strides=(4, 4)), (2,)),
    ],
)
def test_last_of_many_images(make, shared, x64, monkeypatch):
    """The case for 64-bit indices, with fewer images."""
    kernel = kernels.Kernel("large", {"large": kernels.large(make, 3, shared)}, make)
    call = kernel.cases["large"]("float32")
    assert not isinstance(call, str) and call.tail and call.args[0].shape[0] == 3
    want = checks.run_reference(call)
    assert checks.check_call(kernel, call, want, "float32", repeats=4) == []
    halved = kernel._replace(
        candidate=lambda apply: lambda *args: apply(*args, implementation="native") / 2
    )
    failures = checks.check_call(halved, call, want, "float32", repeats=4)
    assert {failure.kind for failure in failures} == {"value", "gradient"}
    reason = kernels.large(make, images=2**31, shared=shared)("float32")
    assert isinstance(reason, str) and "GB of device memory" in reason


FEW = ["abort", "correct"]
OTHERS = [name for name in broken.KERNELS if name not in (*FEW, "hang")]


@vary(
    "names, time_limit",
    [(FEW, 180), (OTHERS, 180), (["hang"], 20)],
    ids=["few", "others", "hang"],
)
def test_broken_kernels_are_caught(names, time_limit, library, monkeypatch):
    """Failures are recorded by name, and a crash or a hang does not end the validation."""
    monkeypatch.setenv(broken.LIBRARY, str(library))
    report = validate(names, time_limit=time_limit)
    failures, outcomes = run.find_failures(report), run.outcomes(report)
    assert [row["kernel"] for row in report["kernels"]] == names
    for row in report["kernels"]:
        name = row["kernel"]
        kind, text = broken.FINDINGS[name]
        lines = [line for line in failures if line.startswith(f"{name} float32, ")]
        assert row["untested"] == {} and bool(lines) == bool(kind), row
        if kind is None:
            outcome = outcomes[name]["float32"]
            assert outcome == "slower" if name == "slow" else outcome in ("faster", "slower")
        else:
            assert outcomes[name] == {"float32": "wrong"}, row
            assert row["failures"][0]["kind"] in kind.split("|") and text in lines[0], row
    assert report["key"]["gpu"] == "cpu" and len(report["key"]["library"]) == 64


@vary("repeats", [2, None], ids=["check", "time"])
@pytest.mark.parametrize("name", broken.ERRORS)
def test_errors_of_a_case(name, repeats, x64):
    """A lack of memory and an error of XLA say nothing about a kernel."""
    make, part, must_end = broken.ERRORS[name]
    kernel, events, ended = kernels.Kernel(name, {}, make), [], False
    try:
        events += child.run_case(kernel, "one", make, "float32", repeats)
    except SystemExit:
        ended = True
    assert ended == must_end
    case = events[-1]
    found = [kind for kind in ("skipped", "untested", "failures") if case[kind]]
    assert found == [part] and case["event"] == "case", case
    assert part != "failures" or case[part][0]["kind"] == "error"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "dtype", "cases"),
    [
        (
            "deform_conv2d",
            "float32",
            ["one-sided", "NaN and infinity", "no images", "several devices", "64-bit indices"],
        ),
        ("roi_pool_deterministic", "float16", ["NaN and infinite offsets", "vmap"]),
        ("ms_deform_attn", "bfloat16", ["slices", "no queries"]),
        ("ms_deform_attn_deterministic", "float64", ["plain"]),
        ("dot_product_attention", "bfloat16", ["packed rows", "window", "several devices"]),
    ],
)
def test_kernels_of_the_cpu(name, dtype, cases):
    """Those that are right pass, here those whose shapes and dtypes differ most."""
    report = validate([name], "tests.native.broken:ACTUAL", [dtype], cases=cases, time_limit=300)
    (row,) = report["kernels"]
    assert row["failures"] == [] and row["untested"] == {} and row["seconds"].keys() == {
        "native", "xla"
    }, row  # fmt: skip
    assert row["skipped"].keys() == {"64-bit indices"} & set(cases)
    assert row["passed"] == len(set(cases) - {"64-bit indices"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["deform_conv2d", "roi_pool", "ms_deform_attn", "dot_product_attention"]
)
def test_all_cases_can_be_traced(name, x64):
    kernel = kernels.KERNELS[name]
    for make in (kernel.timed, *kernel.cases.values()):
        call = make("float32")
        if isinstance(call, str):  # it needs a larger machine
            continue
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in call.args]
        jax.eval_shape(functools.partial(call.apply, implementation="xla"), *arrays)


def test_programs_of_guarded_calls():
    """The kernels of effjax run with guards, and without them after that."""
    call = kernels.make_roi("float32")

    def lower():
        function = functools.partial(call.apply, implementation="native")
        return jax.jit(function).lower(*call.args).as_text()

    with guards.guarded_calls():
        assert "@guarded_effjax_roi_pool" in lower()
    assert "@effjax_roi_pool" in lower()


def test_child_that_cannot_start():
    with pytest.raises(run.NoKernelsError, match="unknown platform"):
        run.validate(platform="abacus")


# What a pretended GPU measures, by program. The plan says 1024 MiB.
MEASURED = {
    "elementwise": {"value": 2**30},
    "matrix products": {"value": 1.01 * 2**30},
    "recomputed matrix products": {"value": 0.9 * 2**30},
    "dense_block": {"value": 1.1 * 2**30},
    "linear_cross_entropy": {"value": None},
}


def test_programs(monkeypatch):
    """The peaks of ten programs, and the time of a step."""

    def run_child(platform, time_limit, task, xla_flags, **options):
        assert platform == ("cpu" if task.startswith("plan") else "cuda")
        assert bool(xla_flags) == (task == "measure_peak")
        name = options.get("name")
        if name == "roi_align" and task == "measure_peak":
            raise run.ChildError("crash", "Aborted")
        if name == "sync_batch_norm" and task == "plan_peak":
            yield {"error": "no compiler"}
        elif task == "measure_peak":
            yield MEASURED.get(name, {"value": 2**30})
        else:
            yield {"value": 2**30 if task == "plan_peak" else 0.02}

    monkeypatch.setattr(run, "run_child", run_child)
    failed = {"kernel": "ms_deform_attn", "dtype": "float32", "failures": [{
        "case": "plain", "kind": "value", "text": "wrong"
    }]}  # fmt: skip
    report = {"devices": ["NVIDIA L4"], "kernels": [failed]}
    lines = []
    run.measure_programs(report, report_line=lines.append)
    assert report["target"] == "l4" and len(report["programs"]) == 9
    assert lines[0] == "elementwise: 1024.0 MiB planned, 1024.0 MiB measured"
    assert lines[-1] == "offloaded step: 20 ms modelled, 20 ms measured"
    found = [line.rpartition(": ")[0] for line in run.find_failures(report)]
    assert found == [
        "ms_deform_attn float32, plain: value", "memory, recomputed matrix products: peak",
        "memory, dense_block: peak", "memory, roi_align: error: crash",
    ]  # fmt: skip
    assert sum(": WRONG, " in line for line in lines) == 3
    skipped = [row["name"] for row in report["programs"] if row["skipped"]]
    assert skipped == ["sync_batch_norm", "linear_cross_entropy"]
    report = {"devices": ["NVIDIA Abacus"], "kernels": []}
    run.measure_programs(report, report_line=lines.append)
    assert report["programs"] == [] and "'NVIDIA Abacus' is unknown" in lines[-1]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_programs_can_be_planned_and_run():
    for make in programs.PROGRAMS.values():
        function, *shapes = make()
        jax.eval_shape(function, *shapes)
    # Large enough for the tolerance of 8 MiB, small enough for any GPU.
    assert 100 * 2**20 < programs.plan_peak("elementwise", "l4") < 2 * 2**30
    sizes = dict(width=32, count=2, tokens=4)
    assert programs.plan_step("l4", **sizes) > 0 and programs.measure_step(**sizes) > 0
    if jax.local_devices()[0].memory_stats() is None:
        assert programs.measure_peak("elementwise") is None
