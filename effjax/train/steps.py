"""The steps of a run from one validation to the next."""

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .checkpoint import Partway, Seen
from .errors import Preempted, TrainError
from .mesh import place
from .task import Measured, Progress, Stop, Task, TrainStep


class NotFinite(Exception):
    """A step whose loss or gradients are not: its number, and its loss."""

    def __init__(self, step: int, loss: float):
        super().__init__(step, loss)
        self.step, self.loss = step, loss


class Trained(NamedTuple):
    """The new state, the means of what was measured, examples a second, and the steps that changed
    nothing."""

    state: Any
    means: Measured
    rate: float
    skipped: list[int]


class Run(NamedTuple):
    """What the steps of a run share; `left_out` are those whose batches are not trained on."""

    task: Task[Any]
    step: TrainStep
    progress: Progress
    partway: Partway
    stop: Stop
    left_out: set[int]


def train_steps(run: Run, state: Any, batches: Iterator[Any], steps: range, seen: Seen) -> Trained:
    """Takes `steps`; what is measured is added to `seen`, of earlier ones since the last number.

    Raises:
        NotFinite: with `on_nan` rollback, where a step is not.
        TrainError: a loss is not finite, and the run is to stop then.
        Preempted: `run.stop` said so.
    """
    task, before, seen = run.task, len(seen), list(seen)
    key, every = jax.random.key(task.config.seed), task.config.checkpoint_every
    rate, clock = 0.0, time.perf_counter()
    pending: list[Any] = []  # what the step before has measured; None: it was left out

    def note() -> None:
        nonlocal rate, clock
        if not pending:
            return
        count, metrics = len(seen) - before, pending.pop()
        measured = {} if metrics is None else _finite(run, steps[count], task.read(metrics))
        seen.append(measured)
        now = time.perf_counter()
        rate = max(count, 1) * task.examples_per_step / (now - clock)
        if not count:
            clock = now  # the first step of a run is mostly compilation
        if measured:
            run.progress.step(steps[count], measured, rate)

    # Reading a step's metrics waits for it, so they are read when the next step is under way.
    for step in steps:
        batch = next(batches)
        if step in run.left_out:
            metrics = None
            state = state._replace(step=place(np.int32(step), state.step.sharding))
        else:
            state, metrics = run.step(state, batch, key)
        note()
        pending.append(metrics)
        if step == steps[-1]:
            break
        if (stopped := run.stop(step)) or every and step % every == 0:
            note()
            run.partway.save(step, state, seen)
            if stopped:
                run.partway.settle()
                raise Preempted(task.where(step))
    note()
    first = steps[0] - before
    skipped = [first + i for i, measured in enumerate(seen) if not measured]
    return Trained(state, _means(task, seen, steps[-1]), rate, skipped)


def _finite(run: Run, step: int, measured: Measured) -> dict[str, float]:
    """What was measured of a step; nothing of one that was skipped."""
    task, loss = run.task, measured["loss"]
    if math.isfinite(loss):
        return dict(measured)
    if task.config.on_nan == "rollback":
        raise NotFinite(step, loss)
    if task.config.on_nan == "stop":
        check_finite(task, "train loss", loss, step)
    run.progress.say(f"skipped step {step}: its loss or its gradients are not finite")
    return {}


def _means(task: Task[Any], seen: Seen, last: int) -> Measured:
    counted = [measured for measured in seen if measured]
    if not counted:
        raise TrainError(
            f"the last {len(seen)} steps have no finite loss {task.where(last)}; use a "
            f"learning_rate below {task.config.learning_rate}"
        )
    return {name: statistics.fmean(one[name] for one in counted) for name in counted[0]}


def check_finite(task: Task[Any], name: str, loss: float, step: int) -> None:
    """Raises `TrainError` for a loss that is infinite or not a number."""
    if not math.isfinite(loss):
        raise TrainError(
            f"the {name} is {loss} {task.where(step)}; use a learning_rate below "
            f"{task.config.learning_rate}"
        )
