"""Validation of all kernels in processes of their own, and the verdict."""

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

from ..native import defaults
from .kernels import DTYPES, KERNELS

TABLE = "effjax.validation.kernels:KERNELS"
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
FORMAT = 1  # of the report


class NoKernelsError(RuntimeError):
    """There are no kernels, or no device for them."""


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
    """

    def __init__(self, platform: str, table: str, guards: bool, x64: bool, time_limit: float):
        self._time_limit = time_limit
        reading, writing = os.pipe()
        self._stderr = tempfile.TemporaryFile()
        environment = os.environ | {
            "JAX_PLATFORMS": platform,
            "JAX_ENABLE_X64": str(int(x64)),
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
            self._process.stdin.close() if self._process.stdin else None
            self._selector.close()
            os.close(self._events)
            self._stderr.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def validate(
    *,
    platform: str = "cuda",
    kernels: Sequence[str] = tuple(KERNELS),
    dtypes: Sequence[str] = DTYPES,
    cases: Sequence[str] | None = None,
    table: str = TABLE,
    repeats: int = 10,
    time_limit: float = 180.0,
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
        NoKernelsError: there are no kernels, or no device for them.
    """

    def start(guards: bool = False, x64: bool = False) -> Child:
        return Child(platform, table, guards, x64, time_limit)

    report = _describe(platform, start)
    rows: list[dict[str, Any]] = report["kernels"]
    for kernel in kernels:
        rows += _check_kernel(kernel, dtypes, cases, repeats, start, report_line)
    for row in rows:
        if not row["failures"]:
            _time_kernel(row, start)
            report_line(f"{row['kernel']} {row['dtype']}: {describe_times(row)}")
    return report


def outcomes(report: dict[str, Any]) -> defaults.Outcomes:
    """Return the outcome for each kernel and dtype of a report."""
    result: dict[str, dict[str, defaults.Outcome]] = {}
    for row in report["kernels"]:
        seconds = row["seconds"]
        if row["failures"]:
            outcome: defaults.Outcome = "wrong"
        else:
            outcome = "faster" if seconds["native"] < seconds["xla"] else "slower"
        result.setdefault(row["kernel"], {})[row["dtype"]] = outcome
    return result


def _describe(platform: str, start: Callable[..., Child]) -> dict[str, Any]:
    try:
        with start() as child:
            (described,) = child.perform("describe", platform=platform)
    except ChildError as error:
        raise NoKernelsError(f"JAX cannot use the platform {platform!r}: {error}") from error
    if described["key"] is None:
        raise NoKernelsError(f"no native kernels that run on the platform {platform!r}")
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
    kernel: str,
    dtypes: Sequence[str],
    cases: Sequence[str] | None,
    repeats: int,
    start: Callable[..., Child],
    report_line: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for each dtype. After a crash, the next dtype gets another process."""
    rows: list[dict[str, Any]] = []
    child: Child | None = None
    options = {"kernel": kernel, "cases": None if cases is None else list(cases)}
    try:
        for dtype in dtypes:
            row = {"kernel": kernel, "dtype": dtype, "passed": 0, "skipped": {}, "failures": []}
            rows.append(row)
            child = child or start(guards=True, x64=True)
            case = "start"
            try:
                for event in child.perform("check", dtype=dtype, repeats=repeats, **options):
                    case = event["case"]
                    if event["event"] == "case":
                        _add_case(row, event)
            except ChildError as error:
                if not row["failures"]:  # else the process ended because of them
                    row["failures"].append({"case": case, "kind": error.kind, "text": str(error)})
                child = None
            report_line(f"{kernel} {dtype}: {describe_checks(row)}")
    finally:
        if child is not None:
            child.close()
    return rows


def _add_case(row: dict[str, Any], event: dict[str, Any]) -> None:
    if event["skipped"]:
        row["skipped"][event["case"]] = event["skipped"]
    elif event["failures"]:
        row["failures"] += [{"case": event["case"], **failure} for failure in event["failures"]]
    else:
        row["passed"] += 1


def _time_kernel(row: dict[str, Any], start: Callable[..., Child]) -> None:
    """Add the times of the kernel and of XLA to a row, in a process without guards."""
    try:
        with start(x64=row["dtype"] == "float64") as child:
            *_, timed = child.perform("time", kernel=row["kernel"], dtype=row["dtype"])
        row["seconds"] = timed["seconds"]
        row["failures"] = [{"case": "time", **failure} for failure in timed["failures"]]
    except ChildError as error:
        row["failures"] = [{"case": "time", "kind": error.kind, "text": str(error)}]


def describe_checks(row: dict[str, Any]) -> str:
    """Return a line about the cases of a kernel and dtype."""
    if row["failures"]:
        texts = [f"{f['case']}: {f['kind']}: {f['text']}" for f in row["failures"]]
        return f"WRONG in {len({f['case'] for f in row['failures']})} cases; {texts[0]}"
    skipped = f", {len(row['skipped'])} skipped" if row["skipped"] else ""
    return f"{row['passed']} cases right{skipped}"


def describe_times(row: dict[str, Any]) -> str:
    """Return a line about the times of a kernel and dtype."""
    if row["failures"]:
        return describe_checks(row)
    native, xla = (1e3 * row["seconds"][name] for name in ("native", "xla"))
    return f"{native:.3g} ms, XLA {xla:.3g} ms"
