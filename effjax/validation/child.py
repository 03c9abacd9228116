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
    from .checks import Failure, check_call, is_out_of_memory, run_reference

    chosen = kernels[kernel]
    for name in chosen.cases if cases is None else cases:
        case = {"event": "case", "case": name, "skipped": None, "untested": None, "failures": []}
        call, runs_kernel, ends = None, False, False
        yield {"event": "start", "case": name, "runs_kernel": False}
        try:
            call = chosen.cases[name](dtype)
            if isinstance(call, str):
                case["skipped"] = call
            else:
                want = run_reference(call)
                yield {"event": "start", "case": name, "runs_kernel": True}
                runs_kernel = True
                failures = check_call(chosen, call, want, dtype, repeats)
                case["failures"] = [failure._asdict() for failure in failures]
        except Exception as error:
            text = describe_error(error)
            if is_out_of_memory(error):
                is_large = not isinstance(call, str | None) and call.tail
                case["skipped" if is_large else "untested"] = text
            else:
                ends = True
                if runs_kernel:
                    case["failures"] = [Failure("error", text)._asdict()]
                else:
                    case["untested"] = f"plain XLA: {text}"
        yield case
        if ends:
            sys.exit()  # after an invalid access, a GPU refuses all further work of the process


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 1000 else f"{text[:500]} ... {text[-500:]}"


def _time(kernels: Any, kernel: str, dtype: str) -> Iterator[dict[str, Any]]:
    from .checks import is_out_of_memory, time_call, time_reference

    chosen = kernels[kernel]
    yield {"event": "start", "case": "time", "runs_kernel": False}
    try:
        call = chosen.timed(dtype)
        reference = time_reference(call)
        yield {"event": "start", "case": "time", "runs_kernel": True}
        timed = time_call(chosen, call, reference, dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise  # a crash, of XLA or of the kernel
        timed = {"seconds": {}, "failures": [], "untested": describe_error(error)}
    failures = [failure._asdict() for failure in timed["failures"]]
    yield {"event": "result", "untested": None, **timed, "failures": failures}


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
