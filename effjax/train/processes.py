"""The processes of a run, by JAX's own runtime: all take the same steps, the first writes files."""

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
    """Where the processes meet; what is None, JAX finds out from the cluster (SLURM, Open MPI,
    Kubernetes, Cloud TPU).

    coordinator: HOST:PORT of the first process.
    heartbeat_timeout: seconds after which a process that does not answer counts as dead.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_timeout: int = 100


_joined: list[Cluster] = []
_asked = itertools.count(1)


def joined() -> Cluster | None:
    """Where this process has met others, if it has."""
    return _joined[0] if _joined else None


def join(cluster: Cluster) -> None:
    """Makes this one of the processes of a run; before anything is computed.

    Raises:
        TrainError: there is no such cluster, or its coordinator does not answer.
    """
    jax.config.update("jax_enable_preemption_service", True)
    try:
        jax.distributed.initialize(
            cluster.coordinator, cluster.num_processes, cluster.process_id,
            heartbeat_timeout_seconds=cluster.heartbeat_timeout,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise TrainError(
            f"the processes cannot meet ({str(error).splitlines()[0]}); give --coordinator "
            "HOST:PORT, --num-processes and --process-id, the same address to all"
        ) from error
    _joined.append(cluster)


def several() -> bool:
    """Whether there are other processes; asks no device where there are none."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes the files and says how it goes."""
    return not several() or jax.process_index() == 0


def check_alike(name: str, mine: dict[str, Any]) -> None:
    """Raises `TrainError` where this is not as in the first process."""
    if not several():
        return
    first, mine = from_first(lambda: mine), json.loads(json.dumps(mine))
    for key in sorted(first.keys() | mine.keys()):
        if first.get(key) != mine.get(key):
            raise TrainError(
                f"{name} {key} (={mine.get(key)!r}) is {first.get(key)!r} in process 0; give all "
                "processes the same"
            )


def from_first(action: Callable[[], Any]) -> Any:
    """What `action` returns in the first process, of JSON's types; the others wait for it.

    Raises:
        TrainError: it does there; all processes raise it.
    """
    if not several():
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


def summed(share: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """The sum over all processes of `share(number, of)`, int64."""
    if not several():
        return share(0, 1)
    mine = share(jax.process_index(), jax.process_count())
    from jax.experimental.multihost_utils import process_allgather

    words = process_allgather(mine.view(np.uint32))  # JAX would cut 64 bits
    return np.ascontiguousarray(words).view(np.int64).sum(0)


def _broadcast(answer: dict[str, Any]) -> dict[str, Any]:
    from jax.experimental.multihost_utils import broadcast_one_to_all

    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    length = int(broadcast_one_to_all(np.int32(len(text))))
    room = np.zeros(length, np.uint8)
    if is_first():
        room[:] = text
    return json.loads(np.asarray(broadcast_one_to_all(room)).tobytes())


@contextlib.contextmanager
def preempted() -> Iterator[Callable[[int], bool]]:
    """Whether one of the processes was told to end by SIGTERM or SIGHUP: all hear it after the same
    step.

    From that step on a second one ends its process as it always does.
    """
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    found: list[int] = []

    def asked(step: int) -> bool:
        # JAX compares its counter with the next number that it expects: with a number of calls.
        if not found and reached_preemption_sync_point(next(_asked)):
            found.append(step)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return bool(found)

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:  # as under nohup
        # JAX listens to SIGTERM.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGHUP, before)
