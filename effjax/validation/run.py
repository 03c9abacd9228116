"""Validation of all kernels, each in a process of its own."""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import native
from ..memory.render import format_bytes, format_seconds
from ..native import defaults
from ..train.host_memory import PROCESS_BYTES, VARIABLE, pinnable_bytes
from . import programs
from .checks import new_row
from .kernels import DTYPES, KERNELS, TABLE, load_kernels
from .processes import Run, run_child
from .sanitizer import sanitize

FORMAT = 1  # of the report
TIME_LIMIT = 600.0  # seconds of a process
SANITIZER_SLOWDOWN = 6  # of a process that compiles most of the time
# Largest difference between the planned and the measured peak of a program.
PEAK_TOLERANCE, PEAK_BYTES = 0.05, 8 * 2**20
# The buffers of autotuning would be part of a peak.
WITHOUT_AUTOTUNING = "--xla_gpu_autotune_level=0"


class NoKernelsError(RuntimeError):
    """Error for missing kernels or devices."""


def validate(
    *,
    platform: str = "cuda",
    kernels: Sequence[str] = tuple(KERNELS),
    dtypes: Sequence[str] = DTYPES,
    cases: Sequence[str] | None = None,
    table: str = TABLE,
    repeats: int = 10,
    time_limit: float = TIME_LIMIT,
    report_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Validate the kernels of a platform and return the report as JSON-serializable data.

    Args:
        platform: "cuda", or "cpu" for the CPU kernels, which are used without a verdict.
        kernels: names of kernels.
        dtypes: of the images.
        cases: names of the cases of each kernel, by default all.
        table: "module:NAME" of the dictionary of kernels.
        repeats: runs of each case.
        time_limit: seconds after which the process of a kernel and dtype counts as hung.
        report_line: is called with a line about each kernel and dtype.

    Raises:
        NoKernelsError: the kernels or their devices are missing.
    """
    state, gpus = native.status().get(platform, "unknown platform"), native.gpus()
    if state != native.LOADED:
        raise NoKernelsError(f"no {platform} kernels: {state}")
    if platform == "cuda" and (gpus is None or not gpus.count):
        raise NoKernelsError("no GPU with NVIDIA's driver")
    report: dict[str, Any] = {"format": FORMAT, "kernels": []}
    options: dict[str, Any] = {"platform": platform, "table": table, "cases": cases}
    tested = load_kernels(table)
    for name in kernels:
        for dtype in (dtype for dtype in dtypes if dtype in tested[name].dtypes):
            # After an invalid access, a GPU refuses all further work of the process.
            chosen = options | {"kernel": name, "dtype": dtype, "repeats": repeats}
            run = run_child(platform, time_limit, "validate", **chosen)
            row = _read_row(report, new_row(name, dtype), run)
            report["kernels"].append(row)
            report_line(describe_row(row))
    sanitize(report, options, SANITIZER_SLOWDOWN * time_limit, report_line)
    return report


def _read_row(report: dict[str, Any], row: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return the row of a process, or `row` if it printed none. Add the devices to the report."""
    if run.lines:
        result = json.loads(run.lines[-1])
        if result["devices"]["key"] is None:
            raise NoKernelsError(
                "JAX finds no device of the platform, or several models (choose with "
                "CUDA_VISIBLE_DEVICES)"
            )
        report |= result["devices"]
        row = result["row"]
    running = row.pop("running")
    if run.failure is not None:
        kind, text = run.failure
        if "key" not in report:
            raise NoKernelsError(f"JAX cannot use the devices: {text}")
        # Plain XLA runs before the kernel. If it fails, that says nothing about the kernel.
        if running["runs_kernel"]:
            row["failures"].append({"case": running["case"], "kind": kind, "text": text})
        else:
            row["untested"][running["case"]] = f"plain XLA: {kind}: {text}"
    return row


def describe_row(row: dict[str, Any]) -> str:
    """Return a line about a kernel and dtype."""
    name = f"{row['kernel']} {row['dtype']}"
    if row["failures"]:
        texts = [f"{f['case']}: {f['kind']}: {f['text']}" for f in row["failures"]]
        return f"{name}: WRONG in {len({f['case'] for f in row['failures']})} cases; {texts[0]}"
    if row["untested"]:
        case, reason = next(iter(row["untested"].items()))
        return f"{name}: NOT TESTED in {len(row['untested'])} cases; {case}: {reason}"
    skipped = f", {len(row['skipped'])} skipped" if row["skipped"] else ""
    native, xla = (f"{1e3 * row['seconds'][name]:.3g} ms" for name in ("native", "xla"))
    return f"{name}: {row['passed']} cases right{skipped}; {native}, XLA {xla}"


def measure_programs(report: dict[str, Any], *, report_line: Callable[[str], None]) -> None:
    """Add planned and measured peaks of programs, and also times of steps, to a report.

    Programs with kernels that are wrong are skipped.
    """
    target = programs.find_target_name(report["devices"][0])
    wrong = {row["kernel"] for row in report["kernels"] if row["failures"]}
    report["target"], report["programs"], report["steps"] = target, [], []
    if target is None:
        report_line(f"no plans: {report['devices'][0]!r} is unknown to the planner")

    for name in (name for name in programs.PROGRAMS if target and name not in wrong):
        planned = _run_program("plan_peak", "cpu", name=name, target=target)
        measured = _run_program("measure_peak", "cuda", WITHOUT_AUTOTUNING, name=name)
        row = compare_peaks(name, planned, measured)
        report["programs"].append(row)
        report_line(f"{name}: {'WRONG, ' if row['failures'] else ''}{row['text']}")
    for name, form in programs.FORMS.items():
        # The plan has the implementation that runs by default.
        if outcomes(report).get(name, {}).get("float32") == "faster":
            form = form | {"implementation": "native"}
        row = measure_step(name, form, target)
        report["steps"].append(row)
        report_line(describe_step(row))


def measure_step(
    name: str, form: dict[str, Any], target: str | None, platform: str = "cuda"
) -> dict[str, Any]:
    """Return what was planned and measured of a step of README.md, and why what is missing is not.

    Args:
        name: a key of `programs.STEPS`.
        form: its arguments. The fine-tuned model has fewer layers if host memory requires it.
        target: the planner's name of the device; without one, nothing is planned.
        platform: of the measurement.
    """
    missing: dict[str, str] = {}
    row: dict[str, Any] = dict.fromkeys(
        ["planned_bytes", "planned_host_bytes", "modelled_seconds", "measured_bytes"]
        + ["measured_seconds", "bytes_ratio", "seconds_ratio"]
    )
    row = {"name": name, "form": form, **row, "missing": missing}

    def run(key: str, task: str, platform: str, xla_flags: str = "", **options: Any) -> Any:
        result = _run_program(task, platform, xla_flags, **options)
        if "error" in result:
            missing[key] = result["error"]
        return result.get("value")

    if name == "finetune":
        layers = run("measured", "fit_finetune", "cpu", host_bytes=free_host_bytes(), **form)
        if layers is None:
            return row
        row["form"] = form = form | {"layers": layers}
    if target is None:
        missing["planned"] = "the planner has no target for this device"
    elif planned := run("planned", "plan_step", "cpu", name=name, form=form, target=target):
        too_large = planned.pop("too_large")
        row |= planned
        if too_large:
            missing["measured"] = too_large
            return row
    options = {"name": name, "form": form}
    row["measured_bytes"] = run(
        "measured_bytes", "measure_peak", platform, WITHOUT_AUTOTUNING, **options
    )
    if row["measured_bytes"] is None:
        missing.setdefault("measured_bytes", "the device does not count its bytes")
    row["measured_seconds"] = run("measured_seconds", "measure_seconds", platform, **options)
    for kind, first in (("bytes", "planned_bytes"), ("seconds", "modelled_seconds")):
        if row[first] and row[f"measured_{kind}"]:
            row[f"{kind}_ratio"] = row[f"measured_{kind}"] / row[first]
    return row


def describe_step(row: dict[str, Any]) -> str:
    """Return a line about a step of README.md."""
    parts = [
        f"{show(row[key])} {key.partition('_')[0]}"
        for key, show in (
            ("planned_bytes", format_bytes), ("measured_bytes", format_bytes),
            ("modelled_seconds", format_seconds), ("measured_seconds", format_seconds),
        )
        if row[key] is not None
    ]  # fmt: skip
    parts += [f"no {key}: {reason}" for key, reason in row["missing"].items()]
    form = ", ".join(f"{key} {value}" for key, value in row["form"].items())
    return f"{row['name']} ({form}): {', '.join(parts)}"


def free_host_bytes() -> int:
    """Return the host memory that a process can pin now, without what other programs use."""
    size = pinnable_bytes()
    with contextlib.suppress(OSError):  # not on Linux
        match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        size = min(size, 1024 * int(match[1]) - PROCESS_BYTES) if match else size
    return size


def _run_program(task: str, platform: str, xla_flags: str = "", **options: Any) -> dict[str, Any]:
    """Return the value or the error of a function of `programs.py` in a process of its own."""
    limit = {VARIABLE: str(pinnable_bytes() // 2**30)}
    run = run_child(platform, TIME_LIMIT, task, xla_flags, variables=limit, **options)
    if run.failure is not None:
        return {"error": f"{run.failure.kind}: {run.failure.text}"}
    return json.loads(run.lines[-1])


def compare_peaks(name: str, planned: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a program in a report, given a value or an error of each."""
    plan, peak, kind = planned.get("value"), measured.get("value"), None
    if "error" in measured:
        kind, text = "error", measured["error"]
    elif "error" in planned:
        text = f"skipped, {planned['error']}"
    elif plan is None or peak is None:
        text = "skipped, the device does not count its bytes"
    else:
        text = f"{plan / 2**20:.1f} MiB planned, {peak / 2**20:.1f} MiB measured"
        if abs(peak - plan) > PEAK_TOLERANCE * plan + PEAK_BYTES:
            kind = "peak"
    failures = [{"case": name, "kind": kind, "text": text}] if kind else []
    row = {"name": name, "planned_bytes": plan, "measured_bytes": peak, "text": text}
    return row | {"failures": failures, "untested": {}}


def find_problems(report: dict[str, Any]) -> list[str]:
    """Return a line about each failure in a report, and each case that was not tested."""
    rows = [(f"{row['kernel']} {row['dtype']}", row) for row in report["kernels"]]
    rows += [("memory", row) for row in report.get("programs", [])]
    lines = []
    for name, row in rows:
        lines += [f"{name}, {f['case']}: {f['kind']}: {f['text']}" for f in row["failures"]]
        lines += [f"{name}, {case}: not tested: {why}" for case, why in row["untested"].items()]
    return lines


def outcomes(report: dict[str, Any]) -> defaults.Outcomes:
    """Return the outcome for each kernel and dtype of a report that could be tested."""
    result: dict[str, dict[str, defaults.Outcome]] = {}
    for row in report["kernels"]:
        seconds = row["seconds"]
        if row["failures"]:
            outcome: defaults.Outcome = "wrong"
        elif row["untested"]:
            continue
        else:
            outcome = "faster" if seconds["native"] < seconds["xla"] else "slower"
        result.setdefault(row["kernel"], {})[row["dtype"]] = outcome
    return result
