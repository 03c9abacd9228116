"""Process of `run.py`: python -m effjax.validation.child TABLE EVENTS GUARDS.

A kernel may crash or hang. It then takes down this process only. Each line of stdin is a task in
JSON. The file descriptor EVENTS gets a line before and after each part of it.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import guards


def main(table: str, events: int, with_guards: bool) -> None:
    """Perform the tasks in stdin. `table` is "module:NAME" of a dictionary of kernels."""
    if with_guards:
        guards.install()  # before the libraries are loaded
    module, _, name = table.partition(":")
    kernels = getattr(importlib.import_module(module), name)
    with os.fdopen(events, "w") as file:
        for line in sys.stdin:
            task = json.loads(line)
            for event in TASKS[task.pop("task")](kernels, **task):
                file.write(json.dumps(event) + "\n")
                file.flush()
            file.write(json.dumps({"event": "done"}) + "\n")
            file.flush()


def _describe(kernels: Any, platform: Any) -> Iterator[dict[str, Any]]:
    import jax

    from ..native import defaults

    key = defaults.find_key(platform)
    device = jax.local_devices()[0]
    yield {
        "event": "result",
        "key": key,
        "devices": [device.device_kind for device in jax.local_devices()],
        "backend": " ".join(device.client.platform_version.split()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }


def _check(
    kernels: Any, kernel: str, dtype: str, cases: list[str] | None, repeats: int
) -> Iterator[dict[str, Any]]:
    from .checks import Failure, check_call

    chosen = kernels[kernel]
    for name in chosen.cases if cases is None else cases:
        yield {"event": "start", "case": name}
        try:
            call = chosen.cases[name](dtype)
            failures = [] if isinstance(call, str) else check_call(chosen, call, dtype, repeats)
        except Exception as error:
            call, failures = None, [Failure("error", describe_error(error))]
        skipped = call if isinstance(call, str) else None
        yield {
            "event": "case", "case": name, "skipped": skipped,
            "failures": [failure._asdict() for failure in failures],
        }  # fmt: skip
        if any(failure.kind == "error" for failure in failures):
            sys.exit()  # after an invalid access, a GPU refuses all further work of the process


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 1000 else f"{text[:500]} ... {text[-500:]}"


def _time(kernels: Any, kernel: str, dtype: str) -> Iterator[dict[str, Any]]:
    from .checks import time_call

    yield {"event": "start", "case": "time"}
    chosen = kernels[kernel]
    timed = time_call(chosen, chosen.timed(dtype), dtype)
    failures = [failure._asdict() for failure in timed["failures"]]
    yield {"event": "result", "seconds": timed["seconds"], "failures": failures}


def _time_torchvision(kernels: Any, **options: Any) -> Iterator[dict[str, Any]]:
    from .torch_times import time_torchvision

    try:
        yield {"event": "result", "value": time_torchvision(**options)}
    except Exception as error:  # of a dtype that the operator does not support
        yield {"event": "result", "value": None, "error": describe_error(error)}


def _call_programs(function: str) -> Callable[..., Iterator[dict[str, Any]]]:
    """Return the task that calls a function of `programs.py`."""

    def call(kernels: Any, **options: Any) -> Iterator[dict[str, Any]]:
        from . import programs

        try:
            yield {"event": "result", "value": getattr(programs, function)(**options)}
        except Exception as error:
            yield {"event": "result", "error": describe_error(error)}

    return call


_PROGRAM_TASKS = ("plan_peak", "measure_peak", "plan_step", "measure_step")
TASKS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "describe": _describe,
    "check": _check,
    "time": _time,
    "time_torchvision": _time_torchvision,
    **{name: _call_programs(name) for name in _PROGRAM_TASKS},
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
