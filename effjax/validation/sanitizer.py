"""Calls of kernels under NVIDIA's compute-sanitizer, which finds accesses outside of arrays."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checks import new_row
from .kernels import LARGE, load_kernels
from .processes import Run, run_child

PROGRAM = "compute-sanitizer"
ERROR_CODE = 86  # of the program if it found errors; no exit code of Python or of JAX
_OPTIONS = (
    "--tool=memcheck",
    f"--error-exitcode={ERROR_CODE}",
    # Without space between them, a write behind one array is a write to the next one.
    "--padding=65536",
    # The process goes on. JAX would end it by SIGABRT if the context were lost, and so the code.
    "--destroy-on-device-error=kernel",
    # JAX also calls functions of CUDA to see if they succeed.
    "--report-api-errors=no",
    # XLA's own kernels, some of them much larger, run at full speed. Since CUDA 12.3.
    "--kernel-name=kns=effjax",
    "--target-processes=application-only",  # XLA starts assemblers
)
# JAX's own allocator takes the memory of the GPU in large pieces, and shares them out where the
# sanitizer sees no bounds.
_VARIABLES = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def find_program() -> str | None:
    """Return the path of compute-sanitizer on PATH or in CUDA_HOME/bin, or None."""
    folders = [os.environ.get("PATH", os.defpath)]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(os.path.join(home, "bin"))
    return shutil.which(PROGRAM, path=os.pathsep.join(folders))


def sanitize(
    report: dict[str, Any], options: dict[str, Any], time_limit: float, report_line: Callable
) -> None:
    """Run the kernels that passed under compute-sanitizer, and add what it finds to a report.

    `options` are the platform, the table and the cases.
    """
    kernels, program = load_kernels(options["table"]), find_program()
    rows = [
        row
        for row in report["kernels"]
        if kernels[row["kernel"]].is_sanitized and not row["failures"] and not row["untested"]
    ]
    state = {"program": program, "kernels": len(rows), "checked": 0, "reason": None}
    report["sanitizer"] = state
    if program is None:
        state["reason"] = "it is neither on PATH nor in CUDA_HOME/bin"
        return
    report_line(f"running under {program}, which takes longer")
    for row in rows:
        name, dtype = row["kernel"], row["dtype"]
        cases = [case for case in options["cases"] or kernels[name].cases if case != LARGE]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            run = run_child(
                options["platform"], time_limit, "validate", **options | {"cases": cases},
                kernel=name, dtype=dtype, repeats=1, is_timed=False,
                prefix=[program, *_OPTIONS, f"--log-file={log}"], variables=_VARIABLES,
            )  # fmt: skip
            failures, reason = _judge(run, _read_log(log), len(cases))
        if reason:
            # It would also fail for the others, or hang as long.
            state["reason"] = f"{name} {dtype}: {reason}"
            return
        state["checked"] += 1
        row["failures"] += failures
        texts = [f"{f['kind']}: {f['text']}" for f in failures] or ["no errors"]
        report_line(f"{name} {dtype}: {texts[0]}")


def _judge(run: Run, log: list[str], num_cases: int) -> tuple[list[dict[str, str]], str]:
    """Return failures, or the reason why a process under compute-sanitizer says nothing."""
    row = json.loads(run.lines[-1])["row"] if run.lines else new_row("", "")
    failures = row["failures"]
    # A process that crashes after an invalid access keeps the exit code of the crash.
    if run.code == ERROR_CODE or any(line.startswith("Invalid __") for line in log):
        # The kernel was ended there, so a wrong result shows which case it was.
        case = failures[0]["case"] if failures else PROGRAM
        return [{"case": case, "kind": "memory", "text": "; ".join(log[:4])[:500]}], ""
    if run.failure is not None:
        return [], "; ".join([run.failure.text, *log])[:500]
    if not failures and row["passed"] + len(row["skipped"]) < num_cases:
        return [], "; ".join(row["untested"].values()) or "the process ended early"
    return [{**f, "text": f"{f['text']}, under {PROGRAM}"} for f in failures], ""


def _read_log(path: Path) -> list[str]:
    """Return the lines of a log without its title, or nothing if the program did not start."""
    if not path.exists():
        return []
    lines = [line.strip("= ") for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if line and line != PROGRAM.upper()]
