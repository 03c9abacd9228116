"""Several processes of `effjax train`: how they meet, and how one that fails ends all."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .options import option

if TYPE_CHECKING:
    from ..train.processes import Cluster

PREEMPTED = 75  # the exit code after SIGTERM or SIGHUP: try again later
PANEL = "Several processes"
OPTIONS = "distributed", "coordinator", "num_processes", "process_id", "heartbeat_timeout"

Distributed = Annotated[
    bool,
    option(
        "One of several processes, as SLURM, Open MPI or Kubernetes starts them.",
        PANEL,
        "--distributed",
    ),
]
Coordinator = Annotated[str | None, option("HOST:PORT of process 0, where all meet.", PANEL)]
NumProcesses = Annotated[int | None, option("How many there are.", PANEL)]
ProcessId = Annotated[int | None, option("Which one this is, from 0.", PANEL)]
HeartbeatTimeout = Annotated[
    int, option("Seconds of silence after which a process counts as dead.", PANEL)
]


def cluster_of(
    distributed: bool,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat_timeout: int,
) -> "Cluster | None":
    """Where to meet the others; None: there are none."""
    given = coordinator, num_processes, process_id
    if not distributed and given == (None, None, None):
        return None
    from ..train.errors import TrainError
    from ..train.processes import Cluster

    if not distributed and None in given:
        raise TrainError(
            "--coordinator, --num-processes and --process-id go together; --distributed alone "
            "asks the cluster"
        )
    if num_processes is not None and num_processes < 1:
        raise TrainError(f"num_processes (={num_processes}) must be at least 1")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise TrainError(f"process_id (={process_id}) must lie in 0..{(num_processes or 1) - 1}")
    if heartbeat_timeout < 1:
        raise TrainError(f"heartbeat_timeout (={heartbeat_timeout}) must be at least 1")
    return Cluster(*given, heartbeat_timeout)


@contextlib.contextmanager
def ends_all() -> Iterator[None]:
    """A process of several that fails ends at once, and does not wait for the others, which wait
    for it: JAX ends them when it misses this one."""
    try:
        yield
    except BaseException as error:
        from ..train.processes import is_first, joined

        if not (cluster := joined()):
            raise
        if type(error).__name__ == "JaxRuntimeError":
            _wait_for_word(cluster.heartbeat_timeout)
        code = _exit_code(error)
        if code in (0, PREEMPTED):  # all of them
            raise
        if is_first():
            time.sleep(1)  # the others meet here, and shall say their errors first
        _leave(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    traceback.print_exception(error)
    return 1


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_word(seconds: int) -> None:
    """A program over several processes fails where one is gone. JAX knows which one, says it and
    ends this process, as soon as that one has been silent for so many seconds."""
    typer.echo(
        "effjax: a step failed, probably as another process has ended; waiting for JAX to say "
        f"which, {seconds} s at most",
        err=True,
    )
    time.sleep(seconds + 10)
