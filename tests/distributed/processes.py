"""Processes on this machine, each with its own CPU devices, on JAX's distributed runtime.

Starting a process and joining the others takes longer than training a small model. A group
therefore runs one program after the other. This file is also what its processes run:
`python -m tests.distributed.processes PROCESS REPLIES`.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
DEVICES = 4  # of all processes together
PATIENCE = 300  # seconds


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
        self.processes = [self._start(process, number) for process in range(number)]

    def _start(self, process: int, number: int) -> subprocess.Popen:
        command = [sys.executable, "-m", __name__, str(process), self._file(process, "replies")]
        with self._file(process, "out").open("w") as out, self._file(process, "err").open("w") as e:
            return subprocess.Popen(
                command, env=environment() | {"JAX_NUM_CPU_DEVICES": str(DEVICES // number)},
                cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=e, text=True,
            )  # fmt: skip

    def _file(self, process: int, kind: str) -> pathlib.Path:
        return self.path / f"{process}.{kind}"

    def _read(self, process: int, kind: str) -> str:
        file = self._file(process, kind)
        return file.read_text() if file.exists() else ""

    def execute(self, program: str, wait_for: Any = None) -> list[Ended]:
        """Run Python code in all processes.

        Args:
            program: The code. `process` is the number of its process, and `patch` a
                `pytest.MonkeyPatch` that is undone at the end. It may set `exit_code`.
            wait_for: The processes to wait for, by default all.
        """
        self.programs += 1
        numbers = range(len(self.processes))
        sizes = [[len(self._read(i, kind)) for kind in ("out", "err")] for i in numbers]
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(program) + "\n")
            process.stdin.flush()
        end = time.monotonic() + PATIENCE
        while any(self._code(i) is None for i in wait_for or numbers) and time.monotonic() < end:
            time.sleep(0.05)
        return [
            Ended(self._code(i), self._read(i, "out")[out:], self._read(i, "err")[err:])
            for i, (out, err) in zip(numbers, sizes, strict=True)
        ]

    def _code(self, process: int) -> int | None:
        codes = self._read(process, "replies").split()
        return int(codes[-1]) if len(codes) == self.programs else self.processes[process].poll()

    def run(
        self, *argv: object, command: str = "train", before: str = "", wait_for: Any = None
    ) -> list[Ended]:
        """Run `effjax COMMAND ARGV` in all processes.

        Args:
            argv: The arguments.
            command: The command.
            before: Python code that each process runs first. It may change `argv`.
            wait_for: As in `execute`.
        """
        words = [command, *map(str, argv)]
        if self.programs == 0:
            words += ["--coordinator", self.address, "--num-processes", str(len(self.processes))]
            words += ["--heartbeat-timeout", str(self.heartbeat_timeout), "--process-id"]
        own = " + [str(process)]" if self.programs == 0 else ""
        main = "from effjax.cli import main\nexit_code = main(argv)"
        return self.execute(f"argv = {words!r}{own}\n{before}\n{main}", wait_for)

    def train(self, *argv: object, before: str = "") -> list[str]:
        """Return what `effjax train ARGV` prints in each process; all must succeed."""
        ended = self.run(*argv, before=before)
        assert [one.code for one in ended] == [0] * len(ended), ended
        return [one.out for one in ended]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.folder.cleanup()


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return unused.getsockname()[1]


def environment() -> dict[str, str]:
    """Return the environment of these tests without a number of devices."""
    import jax

    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    quick = jax.config.read("jax_disable_most_optimizations")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
    }


def serve(process: int, replies: str) -> None:
    """Run the programs that stdin holds, one in each line."""
    import pytest

    for line in sys.stdin:
        with pytest.MonkeyPatch.context() as patch:
            names = {"process": process, "patch": patch, "exit_code": 0}
            exec(json.loads(line), names)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(replies, "a") as file:
            file.write(f"{names['exit_code']}\n")
    os._exit(0)  # the others may be gone


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
