"""Validation of all kernels in separate processes."""

import json
import os
import platform as machine
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

from .. import native
from ..native import defaults
from . import programs
from .kernels import DTYPES, KERNELS

TABLE = "effjax.validation.kernels:KERNELS"
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
FORMAT = 1  # of the report
TIME_LIMIT = 180.0  # seconds
PROGRAM_SECONDS = 600.0  # to plan or to run a program
_SECONDS_TO_END = 10.0  # of a process that has closed its stdout
# Largest difference between the planned and the measured peak of a program.
PEAK_TOLERANCE, PEAK_BYTES = 0.05, 8 * 2**20


class NoKernelsError(RuntimeError):
    """Error for missing kernels or devices."""


class ChildError(RuntimeError):
    """A process crashed or did not answer. `kind` is that of `checks.Failure`."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def run_child(
    platform: str, time_limit: float, function: str, xla_flags: str = "", /, **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield the events of a function of `child.py`, run in a process on a platform of JAX.

    Raises:
        ChildError: the process crashed or hung, and has ended.
    """
    environment = {
        "JAX_PLATFORMS": platform,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share the GPU
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-m", "effjax.validation.child", function, json.dumps(options)]
    for line in read_lines(command, environment, time_limit):
        yield json.loads(line)


def read_lines(
    command: Sequence[str], environment: dict[str, str], time_limit: float
) -> Iterator[str]:
    """Yield the lines that a process prints.

    Args:
        command: its arguments.
        environment: its variables, besides those of this process.
        time_limit: seconds between two lines.

    Raises:
        ChildError: the process crashed or hung, and has ended.
    """
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, env=os.environ | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            while (line := _read_line(process, time_limit)).endswith("\n"):
                yield line
            try:
                code = process.wait(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:  # it has closed stdout, and hangs while it ends
                process.kill()
                code = process.wait()
            if code:
                stderr.seek(0)
                lines = stderr.read().decode(errors="replace").strip().splitlines()
                ending = f"exit code {code}"
                if code < 0:
                    ending = f"{signal.strsignal(-code)} (signal {-code})"
                raise ChildError("crash", ": ".join([ending, *lines[-1:]])[:1000])
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _read_line(process: subprocess.Popen, time_limit: float) -> str:
    """Return the next line of stdout. One without a newline means that stdout was closed."""
    assert process.stdout is not None
    timer = threading.Timer(time_limit, process.kill)
    start = time.monotonic()
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line.endswith("\n") and time.monotonic() - start >= time_limit:
        raise ChildError("timeout", f"no answer in {time_limit:g} s")
    return line


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
        time_limit: seconds after which a kernel without an answer counts as hung.
        report_line: is called with a line about each kernel and dtype.

    Raises:
        NoKernelsError: the kernels or their devices are missing.
    """
    state, gpus = native.status().get(platform, "unknown platform"), native.gpus()
    if state != native.LOADED:
        raise NoKernelsError(f"no {platform} kernels: {state}")
    if platform == "cuda" and (gpus is None or not gpus.count):
        raise NoKernelsError("no GPU with NVIDIA's driver")
    report = {
        "format": FORMAT,
        "python": machine.python_version(),
        "platform": machine.platform(),
        "packages": {name: v for name in ("effjax", *PACKAGES) if (v := _version(name))},
        "kernels": [
            _new_row(kernel, dtype)
            for kernel in kernels
            for dtype in dtypes
            if kernel not in KERNELS or dtype in KERNELS[kernel].dtypes
        ],
    }
    options = {"platform": platform, "table": table, "cases": cases, "repeats": repeats}
    todo = list(report["kernels"])
    while todo or "key" not in report:
        rows = [(row["kernel"], row["dtype"]) for row in todo]
        events = run_child(platform, time_limit, "validate", rows=rows, **options)
        _add_events(report, todo, events, report_line)
    return report


def _add_events(
    report: dict[str, Any],
    todo: list[dict[str, Any]],
    events: Iterator[dict[str, Any]],
    report_line: Callable[[str], None],
) -> None:
    """Add the events of a process to a report, and remove the rows that are done from `todo`.

    The process ends after an error of a kernel. Another one then goes on with the next row.
    """
    start, crash = {"case": "start", "runs_kernel": False}, None
    try:
        for event in events:
            kind = event.pop("event")
            if kind == "devices":
                report |= event
                if event["key"] is None:
                    raise NoKernelsError(
                        "JAX finds no device of the platform, or several models (choose with "
                        "CUDA_VISIBLE_DEVICES)"
                    )
            elif kind == "start":
                start = event
            elif kind == "case":
                _add_case(todo[0], event)
            else:
                report_line(describe_row(todo.pop(0)))
    except ChildError as error:
        if "key" not in report:
            raise NoKernelsError(f"JAX cannot use the devices: {error}") from error
        crash = error
    if todo:  # the process has ended early
        row = todo.pop(0)
        if crash is not None:
            _add_crash(row, start, crash)
        report_line(describe_row(row))


def _new_row(kernel: str, dtype: str) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, "dtype": dtype, "passed": 0}
    return row | {"skipped": {}, "untested": {}, "failures": [], "seconds": {}}


def _add_case(row: dict[str, Any], event: dict[str, Any]) -> None:
    case = event["case"]
    row["seconds"] |= event["seconds"]
    for kind in ("skipped", "untested"):
        if event[kind]:
            row[kind][case] = event[kind]
    row["failures"] += [{"case": case, **failure} for failure in event["failures"]]
    is_right = not (event["skipped"] or event["untested"] or event["failures"])
    row["passed"] += is_right and case != "time"


def _add_crash(row: dict[str, Any], start: dict[str, Any], error: ChildError) -> None:
    """Add the end of a process to a row, given the last event that says what runs."""
    if start["runs_kernel"]:
        failure = {"case": start["case"], "kind": error.kind, "text": str(error)}
        row["failures"].append(failure)
    else:
        row["untested"][start["case"]] = f"plain XLA: {error.kind}: {error}"


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


def measure_programs(
    report: dict[str, Any],
    *,
    report_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Add planned and measured peaks of programs, and times of an offloaded step, to a report.

    Programs with kernels that are wrong are skipped.
    """
    target = programs.find_target_name(report["devices"][0])
    wrong = {row["kernel"] for row in report["kernels"] if row["failures"]}
    report["target"], report["programs"] = target, []
    if target is None:
        report_line(f"no plans: {report['devices'][0]!r} is unknown to the planner")
        return

    for name in programs.PROGRAMS:
        if programs.KERNELS_OF_PROGRAMS.get(name) in wrong:
            continue
        planned = _run_program("plan_peak", "cpu", name=name, target=target)
        # The buffers of autotuning would be part of the peak.
        without_autotuning = "--xla_gpu_autotune_level=0"
        measured = _run_program("measure_peak", "cuda", without_autotuning, name=name)
        row = compare_peaks(name, planned, measured)
        report["programs"].append(row)
        report_line(f"{name}: {describe_peaks(row)}")
    planned = _run_program("plan_step", "cpu", target=target)
    measured = _run_program("measure_step", "cuda")
    report["step"] = {"modelled": planned, "measured": measured}
    texts = (
        f"{1e3 * t['value']:.3g} ms" if "value" in t else t["error"] for t in (planned, measured)
    )
    report_line("offloaded step: {} modelled, {} measured".format(*texts))


def _run_program(task: str, platform: str, xla_flags: str = "", **options: Any) -> dict[str, Any]:
    """Return the value or the error of a function of `programs.py` in a process of its own."""
    try:
        (event,) = run_child(platform, PROGRAM_SECONDS, task, xla_flags, **options)
        return event
    except ChildError as error:
        return {"error": f"{error.kind}: {error}"}


def compare_peaks(name: str, planned: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a program in a report, given a value or an error of each."""
    plan, peak = planned.get("value"), measured.get("value")
    row = {"name": name, "planned_bytes": plan, "measured_bytes": peak, "skipped": None}
    row["failures"] = []
    if "error" in measured:
        row["failures"].append({"case": name, "kind": "error", "text": measured["error"]})
    elif "error" in planned:
        row["skipped"] = planned["error"]
    elif plan is None or peak is None:
        row["skipped"] = "the device does not count its bytes"
    elif abs(peak - plan) > PEAK_TOLERANCE * plan + PEAK_BYTES:
        text = f"{peak} bytes at the peak instead of {plan}"
        row["failures"].append({"case": name, "kind": "peak", "text": text})
    return row


def describe_peaks(row: dict[str, Any]) -> str:
    """Return a line about the peaks of a program."""
    if row["skipped"]:
        return f"skipped, {row['skipped']}"
    wrong = "WRONG, " if row["failures"] else ""
    if row["measured_bytes"] is None:
        return f"{wrong}{row['failures'][0]['text']}"
    planned, measured = (row[f"{kind}_bytes"] / 2**20 for kind in ("planned", "measured"))
    return f"{wrong}{planned:.1f} MiB planned, {measured:.1f} MiB measured"


def find_failures(report: dict[str, Any]) -> list[str]:
    """Return a line about each failure in a report."""
    rows = [(f"{row['kernel']} {row['dtype']}", row) for row in report["kernels"]]
    rows += [("memory", row) for row in report.get("programs", [])]
    return [
        f"{name}, {f['case']}: {f['kind']}: {f['text']}"
        for name, row in rows
        for f in row["failures"]
    ]


def find_untested(report: dict[str, Any]) -> list[str]:
    """Return a line about each case in a report that says nothing about its kernel."""
    return [
        f"{row['kernel']} {row['dtype']}, {case}: not tested: {reason}"
        for row in report["kernels"]
        for case, reason in row["untested"].items()
    ]


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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
