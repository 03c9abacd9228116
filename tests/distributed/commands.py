"""`effjax train` in several processes on this machine, with four devices together.

Starting a process and joining the others takes longer than training a small model. A group
therefore runs one command after the other. This file is also the program of its processes:
`python -m tests.distributed.commands PROCESS REPLIES`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from tests.distributed.launch import ROOT, environment, free_port

DEVICES = 4
PATIENCE = 300  # seconds


class Ended(NamedTuple):
    """The exit code of a command in one process, and what it printed."""

    code: int | None
    out: str
    err: str


class Group:
    """Processes that have joined each other. An error of a command ends them.

    Args:
        number: How many.
        heartbeat_timeout: Seconds after which a silent process counts as dead.
    """

    def __init__(self, number: int = 2, heartbeat_timeout: int = 60):
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.commands = pathlib.Path(self.folder.name), 0
        self.join = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(number)]
        self.join += ["--heartbeat-timeout", str(heartbeat_timeout), "--process-id"]
        self.processes = [self._start(i, DEVICES // number) for i in range(number)]

    def _start(self, process: int, devices: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.distributed.commands"]
        with self._file(process, "out").open("w") as out, self._file(process, "err").open("w") as e:
            return subprocess.Popen(
                [*command, str(process), self._file(process, "replies")],
                env=environment() | {"JAX_NUM_CPU_DEVICES": str(devices)},
                cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=e, text=True,
            )  # fmt: skip

    def _file(self, process: int, kind: str) -> pathlib.Path:
        return self.path / f"{process}.{kind}"

    def _read(self, process: int, kind: str) -> str:
        file = self._file(process, kind)
        return file.read_text() if file.exists() else ""

    def run(self, *argv: object, before: str = "", wait_for: Any = None) -> list[Ended]:
        """Run `effjax train ARGV` in all processes.

        Args:
            argv: The arguments.
            before: Python code that each process runs first. `process` is its number, `argv` its
                command, and `patch` a `pytest.MonkeyPatch` that is undone after the command.
            wait_for: The processes to wait for, by default all.
        """
        self.commands += 1
        numbers = range(len(self.processes))
        sizes = [[len(self._read(i, kind)) for kind in ("out", "err")] for i in numbers]
        for i, process in enumerate(self.processes):
            words = ["train", *map(str, argv)] + (
                [*self.join, str(i)] if self.commands == 1 else []
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps([words, before]) + "\n")
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
        if len(codes) == self.commands:
            return int(codes[-1])
        return self.processes[process].poll()

    def train(self, *argv: object, before: str = "") -> list[str]:
        """Return what the processes print; all must succeed."""
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


def serve(process: int, replies: str) -> None:
    """Run the commands that stdin names."""
    import pytest

    from effjax.cli import main

    for line in sys.stdin:
        argv, before = json.loads(line)
        with pytest.MonkeyPatch.context() as patch:
            exec(before, {"process": process, "argv": argv, "patch": patch})
            code = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(replies, "a") as file:
            file.write(f"{code}\n")
    os._exit(0)  # the others may be gone


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
