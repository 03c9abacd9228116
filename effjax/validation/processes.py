"""Processes of `child.py`, which a kernel may crash or hang."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .checks import Failure


class Run(NamedTuple):
    """Output of a process, and how it ended."""

    lines: list[str]
    failure: Failure | None  # "crash" or "timeout"
    code: int  # of the exit, below zero for a signal


def run_child(
    platform: str,
    time_limit: float,
    function: str,
    xla_flags: str = "",
    /,
    *,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Run:
    """Run a function of `child.py` with these options in a process on a platform of JAX.

    `prefix` is the command of a program that starts the process.
    """
    environment = {
        "JAX_PLATFORMS": platform,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share the GPU
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **(variables or {}),
    }
    child = [sys.executable, "-m", "effjax.validation.child", function, json.dumps(options)]
    return run_process([*prefix, *child], environment, time_limit)


def run_process(command: Sequence[str], environment: dict[str, str], time_limit: float) -> Run:
    """Run a process, and kill it if it takes longer than `time_limit` seconds."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile() as stderr:
        # A group of its own: killing compute-sanitizer alone would leave the process that it
        # started, and a kernel that hangs there would keep the GPU. Files in place of pipes, which
        # such a process could keep open.
        process = subprocess.Popen(
            command, env=os.environ | environment, process_group=0,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        )  # fmt: skip
        failure = None
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            failure = Failure("timeout", f"no end in {time_limit:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if code and failure is None:
            ending = f"exit code {code}"
            if code < 0:
                ending = f"{signal.strsignal(-code)} (signal {-code})"
            last = stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            failure = Failure("crash", ": ".join([ending, *last])[:1000])
        # The last line of a process that was killed may be cut.
        return Run(stdout.read().split("\n")[:-1], failure, code)
