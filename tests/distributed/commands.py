"""`effjax train` in several processes on this machine, with four devices together."""

import subprocess
import sys

from tests.distributed.launch import environment, free_port

DEVICES = 4
PATIENCE = 300  # seconds


def start(number: int, *argv: object, before: str = "", heartbeat_timeout: int = 60) -> list:
    """Start processes of `effjax train ARGV`, each with its share of the devices.

    Args:
        number: How many.
        argv: The arguments.
        before: Python code that each runs first; `process` is its number.
        heartbeat_timeout: Seconds after which a silent process counts as dead.
    """
    port, started = free_port(), []
    code = f"{before}\nimport sys\nfrom effjax.cli import main\nsys.exit(main(sys.argv[1:]))"
    for process in range(number):
        place = ["--coordinator", f"localhost:{port}", "--num-processes", number]
        place += ["--process-id", process, "--heartbeat-timeout", heartbeat_timeout]
        command = [
            sys.executable, "-c", f"process = {process}\n{code}", "train",
            *argv, *(place if number > 1 else []),
        ]  # fmt: skip
        started.append(
            subprocess.Popen(
                [str(word) for word in command],
                env=environment() | {"JAX_NUM_CPU_DEVICES": str(DEVICES // number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ended(started: list) -> list[tuple[int, str, str]]:
    """Wait for processes, and return their exit codes and outputs."""
    try:
        said = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *each) for process, each in zip(started, said, strict=True)]


def train(number: int, *argv: object, **options) -> list[str]:
    """Return what the processes print; all must succeed."""
    found = ended(start(number, *argv, **options))
    assert [code for code, _, _ in found] == [0] * number, found
    return [out for _, out, _ in found]
