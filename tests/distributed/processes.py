"""Processes on this machine, each with its own CPU devices, on JAX's distributed runtime.

Importing JAX, starting a process and joining the others take longer than training a small model.
All processes are therefore forked from one that has imported what they need, and a group runs one
program after the other.
"""

import contextlib
import multiprocessing
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
DEVICES = 4  # of all processes together
PATIENCE = 300  # seconds
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([
    "effjax.cli.app", "effjax.train.images.task", "effjax.train.text.task", "matplotlib.figure",
    "orbax.checkpoint", "pytest", "rich.progress",
])  # fmt: skip


class Ended(NamedTuple):
    """The exit code of a program in one process, and what it printed."""

    code: int | None
    out: str
    err: str


class Group:
    """Processes with four devices together. An error of a program ends them.

    Args:
        number: How many.
        heartbeat_timeout: Seconds after which a silent process counts as dead.
    """

    def __init__(self, number: int = 2, heartbeat_timeout: int = 60):
        self.address, self.heartbeat_timeout = f"localhost:{free_port()}", heartbeat_timeout
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.programs = pathlib.Path(self.folder.name), 0
        self.processes, self.connections = [], []
        for process in range(number):
            ours, theirs = multiprocessing.Pipe()
            args = process, theirs, self.path, environment(), DEVICES // number
            child = FORKED.Process(target=serve, args=args, daemon=True)
            child.start()
            theirs.close()
            self.processes.append(child)
            self.connections.append(ours)

    def execute(self, program: str, wait_for: Any = None) -> list[Ended]:
        """Run Python code in all processes, and wait for them, or for those in `wait_for`.

        In the code, `process` is the number of its process, and `patch` a `pytest.MonkeyPatch` that
        is undone at the end. It may set `exit_code`.
        """
        self.programs += 1
        numbers = range(len(self.processes))
        for connection in self.connections:
            connection.send(program)
        codes: dict[int, int | None] = dict.fromkeys(numbers)
        end = time.monotonic() + PATIENCE
        while any(codes[i] is None for i in wait_for or numbers) and time.monotonic() < end:
            time.sleep(0.02)
            codes |= {i: self._code(i) for i in numbers if codes[i] is None}
        return [
            Ended(codes[i], *((self.path / f"{i}.{kind}").read_text() for kind in ("out", "err")))
            for i in numbers
        ]

    def _code(self, process: int) -> int | None:
        with contextlib.suppress(EOFError, ConnectionError):
            if self.connections[process].poll():
                return self.connections[process].recv()
        return self.processes[process].exitcode

    def run(self, *argv: object, before: str = "", wait_for: Any = None) -> list[Ended]:
        """Run `effjax ARGV` in all processes, after the Python code `before`.

        The code may change `argv`.
        """
        words = [*map(str, argv)]
        if self.programs == 0:
            words += ["--coordinator", self.address, "--num-processes", str(len(self.processes))]
            words += ["--heartbeat-timeout", str(self.heartbeat_timeout), "--process-id"]
        own = " + [str(process)]" if self.programs == 0 else ""
        main = "from effjax.cli import main\nexit_code = main(argv)"
        return self.execute(f"argv = {words!r}{own}\n{before}\n{main}", wait_for)

    def train(self, *argv: object, before: str = "") -> list[str]:
        """Return what `effjax ARGV` prints in each process; all must succeed."""
        ended = self.run(*argv, before=before)
        assert [one.code for one in ended] == [0] * len(ended), ended
        return [one.out for one in ended]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return unused.getsockname()[1]


def environment() -> dict[str, str]:
    """Return the environment of these tests without a number of devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    quick = jax.config.read("jax_disable_most_optimizations")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
    }


def serve(
    process: int, connection: Any, folder: pathlib.Path, environment: dict[str, str], devices: int
) -> None:
    """Run the programs that come through a connection, and return their exit codes."""
    os.environ.clear()
    os.environ.update(environment)
    # JAX has read its variables in the process that was forked.
    quick = environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    jax.config.update("jax_disable_most_optimizations", quick)
    jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])
    jax.config.update("jax_num_cpu_devices", devices)
    for program in iter(connection.recv, None):
        for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
            with (folder / f"{process}.{kind}").open("w") as file:
                os.dup2(file.fileno(), stream.fileno())
        with pytest.MonkeyPatch.context() as patch:
            names = {"process": process, "patch": patch, "exit_code": 0}
            exec(program, names)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(names["exit_code"])
