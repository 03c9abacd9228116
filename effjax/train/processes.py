"""The processes of a run, on JAX's distributed runtime.

All processes take the same steps. The first one writes the files and shows the progress.
"""

import itertools
import json
import re
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .errors import TrainError

_poll_numbers = itertools.count(1)


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat_timeout: int,
) -> None:
    """Join the other processes of a run, before anything is computed.

    The cluster (SLURM, Open MPI, Kubernetes, Cloud TPU) provides the arguments that are None.

    Args:
        coordinator: HOST:PORT of the first process.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.
        heartbeat_timeout: Seconds of silence after which a process counts as dead.

    Raises:
        TrainError: There is no such cluster, or an argument is wrong. If processes do not find each
            other, JAX aborts them after five minutes.
    """
    # JAX takes the port off without a check, and waits for addresses that do not exist.
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise TrainError(f"`coordinator` (={coordinator}) must be HOST:PORT.")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise TrainError(
            f"the processes cannot connect ({str(error).splitlines()[0]}). Give --coordinator "
            "HOST:PORT, --num-processes and --process-id, the same address to all."
        ) from error


def is_multiprocess() -> bool:
    """Return True if the run has several processes.

    Does not initialize a backend in a single-process run.
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Return True in the process that writes the files and shows the progress."""
    return not is_multiprocess() or jax.process_index() == 0


def check_same_everywhere(name: str, mine: dict[str, Any]) -> None:
    """Raise TrainError in all processes if a value differs from that in the first process."""
    if not is_multiprocess():
        return
    # All of them compare the values of all, so that they agree about the error.
    first, *others = _gather(mine)
    for process, theirs in enumerate(others, 1):
        for key in sorted(first.keys() | theirs.keys()):
            if first.get(key) != theirs.get(key):
                raise TrainError(
                    f"{name} `{key}` (={theirs.get(key)!r:.120} in process {process}) is "
                    f"{first.get(key)!r:.120} in process 0. Give all processes the same."
                )


def run_on_first(action: Callable[[], Any]) -> Any:
    """Call `action` in the first process and return its result, of JSON types, in all of them.

    Raises:
        TrainError: `action` raised TrainError or OSError; all processes raise it.
    """
    if not is_multiprocess():
        return action()
    answer: dict[str, Any] = {}
    if is_first():
        try:
            answer["value"] = action()
        except TrainError as error:
            answer["error"] = str(error)
        except OSError as error:
            answer["error"] = f"{error.filename}: {error.strerror or error}"
    answer = _gather(answer)[0]
    if "error" in answer:
        raise TrainError(answer["error"])
    return answer["value"]


def sum_over_processes(share: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Return the sum over all processes of `share(process, number of processes)`, int64."""
    if not is_multiprocess():
        return share(0, 1)
    mine = share(jax.process_index(), jax.process_count())
    from jax.experimental.multihost_utils import process_allgather

    words = process_allgather(mine.view(np.uint32))  # JAX would truncate 64 bits
    return np.ascontiguousarray(words).view(np.int64).sum(0)


def is_preempted() -> bool:
    """Return True, after the same step in all processes, once one of them has received SIGTERM.

    All processes must call it after each step, until it returns True. A second SIGTERM then ends
    its process. JAX notices the first one in a cluster of a single process, too.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    # JAX compares its counter with the next number that it expects. Steps are no such numbers: a
    # process may train several runs, each from its own step.
    if not reached_preemption_sync_point(next(_poll_numbers)):
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return True


def _gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values, of JSON types, of all processes."""
    from jax.experimental.multihost_utils import process_allgather

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # All processes must pass arrays of the same shape.
    sizes = process_allgather(np.int32(len(mine)))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: len(mine)] = mine
    rows = np.asarray(process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
