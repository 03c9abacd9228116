"""Process of `run.py`: python -m effjax.validation.child FUNCTION OPTIONS.

A kernel may crash or hang. It then takes down this process only. FUNCTION is "validate" or a
function of `programs.py`, and OPTIONS are its arguments in JSON. Each line of stdout is a result in
JSON, of which the last one counts.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from ..native import defaults
from . import checks
from .kernels import LARGE, Kernel, load_kernels


def validate(
    show: Callable[[dict[str, Any]], None],
    platform: Literal["cpu", "cuda"],
    table: str,
    kernel: str,
    dtype: str,
    cases: Sequence[str] | None,
    repeats: int,
    is_timed: bool = True,
) -> None:
    """Compare a kernel with plain XLA, and time it if it is right, with options of `run.validate`.

    `show` is called with the devices and the row of the report whenever the row changes. The row
    says what runs next, in case this process ends there.
    """
    tested, row = load_kernels(table)[kernel], checks.new_row(kernel, dtype)
    device, key = jax.local_devices()[0], defaults.find_key(platform)
    devices = {
        "key": None if key is None else key._asdict(),
        "devices": [device.device_kind for device in jax.local_devices()],
        "backend": " ".join(device.client.platform_version.split()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
    }

    def show_row() -> None:
        show({"devices": devices, "row": row})

    jax.config.update("jax_enable_x64", True)  # for the reference
    for case in tested.cases if cases is None else cases:
        run_case(row, tested, case, show_row, repeats)
    if is_timed and not row["failures"] and not row["untested"]:
        # The programs of users, whose times these are, have 32-bit indices.
        jax.config.update("jax_enable_x64", dtype == "float64")
        run_case(row, tested, "time", show_row)


def run_case(
    row: dict[str, Any], kernel: Kernel, name: str, show: Callable, repeats: int | None = None
) -> None:
    """Run one case `repeats` times, or measure its time if None, and add it to a row.

    `show` is called before XLA runs, before the kernel runs, and at the end.
    """
    dtype = row["dtype"]
    running = row["running"] = {"case": name, "runs_kernel": False}
    show()
    try:
        call = kernel.cases[name](dtype) if repeats else kernel.timed(dtype)
        if isinstance(call, str):
            row["skipped"][name] = call
        else:
            reference: Any = (checks.run_reference if repeats else checks.time_reference)(call)
            running["runs_kernel"] = True
            show()
            if repeats:
                failures = checks.check_call(kernel, call, reference, dtype, repeats)
            else:
                failures, row["seconds"] = checks.check_time(kernel, call, reference, dtype)
            row["failures"] += [{"case": name, **failure._asdict()} for failure in failures]
            row["passed"] += bool(repeats and not failures)
    except Exception as error:
        text = describe_error(error)
        if checks.is_out_of_memory(error):
            row["skipped" if name == LARGE else "untested"][name] = text
        else:
            if running["runs_kernel"]:
                row["failures"].append({"case": name, "kind": "error", "text": text})
            else:
                row["untested"][name] = f"plain XLA: {text}"
            show()
            # After an invalid access, a GPU refuses all further work of the process.
            raise SystemExit from error
    show()


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 1000 else f"{text[:500]} ... {text[-500:]}"


def run_program(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the value or the error of a function of `programs.py`."""
    from . import programs

    try:
        return {"value": getattr(programs, function)(**options)}
    except Exception as error:
        return {"error": describe_error(error)}


def main(function: str, options: dict[str, Any]) -> None:
    """Print the results of a function. All other output goes to stderr."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def show(result: dict[str, Any]) -> None:
        print(json.dumps(result), file=results, flush=True)

    if function == "validate":
        validate(show, **options)
    else:
        show(run_program(function, options))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
