"""The processes of a run, on JAX's distributed runtime.

All processes take the same steps. The first one writes the files and shows the progress.
"""

import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .errors import TrainError


class Cluster(NamedTuple):
    """The processes of a run.

    JAX asks the cluster (SLURM, Open MPI, Kubernetes, Cloud TPU) for what is None.

    Attributes:
        coordinator: HOST:PORT of the first process.
        num_processes: The number of processes.
        process_id: The number of this process, from 0.
        heartbeat_timeout: Seconds of silence after which a process counts as dead.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_timeout: int = 100


_clusters: list[Cluster] = []  # the one that this process has joined
_questions = itertools.count(1)


def current_cluster() -> Cluster | None:
    """Return the cluster that this process has joined."""
    return _clusters[0] if _clusters else None


def join(cluster: Cluster) -> None:
    """Join the other processes of a run, before anything is computed.

    Raises:
        TrainError: There is no such cluster, or its coordinator does not answer.
    """
    jax.config.update("jax_enable_preemption_service", True)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            heartbeat_timeout_seconds=cluster.heartbeat_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise TrainError(
            f"the processes cannot connect ({str(error).splitlines()[0]}). Give --coordinator "
            "HOST:PORT, --num-processes and --process-id, the same address to all."
        ) from error
    _clusters.append(cluster)


def is_multiprocess() -> bool:
    """Return True if the run has several processes. Initializes no backend if it has one."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Return True in the process that writes the files and shows the progress."""
    return not is_multiprocess() or jax.process_index() == 0


def check_same_everywhere(name: str, mine: dict[str, Any]) -> None:
    """Raise TrainError if a value differs from that in the first process."""
    if not is_multiprocess():
        return
    first, mine = run_on_first(lambda: mine), json.loads(json.dumps(mine))
    for key in sorted(first.keys() | mine.keys()):
        if first.get(key) != mine.get(key):
            raise TrainError(
                f"{name} {key} (={mine.get(key)!r}) is {first.get(key)!r} in process 0. Give all "
                "processes the same."
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


def _broadcast(answer: dict[str, Any]) -> dict[str, Any]:
    from jax.experimental.multihost_utils import broadcast_one_to_all

    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    buffer = np.zeros(int(broadcast_one_to_all(np.int32(len(text)))), np.uint8)
    if is_first():
        buffer[:] = text
    return json.loads(np.asarray(broadcast_one_to_all(buffer)).tobytes())


@contextlib.contextmanager
def preemption_signal() -> Iterator[Callable[[int], bool]]:
    """Yield a function of the step that returns True once a process has received SIGTERM or SIGHUP.

    It returns True after the same step in all processes. After that, a second signal ends its
    process as it does by default.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    reached = False

    def is_preempted(step: int) -> bool:
        nonlocal reached
        # JAX compares its counter with the next number that it expects, so number the calls.
        if not reached and reached_preemption_sync_point(next(_questions)):
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
