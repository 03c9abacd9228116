"""Validation of all kernels in separate processes."""

import contextlib
import json
import os
import platform as machine
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

from .. import native
from ..native import defaults
from . import programs, torch_times
from .kernels import DTYPES, KERNELS

TABLE = "effjax.validation.kernels:KERNELS"
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
FORMAT = 1  # of the report
TIME_LIMIT = 180.0  # seconds
# Largest difference between the planned and the measured peak of a program.
PEAK_TOLERANCE, PEAK_BYTES = 0.05, 8 * 2**20


class NoKernelsError(RuntimeError):
    """Error for missing kernels or devices."""


class ChildError(RuntimeError):
    """A process crashed or did not answer. `kind` is that of `checks.Failure`."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Child:
    """A process for tasks that may crash or hang.

    Args:
        platform: JAX's platform.
        table: "module:NAME" of a dictionary of kernels.
        guards: place guard bands around the arrays of kernels.
        x64: enable float64.
        time_limit: seconds between two signs of life.
        xla_flags: more flags for XLA.
    """

    def __init__(
        self,
        platform: str,
        table: str,
        guards: bool = False,
        x64: bool = False,
        time_limit: float = TIME_LIMIT,
        xla_flags: str = "",
    ):
        self._time_limit = time_limit
        reading, writing = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {
            "JAX_PLATFORMS": platform,
            "JAX_ENABLE_X64": str(int(x64)),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share the GPU
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        command = [sys.executable, "-m", "effjax.validation.child", table]
        self._process = subprocess.Popen(
            [*command, str(writing), str(int(guards))], env=environment, pass_fds=[writing],
            stdin=subprocess.PIPE, stdout=self._stderr, stderr=self._stderr, text=True,
        )  # fmt: skip
        os.close(writing)
        self._events, self._buffer = reading, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(reading, selectors.EVENT_READ)

    def perform(self, task: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a task.

        Raises:
            ChildError: the process crashed or hung, and has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"task": task, **options}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._crash() from None
        while (event := self._read())["event"] != "done":
            yield event

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + self._time_limit
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, end - time.monotonic())):
                self.close()
                raise ChildError("timeout", f"no answer in {self._time_limit:g} s")
            content = os.read(self._events, 65536)
            if not content:
                raise self._crash()
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _crash(self) -> ChildError:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it has closed its pipes, and hangs while it ends
            self._process.kill()
            code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        ending = f"{signal.strsignal(-code)} (signal {-code})" if code < 0 else f"exit code {code}"
        self.close()
        return ChildError("crash", ": ".join([ending, *lines[-1:]])[:1000])

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if not self._stderr.closed:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # of a line that was not written
                    self._process.stdin.close()
            self._selector.close()
            os.close(self._events)
            self._stderr.close()


class Children:
    """One process at a time, for all tasks with the same settings; a new one after a crash."""

    def __init__(self, platform: str, table: str, time_limit: float):
        self._platform, self._table, self._time_limit = platform, table, time_limit
        self._settings: tuple[bool, bool] | None = None
        self._child: Child | None = None

    def perform(
        self, task: str, *, guards: bool = False, x64: bool = False, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a task, performed with these settings of `Child`."""
        if self._child is None or self._settings != (guards, x64):
            self.close()
            self._settings = guards, x64
            self._child = Child(self._platform, self._table, guards, x64, self._time_limit)
        try:
            yield from self._child.perform(task, **options)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.close()
            self._child = None


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
    children = Children(platform, table, time_limit)
    try:
        report = _describe(platform, children)
        for kernel in kernels:
            for dtype in dtypes:
                row = _check_kernel(kernel, dtype, cases, repeats, children)
                report["kernels"].append(row)
                report_line(f"{kernel} {dtype}: {describe_checks(row)}")
        # float64 last: it needs another process.
        for row in sorted(report["kernels"], key=lambda row: row["dtype"] == "float64"):
            if not row["failures"] and not row["untested"]:
                _time_kernel(row, children)
                if table == TABLE and row["kernel"] in torch_times.NAMES:
                    _time_torchvision(row, children, platform)
                report_line(f"{row['kernel']} {row['dtype']}: {describe_times(row)}")
    finally:
        children.close()
    return report


def measure_programs(
    report: dict[str, Any],
    *,
    platform: str = "cuda",
    time_limit: float = 600.0,
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

    def run(task: str, on: str, **options: Any) -> dict[str, Any]:
        # Without autotuning, whose buffers would be part of the peak.
        flags = "--xla_gpu_autotune_level=0" if task == "measure_peak" else ""
        try:
            child = Child(on, TABLE, time_limit=time_limit, xla_flags=flags)
            with contextlib.closing(child):
                (event,) = child.perform(task, **options)
                return event
        except ChildError as error:
            return {"error": f"{error.kind}: {error}"}

    for name in programs.PROGRAMS:
        if programs.KERNELS_OF_PROGRAMS.get(name) in wrong:
            continue
        planned = run("plan_peak", "cpu", name=name, target=target)
        measured = run("measure_peak", platform, name=name)
        row = compare_peaks(name, planned, measured)
        report["programs"].append(row)
        report_line(f"{name}: {describe_peaks(row)}")
    planned = run("plan_step", "cpu", target=target)
    measured = run("measure_step", platform)
    report["step"] = {"modelled": planned, "measured": measured}
    texts = (
        f"{1e3 * t['value']:.3g} ms" if "value" in t else t["error"] for t in (planned, measured)
    )
    report_line("offloaded step: {} modelled, {} measured".format(*texts))


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


def _describe(platform: str, children: Children) -> dict[str, Any]:
    state = native.status().get(platform, "unknown platform")
    if state != native.LOADED:
        raise NoKernelsError(f"no {platform} kernels: {state}")
    gpus = native.gpus()
    if platform == "cuda" and (gpus is None or not gpus.count):
        raise NoKernelsError("no GPU with NVIDIA's driver")
    try:
        (described,) = children.perform("describe", guards=True, x64=True, platform=platform)
    except ChildError as error:
        raise NoKernelsError(f"JAX cannot use the devices of {platform!r}: {error}") from error
    if described["key"] is None:
        raise NoKernelsError(
            f"JAX finds no {platform} device, or several models (choose with CUDA_VISIBLE_DEVICES)"
        )
    return {
        "format": FORMAT,
        "python": machine.python_version(),
        "platform": machine.platform(),
        "packages": {name: v for name in ("effjax", *PACKAGES) if (v := _version(name))},
        "key": defaults.Key(*described["key"])._asdict(),
        **{name: described[name] for name in ("devices", "backend", "memory_bytes")},
        "kernels": [],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_kernel(
    kernel: str, dtype: str, cases: Sequence[str] | None, repeats: int, children: Children
) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, "dtype": dtype, "passed": 0}
    row |= {"skipped": {}, "untested": {}, "failures": [], "seconds": {}}
    options: dict[str, Any] = dict(kernel=kernel, dtype=dtype, repeats=repeats)
    options["cases"] = None if cases is None else list(cases)
    last: dict[str, Any] = {"event": "start", "case": "start", "runs_kernel": False}
    try:
        for last in children.perform("check", guards=True, x64=True, **options):
            if last["event"] == "case":
                _add_case(row, last)
    except ChildError as error:
        if last["event"] == "start":  # otherwise the process ended after an error
            _add_crash(row, last, error)
    return row


def _add_crash(row: dict[str, Any], start: dict[str, Any], error: ChildError) -> None:
    """Add the end of a process to a row, given the last event that says what runs."""
    if start["runs_kernel"]:
        failure = {"case": start["case"], "kind": error.kind, "text": str(error)}
        row["failures"].append(failure)
    else:
        row["untested"][start["case"]] = f"plain XLA: {error.kind}: {error}"


def _add_case(row: dict[str, Any], event: dict[str, Any]) -> None:
    if event["skipped"]:
        row["skipped"][event["case"]] = event["skipped"]
    elif event["untested"]:
        row["untested"][event["case"]] = event["untested"]
    elif event["failures"]:
        row["failures"] += [{"case": event["case"], **failure} for failure in event["failures"]]
    else:
        row["passed"] += 1


def _time_kernel(row: dict[str, Any], children: Children) -> None:
    """Add the times of the kernel and of XLA to a row, in a process without guards."""
    kernel, dtype = row["kernel"], row["dtype"]
    last: dict[str, Any] = {"case": "time", "runs_kernel": False}
    try:
        x64 = dtype == "float64"
        for event in children.perform("time", x64=x64, kernel=kernel, dtype=dtype):
            last = event
    except ChildError as error:
        _add_crash(row, last, error)
        return
    row["seconds"] = last["seconds"]
    row["failures"] = [{"case": "time", **failure} for failure in last["failures"]]
    if last["untested"]:
        row["untested"]["time"] = last["untested"]


def _time_torchvision(row: dict[str, Any], children: Children, platform: str) -> None:
    """Add the time of torchvision's operator to a row, if it is installed."""
    options = {"kernel": row["kernel"], "dtype": row["dtype"], "platform": platform}
    try:
        x64 = row["dtype"] == "float64"
        (timed,) = children.perform("time_torchvision", x64=x64, **options)
    except ChildError:  # of another project
        return
    if timed["value"] is not None:
        row["seconds"]["torchvision"] = timed["value"]


def describe_checks(row: dict[str, Any]) -> str:
    """Return a line about the cases of a kernel and dtype."""
    if row["failures"]:
        texts = [f"{f['case']}: {f['kind']}: {f['text']}" for f in row["failures"]]
        return f"WRONG in {len({f['case'] for f in row['failures']})} cases; {texts[0]}"
    if row["untested"]:
        case, reason = next(iter(row["untested"].items()))
        return f"NOT TESTED in {len(row['untested'])} cases; {case}: {reason}"
    skipped = f", {len(row['skipped'])} skipped" if row["skipped"] else ""
    return f"{row['passed']} cases right{skipped}"


def describe_times(row: dict[str, Any]) -> str:
    """Return a line about the times of a kernel and dtype."""
    if row["failures"] or row["untested"]:
        return describe_checks(row)
    names = {"native": "", "xla": "XLA ", "torchvision": "torchvision "}
    times = row["seconds"].items()
    return ", ".join(f"{names[name]}{1e3 * seconds:.3g} ms" for name, seconds in times)
