"""The processes of a run, on JAX's distributed runtime.

All processes take the same steps. The first one writes the files and shows the progress.
"""

import atexit
import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .errors import TrainError
from .peers import Peers, meet

_has_joined = False
_peers: Peers | None = None
_poll_numbers = itertools.count(1)


def has_joined() -> bool:
    """Return True if this process has joined a cluster, even one of a single process.

    JAX's preemption service then handles SIGTERM, also where `is_multiprocess` is False.
    """
    return _has_joined


def peers() -> Peers | None:
    """Return the connections to the other processes; None if a cluster has started them."""
    return _peers


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
        TrainError: There is no such cluster, the arguments do not fit to those of the others, the
            port is in use, or a process does not come within five minutes.
    """
    global _has_joined, _peers
    jax.config.update("jax_enable_preemption_service", True)
    if coordinator is not None and num_processes is not None and process_id is not None:
        _peers = meet(coordinator, num_processes, process_id)
        atexit.register(_peers.leave)
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
    _has_joined = True


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
    first, mine = run_on_first(lambda: mine), json.loads(json.dumps(mine))
    different = [
        key for key in sorted(first.keys() | mine.keys()) if first.get(key) != mine.get(key)
    ]
    problem = ""
    if different:
        key = different[0]
        problem = (
            f"{name} `{key}` (={mine.get(key)!r:.120} in process {jax.process_index()}) is "
            f"{first.get(key)!r:.120} in process 0. Give all processes the same."
        )
    if problems := [*filter(None, _gather(problem))]:
        raise TrainError(problems[0])


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
    answer = _broadcast(answer)
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


def _gather(text: str) -> list[str]:
    """Return the texts of all processes."""
    from jax.experimental.multihost_utils import process_allgather

    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = process_allgather(np.int32(len(mine)))
    padded = np.zeros(max(int(np.max(sizes)), 1), np.uint8)
    padded[: len(mine)] = mine
    rows = np.asarray(process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _broadcast(answer: dict[str, Any]) -> dict[str, Any]:
    from jax.experimental.multihost_utils import broadcast_one_to_all

    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    buffer = np.zeros(int(broadcast_one_to_all(np.int32(len(text)))), np.uint8)
    if is_first():
        buffer[:] = text
    return json.loads(np.asarray(broadcast_one_to_all(buffer)).tobytes())


@contextlib.contextmanager
def preemption_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once a process has received SIGTERM or SIGHUP.

    All processes must call it after each step. It returns True after the same step in all of them.
    After that, a second signal ends its
    process as it does by default.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    reached = False

    def is_preempted() -> bool:
        nonlocal reached
        # JAX compares its counter with the next number that it expects, so number the calls.
        if not reached and reached_preemption_sync_point(next(_poll_numbers)):
            reached = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return reached

    handler = signal.getsignal(signal.SIGHUP)
    if handler != signal.SIG_IGN:  # nohup ignores it
        # JAX listens to SIGTERM.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield is_preempted
    finally:
        signal.signal(signal.SIGHUP, handler)
