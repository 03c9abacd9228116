"""Process of `run.py`: python -m effjax.validation.child FUNCTION OPTIONS.

A kernel may crash or hang. It then takes down this process only. FUNCTION is "validate" or a
function of `programs.py`, and OPTIONS are its arguments in JSON. Each line of stdout is an event.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..native import defaults
from . import guards
from .checks import (
    TOLERANCES,
    Failure,
    check_call,
    compare,
    is_out_of_memory,
    run_and_time,
    run_reference,
)
from .kernels import Call, Kernel, MakeCall


def validate(
    platform: Any, table: str, rows: Sequence[tuple[str, str]], cases: Any, repeats: int
) -> Iterator[dict[str, Any]]:
    """Compare kernels with plain XLA and time those that are right.

    Args:
        platform: "cuda" or "cpu".
        table: "module:NAME" of a dictionary of kernels.
        rows: the name of each kernel, and its dtype.
        cases: names of the cases of each kernel; None for all.
        repeats: runs of each case.

    Yields:
        An event about the devices. For each row a "start" before each part of a case, a "case" with
        its findings, and an "end".
    """
    module, _, name = table.partition(":")
    kernels = getattr(importlib.import_module(module), name)
    device, key = jax.local_devices()[0], defaults.find_key(platform)
    yield {
        "event": "devices",
        "key": None if key is None else key._asdict(),
        "devices": [device.device_kind for device in jax.local_devices()],
        "backend": " ".join(device.client.platform_version.split()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }
    for name, dtype in rows:
        kernel, is_right = kernels[name], True
        jax.config.update("jax_enable_x64", True)
        with guards.guarded_calls():
            for case in kernel.cases if cases is None else cases:
                for event in run_case(kernel, case, kernel.cases[case], dtype, repeats):
                    yield event
                    is_right &= not event.get("failures") and not event.get("untested")
        if is_right:
            jax.config.update("jax_enable_x64", dtype == "float64")
            yield from run_case(kernel, "time", kernel.timed, dtype)
        yield {"event": "end"}


def run_case(
    kernel: Kernel, name: str, make: MakeCall, dtype: str, repeats: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of one case, which compares `repeats` runs, or is timed if None.

    The process must end after another error than a lack of memory: after an invalid access, a GPU
    refuses all further work of the process.
    """
    start = {"event": "start", "case": name}
    case = {"event": "case", "case": name, "skipped": None, "untested": None, "seconds": {}}
    failures: list[Failure] = []
    call, runs_kernel, ends = None, False, False
    yield start | {"runs_kernel": False}
    try:
        call = make(dtype)
        if isinstance(call, str):
            case["skipped"] = call
        else:
            reference = _time_reference(call) if repeats is None else run_reference(call)
            yield start | {"runs_kernel": True}
            runs_kernel = True
            if repeats is None:
                failures, case["seconds"] = _time_call(kernel, call, reference, dtype)
            else:
                failures = check_call(kernel, call, reference, dtype, repeats)
    except Exception as error:
        text = describe_error(error)
        ends = not is_out_of_memory(error)
        if not ends:
            is_large = isinstance(call, Call) and call.tail
            case["skipped" if is_large else "untested"] = text
        elif runs_kernel:
            failures = [Failure("error", text)]
        else:
            case["untested"] = f"plain XLA: {text}"
    yield case | {"failures": [failure._asdict() for failure in failures]}
    if ends:
        raise SystemExit


def _time_reference(call: Call) -> Any:
    return run_and_time(functools.partial(call.apply, implementation="xla"), call)


def _time_call(
    kernel: Kernel, call: Call, reference: Any, dtype: str
) -> tuple[list[Failure], dict[str, float]]:
    """Return failures, and the seconds of the kernel and of XLA for result and gradients.

    The kernel runs without guards here, so that XLA may capture the call in a CUDA graph. The
    reference is XLA in the same dtype, which has errors of its own. The tolerance is therefore four
    times as large.
    """
    want, xla = reference
    got, native = run_and_time(kernel.candidate(call.apply), call)
    wrong = compare(call.names, got, want, 4 * TOLERANCES[dtype])
    failures = [Failure("value", text) for text in wrong.values()]
    return failures, {"native": native, "xla": xla}


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 1000 else f"{text[:500]} ... {text[-500:]}"


def run_program(function: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the value or the error of a function of `programs.py`."""
    from . import programs

    try:
        yield {"value": getattr(programs, function)(**options)}
    except Exception as error:
        yield {"error": describe_error(error)}


def main(function: str, options: dict[str, Any]) -> None:
    """Print the events of a function. All other output goes to stderr."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    is_validation = function == "validate"
    for event in validate(**options) if is_validation else run_program(function, options):
        print(json.dumps(event), file=events, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
