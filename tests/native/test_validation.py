"""The validation of kernels, with the CPU kernels in place of CUDA kernels, and broken ones."""

import functools
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

from effjax import native
from effjax.validation import checks, child, kernels, processes, programs, run, sanitizer
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


@pytest.mark.parametrize(
    ("program", "time_limit", "kind", "text"),
    [
        ("", 60, None, ""),
        ("import sys; sys.exit('no GPU')", 60, "crash", "exit code 1: no GPU"),
        ("print(2, end='', flush=True); import os; os.abort()", 60, "crash", "Aborted (signal 6)"),
        ("import time; time.sleep(60)", 1, "timeout", "no end in 1 s"),
        ("import os, time; os.close(1); time.sleep(60)", 1, "timeout", "no end in 1 s"),
    ],
)
def test_ends_of_processes(program, time_limit, kind, text):
    """A line that was not finished is ignored."""
    command = [sys.executable, "-c", f"print(1, flush=True); {program}"]
    ended = processes.run_process(command, {}, time_limit)
    assert ended.lines == ["1"] and ended.failure == (kind and (kind, text))
    assert (ended.code == 0) == (kind is None)


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
def test_last_of_many_images(make, shared, x64):
    """The case for 64-bit indices, with fewer images."""
    call = kernels.make_large("float32", make=make, images=3, shared=shared)
    kernel = kernels.Kernel("large", {}, make)
    assert not isinstance(call, str) and call.tail and call.args[0].shape[0] == 3
    want = checks.run_reference(call)
    assert checks.check_call(kernel, call, want, "float32", repeats=4) == []
    halved = kernel._replace(
        candidate=lambda apply: lambda *args: apply(*args, implementation="native") / 2
    )
    failures = checks.check_call(halved, call, want, "float32", repeats=4)
    assert {failure.kind for failure in failures} == {"value", "gradient"}
    reason = kernels.make_large("float32", make=make, images=2**31, shared=shared)
    assert isinstance(reason, str) and "GB of device memory" in reason


def test_8_bit_products(monkeypatch, x64):
    """They equal their definition, and products of other numbers do not."""
    kernel = kernels.KERNELS["fp8_linear"]

    def find_kinds(case, dtype="float32"):
        call = kernel.cases[case](dtype)
        want = checks.run_reference(call)
        return {failure.kind for failure in checks.check_call(kernel, call, want, dtype, repeats=2)}

    cases = kernel.cases.keys() - {"several devices"}
    assert not any(map(find_kinds, cases)) and not find_kinds("plain", "bfloat16")
    monkeypatch.setattr(kernels, "fp8_linear", lambda x, kernel, **_: x @ kernel)
    assert find_kinds("plain") == find_kinds("infinity") == {"value", "gradient"}


FEW = ["abort", "correct"]
OTHERS = [name for name in broken.KERNELS if name not in (*FEW, "hang")]


@vary(
    "names, time_limit",
    [(FEW, 180), (OTHERS, 180), (["hang"], 20)],
    ids=["few", "others", "hang"],
)
def test_broken_kernels_are_caught(names, time_limit):
    """Failures are recorded by name, and a crash or a hang does not end the validation."""
    report = validate(names, time_limit=time_limit)
    failures, outcomes = run.find_problems(report), run.outcomes(report)
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
            assert row["failures"][0]["kind"] == kind and text in lines[0], row
    assert report["key"]["gpu"] == "cpu" and len(report["key"]["library"]) == 64


@vary("repeats", [2, None], ids=["check", "time"])
@pytest.mark.parametrize("name", broken.ERRORS)
def test_errors_of_a_case(name, repeats, x64):
    """A lack of memory and an error of XLA say nothing about a kernel."""
    make, part, must_end = broken.ERRORS[name]
    kernel, shown, ended = kernels.Kernel("one", {name: make}, make), [], False
    row = checks.new_row("one", "float32")
    try:
        child.run_case(row, kernel, name, lambda: shown.append(str(row)), repeats)
    except SystemExit:
        ended = True
    assert ended == must_end and shown[-1] == str(row)
    assert [kind for kind in ("skipped", "untested", "failures") if row[kind]] == [part]
    assert part != "failures" or row[part][0]["kind"] == "error"


INVALID = "Invalid __global__ write of size 4 bytes", "    at effjax::kernel(float *)+0x100"
WRONG = {"case": "special", "kind": "value", "text": "the result is wrong"}
SANITIZER = {
    # The process itself, here with the CPU kernels.
    "clean": ('log("ERROR SUMMARY: 0 errors"); sys.exit(subprocess.call(child))', "", ""),
    "error": (
        f'log(*{INVALID}); show(1, {WRONG}); sys.exit(int(options["--error-exitcode"]))',
        "special: memory: Invalid __global__ write of size 4 bytes; at effjax::kernel", "",
    ),
    "error and crash": (
        f"log(*{INVALID}); os.abort()", "compute-sanitizer: memory: Invalid __global__ write", "",
    ),
    "wrong": (
        f"show(1, {WRONG})", "special: value: the result is wrong, under compute-sanitizer", "",
    ),
    "unsupported": (
        'log("Error: Device not supported."); sys.exit(255)', "",
        "exit code 255; Error: Device not supported.",
    ),
    "few cases": ("show(1)", "", "the process ended early"),
    "hang": (
        "command = sys.executable, '-c', 'import time; time.sleep(99)'\n"
        "subprocess.run(command, cwd=pathlib.Path(sys.argv[0]).parent)", "", "no end in 3 s",
    ),
}  # fmt: skip


def is_link_to(path, target):
    try:
        return path.readlink() == target
    except OSError:  # the process has ended, or belongs to another user
        return False


@pytest.mark.parametrize("name", SANITIZER)
def test_compute_sanitizer(name, tmp_path, monkeypatch):
    """What it finds makes a kernel wrong. That it cannot check one is said, and is no failure."""
    body, failure, reason = SANITIZER[name]
    program = broken.write_sanitizer(tmp_path / "bin", body)
    is_on_path = name == "wrong"
    monkeypatch.setenv("PATH", str(program.parent if is_on_path else "/nowhere"))
    monkeypatch.setenv("CUDA_HOME", str("/nowhere" if is_on_path else tmp_path))
    count, limit = 1 if name == "clean" else 2, 3 if name == "hang" else 180
    rows = [checks.new_row("correct", "float32") for _ in range(1 + count)]
    rows[0]["failures"].append(WRONG)
    report: dict[str, Any] = {"kernels": rows}
    lines: list[str] = []
    options = {"platform": "cpu", "table": TABLE, "cases": None}
    sanitizer.sanitize(report, options, limit, lines.append)
    state = report["sanitizer"]
    assert state["program"] == str(program) and state["kernels"] == count
    assert state["checked"] == (0 if reason else count), state
    assert (state["reason"] or "").endswith(reason) and bool(state["reason"]) == bool(reason), state
    assert ("correct float32: no errors" in lines) == (not failure and not reason)
    problems = run.find_problems(report)
    assert len(problems) == (1 + count if failure else 1)
    assert all(line.startswith(f"correct float32, {failure}") for line in problems[1:]), problems
    # A process that it started does not keep the GPU. A killed one needs a moment to end.
    end = time.monotonic() + 60
    while any(is_link_to(p, program.parent) for p in pathlib.Path("/proc").glob("[0-9]*/cwd")):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_without_compute_sanitizer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    report: dict[str, Any] = {"kernels": [checks.new_row("correct", "float32")]}
    sanitizer.sanitize(report, {"table": TABLE}, 1, print)
    assert report["sanitizer"]["program"] is None and report["sanitizer"]["checked"] == 0
    assert "neither on PATH nor in CUDA_HOME" in report["sanitizer"]["reason"]
    assert run.find_problems(report) == []


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
        ("ms_deform_attn", "bfloat16", ["chunks", "no queries"]),
        ("ms_deform_attn_deterministic", "float64", ["plain"]),
        ("dot_product_attention", "bfloat16", ["packed rows", "window", "several devices"]),
        ("fp8_linear", "bfloat16", ["odd sizes", "no rows", "several devices"]),
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
    "name", ["deform_conv2d", "roi_pool", "ms_deform_attn", "dot_product_attention", "fp8_linear"]
)
def test_all_cases_can_be_traced(name, x64):
    kernel = kernels.KERNELS[name]
    for make in (kernel.timed, *kernel.cases.values()):
        call = make("float32")
        if isinstance(call, str):  # it needs a larger machine
            continue
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in call.args]
        jax.eval_shape(functools.partial(call.apply, implementation="xla"), *arrays)


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


PLANNED = {"planned_bytes": 2**29, "planned_host_bytes": 2**34, "modelled_seconds": 0.01}


def test_programs(monkeypatch):
    """The peaks of ten programs, and the peaks and times of the steps of README.md."""

    def run_child(platform, time_limit, task, xla_flags, variables, **options):
        assert platform == ("cuda" if task.startswith("measure") else "cpu")
        assert bool(xla_flags) == (task == "measure_peak") and len(variables) == 1
        name, result = options.get("name"), {"value": 2**30 if "peak" in task else 0.02}
        if task == "fit_finetune":
            result = {"value": 26}
        if task == "plan_step":
            assert options["target"] == "l4"
            result = {"value": PLANNED | {"too_large": name == "dense_block" and "too large"}}
        if "form" in options:
            return processes.Run([json.dumps(result)], None, 0)
        if name == "roi_pool" and task == "measure_peak":
            return processes.Run([], checks.Failure("crash", "Aborted"), -6)
        if name == "sync_batch_norm" and task == "plan_peak":
            result = {"error": "no compiler"}
        elif task == "measure_peak":
            result = MEASURED.get(name, result)
        return processes.Run([json.dumps(result)], None, 0)

    monkeypatch.setattr(run, "run_child", run_child)
    failed = checks.new_row("ms_deform_attn", "float32")
    failed["failures"].append({"case": "plain", "kind": "value", "text": "wrong"})
    report = {"devices": ["NVIDIA L4"], "kernels": [failed]}
    lines = []
    run.measure_programs(report, report_line=lines.append)
    assert report["target"] == "l4" and len(report["programs"]) == 9
    assert lines[0] == "elementwise: 1024.0 MiB planned, 1024.0 MiB measured"
    assert [(row["name"], row["bytes_ratio"], row["seconds_ratio"]) for row in report["steps"]] == [
        ("dense_block", None, None), ("deform_conv2d", 2, 2), ("finetune", 2, 2),
    ]  # fmt: skip
    assert report["steps"][0]["missing"] == {"measured": "too large"}
    assert report["steps"][1]["form"]["implementation"] == "xla"
    assert report["steps"][2]["form"] == {"layers": 26, "tokens": 4096}
    assert lines[-1] == (
        "finetune (layers 26, tokens 4096): 536.9 MB planned, 1.1 GB measured, "
        "10.0 ms modelled, 20.0 ms measured"
    )
    assert run.find_problems(report) == [
        "ms_deform_attn float32, plain: value: wrong",
        "memory, recomputed matrix products: peak: 1024.0 MiB planned, 921.6 MiB measured",
        "memory, dense_block: peak: 1024.0 MiB planned, 1126.4 MiB measured",
        "memory, roi_pool: error: crash: Aborted",
    ]
    assert sum(": WRONG, " in line for line in lines) == 3
    skipped = [line.split(": ")[0] for line in lines if ": skipped, " in line]
    assert skipped == ["sync_batch_norm", "linear_cross_entropy"]
    report = {"devices": ["NVIDIA Abacus"], "kernels": []}
    run.measure_programs(report, report_line=lines.append)
    assert report["programs"] == [] and "'NVIDIA Abacus' is unknown" in lines[-4]
    for row in report["steps"]:
        assert "no target" in row["missing"]["planned"] and row["measured_seconds"] == 0.02


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_programs_can_be_planned_and_run():
    for make in programs.PROGRAMS.values():
        function, *shapes = make()
        jax.eval_shape(function, *shapes)
    # Large enough for the tolerance of 8 MiB, small enough for any GPU.
    assert 100 * 2**20 < programs.plan_peak("elementwise", "l4") < 2 * 2**30
    if jax.local_devices()[0].memory_stats() is None:
        assert programs.measure_peak("elementwise") is None


TINY: dict[str, Any] = {
    "dense_block": dict(layers=2, batch_size=2),
    "deform_conv2d": dict(batch_size=1, size=6, channels=4, implementation="xla"),
    "finetune": dict(
        layers=3, tokens=16, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_steps_run(name):
    assert TINY.keys() == programs.STEPS.keys() == programs.FORMS.keys()
    assert programs.measure_seconds(name, TINY[name]) > 0
    if jax.local_devices()[0].memory_stats() is None:
        assert programs.measure_peak(name, TINY[name]) is None


def test_layers_that_fit_in_host_memory():
    """As many as fit, and at most those of the model; an error says what one layer needs."""
    form = TINY["finetune"]
    counts = {size: programs.fit_finetune(size, **form) for size in (300_000, 10**9)}
    assert 0 < counts[300_000] < counts[10**9] == 3
    with pytest.raises(ValueError, match=r"one layer needs .* of host memory, and 1.0 kB can be"):
        programs.fit_finetune(1000, **form)


def test_step_that_fails():
    """A failure of a process is a reason in the row, and the keys are always the same."""
    form = TINY["deform_conv2d"] | {"implementation": "abacus"}
    row = run.measure_step("deform_conv2d", form, None, platform="cpu")
    assert row.keys() == {
        "name", "form", "missing", "planned_bytes", "planned_host_bytes", "modelled_seconds",
        "measured_bytes", "measured_seconds", "bytes_ratio", "seconds_ratio",
    }  # fmt: skip
    missing = row["missing"]
    assert "no target" in missing["planned"] and "'abacus'" in missing["measured_seconds"]
    assert "does not count its bytes" in missing["measured_bytes"]
    assert "'abacus'" in run.describe_step(row)


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.parametrize("name", TINY)
def test_steps_can_be_planned(name):
    planned = programs.plan_step(name, TINY[name], "l4")
    assert planned.keys() == PLANNED.keys() | {"too_large"} and planned["too_large"] is None
    assert (planned["planned_host_bytes"] > 0) == (name == "finetune")
