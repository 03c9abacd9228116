"""Several processes of `effjax train`: how they join, and how all end if one fails."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ..train.errors import PreemptionError, TrainError
from . import errors
from .options import RunOptions


def join(options: RunOptions) -> None:
    """Make this process one of several if the options say so."""
    address = options.coordinator, options.num_processes, options.process_id
    given = [part is not None for part in address]
    if not options.distributed:
        if not any(given):
            return
        if not all(given):
            raise TrainError(
                "--coordinator, --num-processes and --process-id must be given together. "
                "--distributed alone asks the cluster."
            )
    from ..train import processes

    processes.join(*address, heartbeat_timeout=options.heartbeat_timeout)
    exit_with_peers()


def count_local(options: RunOptions) -> int | None:
    """Return the number of processes on this machine, if the options say so."""
    host = (options.coordinator or "").rpartition(":")[0]
    return options.num_processes if host in ("localhost", "127.0.0.1", "[::1]") else None


@contextlib.contextmanager
def end_all_on_error(given: Mapping[str, Any]) -> Iterator[None]:
    """In a multi-process run, report an error and exit at once.

    The other processes wait for this one, and would keep it waiting. JAX ends them when its
    heartbeat stops.

    Args:
        given: The options of the command.
    """
    try:
        yield
    except BaseException as error:
        # Ctrl-C during the import of JAX. Another import would fail with another error.
        if sys.modules.get("effjax.train.processes") is None:
            raise
        from ..train.processes import has_joined, is_first, peers

        if not has_joined():
            raise
        if isinstance(error.__cause__, PreemptionError):
            raise  # all processes end
        others = peers()
        if others is None and type(error).__name__ == "JaxRuntimeError":
            _wait_for_jax(given.get("heartbeat_timeout", RunOptions.heartbeat_timeout))
        if others is not None:
            # Communication with a process that has ended fails in JAX, Gloo or Orbax.
            if not _is_own(error) and (ended := others.wait_for_end()):
                error = errors.CommandError(_end_message(ended))
            others.leave(str(error) or type(error).__name__)
        code = errors.report(error)
        if code is None:
            traceback.print_exception(error)
            code = 1
        _exit(code, is_first())


def exit_with_peers() -> None:
    """End this process, with an error, when another one has ended."""
    from ..train.processes import is_first, peers

    def exit_because(ended: str) -> None:
        errors.report(errors.CommandError(_end_message(ended)))
        _exit(1, is_first())

    if (others := peers()) is not None:
        others.watch(exit_because)


def _is_own(error: BaseException) -> bool:
    """Return True if an error cannot come from another process that has ended."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, (TrainError, errors.CommandError, KeyboardInterrupt))


def _end_message(ended: str) -> str:
    return f"{ended.rstrip('.')}. Start all processes again with --resume."


def _exit(code: int, is_first: bool) -> None:
    if is_first:
        time.sleep(1)  # the coordinator: the others must be able to print their errors
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_jax(seconds: int) -> None:
    # A step over several processes fails if one of them ended. JAX names that process and ends this
    # one, after so many seconds of silence.
    print(
        "effjax: a step failed, probably because another process ended. Waiting for JAX to name "
        f"it, at most {seconds} s.",
        file=sys.stderr,
    )
    time.sleep(seconds + 10)
