"""The run of any task: steps of training, and from time to time a test and a checkpoint."""

import contextlib
import errno
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax

from .checkpoint import Checkpoints, Partway, Seen
from .errors import Preempted, TrainError
from .options import WITHOUT_EFFECT
from .processes import from_first
from .run_directory import RunDirectory

Measured = Mapping[str, float]  # by name; "loss" is among them, unless nothing was measured
Part = Literal["validation", "test"]  # of the data
Record = dict[str, Any]  # a line of metrics.jsonl
Stop = Callable[[int], bool]  # of a step
TrainStep = Callable[[Any, Any, jax.Array], tuple[Any, Any]]  # (state, batch, key)
Result = TypeVar("Result", covariant=True)


class Options(Protocol):
    """What the loop needs to know of a task's config."""

    @property
    def seed(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def checkpoint_every(self) -> int | None: ...


class Task(Protocol[Result]):
    """What `fit` trains: its data, its model and its devices, and what is measured of it.

    A run is counted in epochs or in steps (`kind`). After some `numbers` of these it is validated,
    which gives a line of metrics.jsonl and a checkpoint; the last number is the run's end, at which
    the best checkpoint is tested. A number is `steps_each` steps: those of an epoch, or one.
    """

    @property
    def config(self) -> Options: ...
    @property
    def kind(self) -> str: ...
    @property
    def numbers(self) -> Sequence[int]: ...
    @property
    def steps_each(self) -> int: ...
    @property
    def examples_per_step(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """For config.json: under `options` the options, among them the run's length, whose name is
        the plural of `kind`, and under `data` what tells other data from these."""
        ...

    def initial_state(self) -> Any:
        """What step 0 begins with: what the seed gives, or the weights of another run."""
        ...

    def shapes(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the state, with the shardings that the train step wants, to
        restore one; nothing is read."""
        ...

    def make_step(self) -> TrainStep:
        """Compiles `(state, batch, key) -> (state, metrics)`; the state is donated."""
        ...

    def make_test(self) -> Callable[[Any, Part], Measured]:
        """Compiles `(state, part) -> measured` over a part of the data; nothing is measured of a
        validation part that is empty."""
        ...

    def batches(self, done: int) -> Iterator[Any]:
        """Batches to train on for ever, from that after `done` steps on; the same for a seed."""
        ...

    def read(self, metrics: Any) -> Measured:
        """A step's metrics as numbers, which waits for the step."""
        ...

    def where(self, step: int) -> str:
        """For a message: `in epoch 3`, `at step 70`."""
        ...

    def record(self, number: int, train: Measured, validation: Measured, rate: float) -> Record:
        """A line of metrics.jsonl; `train` holds means over the steps since the line before, and
        `rate` is in examples a second."""
        ...

    def score(self, record: Record) -> Any:
        """Higher is better: by the validation set, and without one later is better."""
        ...

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        """The run's curve, on matplotlib's axes."""
        ...

    def result(
        self, records: Sequence[Record], best: Record, tested: Measured, began: float
    ) -> Result:
        """What the run came to, a dataclass: `tested` is of the parameters at the `best` record,
        and `began` is by `time.perf_counter`."""
        ...


class Progress:
    """Is told how a run goes. This one does nothing with it."""

    def start(self, steps: int, done: int) -> None:
        """Before the first step is compiled: the number of steps, and how many are done already."""

    def step(self, step: int, measured: Measured, rate: float) -> None:
        """After each step, with what was measured of its batch, and examples a second."""

    def report(self, record: Record) -> None:
        """After each validation; `record` is its line of metrics.jsonl."""

    def stop(self) -> None:
        """After training, however it ends."""


def fit(
    task: Task[Result], run: RunDirectory, progress: Progress | None = None, resume: bool = False,
    stop: Stop = lambda step: False,
) -> Result:  # fmt: skip
    """Trains, chooses the best parameters by the validation set, and tests these; writes
    metrics.jsonl, checkpoints and curve.png.

    All that is random is drawn from the seed and the epoch or the step, so a run that goes on after
    an interruption ends with the same bits as one that was not interrupted.

    Of several processes each calls this; the first writes all but the checkpoints' arrays.

    Args:
        task: from the `prepare` of `images.task` or `lm.task`.
        run: where to write.
        progress: is told how it goes.
        resume: begin after the last checkpoint of `run`; if it has none, from the beginning. The
            task's options must be those of the run, but for its length: with another one, all
            further steps follow the schedule of a run of that length.
        stop: asked after each step, with its number; where it says so, the run is saved and ends.

    Raises:
        Preempted: `stop` said so.
        TrainError: the loss is not finite, `run` cannot be gone on with, a full disk, or another
            process that trains in `run`.
        KeyboardInterrupt: after the files have been brought up to date.
    """
    try:
        with contextlib.ExitStack() as stack:
            from_first(lambda: stack.enter_context(run.locked()))
            return _fit(task, run, progress or Progress(), resume, stop)
    except (KeyboardInterrupt, Preempted):
        with contextlib.suppress(OSError, TrainError):  # it is the interruption that shall be said
            run.append({"kind": "interrupted"})
            _draw(task, run)
        raise
    except (OSError, TrainError) as error:
        if run.is_gone:
            raise TrainError(
                f"{run.path}: was deleted while it was trained; start a new run"
            ) from error
        if isinstance(error, TrainError):
            raise
        mend = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
        raise TrainError(
            f"{error.filename or run.path}: cannot be written to ({error.strerror or error}); "
            f"{mend}, then resume"
        ) from error


def _fit(
    task: Task[Result], run: RunDirectory, progress: Progress, resume: bool, stop: Stop
) -> Result:
    began = time.perf_counter()
    try:
        with Checkpoints(run.checkpoints) as checkpoints, Partway(run.partway) as partway:
            trained = _train(task, run, checkpoints, partway, progress, resume, stop)
    finally:
        progress.stop()
    result = task.result(*trained, began)
    run.append({"kind": "final"} | vars(result))
    if run.writes:
        shutil.rmtree(run.partway, ignore_errors=True)
    _draw(task, run)
    return result


def _draw(task: Task[Any], run: RunDirectory) -> None:
    records = [record for record in run.metrics if record.get("kind") == task.kind]
    run.draw(lambda axes: task.draw(axes, records))


def _train(
    task: Task[Any], run: RunDirectory, checkpoints: Checkpoints, partway: Partway,
    progress: Progress, resume: bool, stop: Stop,
) -> tuple[list[Record], Record, Measured]:  # fmt: skip
    """All steps, and the test; returns their lines of metrics.jsonl, the best one of these, and
    what was measured of its parameters in the test."""
    state, done, seen, records = _begin(task, run, checkpoints, partway, resume)
    train_step, test = task.make_step(), task.make_test()
    each, end = task.steps_each, task.numbers[-1]
    batches = task.batches(done)
    progress.start(end * each, done)
    for number in [number for number in task.numbers if number * each > done]:
        began = time.perf_counter()
        steps = range(done + 1, number * each + 1)
        state, train, rate = _train_steps(
            task, train_step, state, batches, steps, seen, progress, partway, stop
        )
        validation = test(state, "validation")
        _check_finite(task, "validation loss", validation.get("loss", 0.0), steps[-1])
        record = task.record(number, train, validation, rate)
        record |= {"seconds": time.perf_counter() - began}
        records.append(record)
        run.append(record)
        best = _best(task, records, [*checkpoints.steps, number])
        checkpoints.save(number, state, best=best[task.kind])
        progress.report(record)
        done, seen = number * each, []
        if number != end and stop(done):
            checkpoints.settle()
            raise Preempted(task.where(done))
    checkpoints.settle()
    best = _best(task, records, checkpoints.steps)
    number = best[task.kind]
    if number * each != done:
        del state
        state = checkpoints.restore(task.shapes(), number)
    tested = test(state, "test")
    _check_finite(task, "test loss", tested["loss"], number * each)
    return records, best, tested


def _begin(
    task: Task[Any], run: RunDirectory, checkpoints: Checkpoints, partway: Partway, resume: bool
) -> tuple[Any, int, Seen, list[Record]]:
    """The state to begin with, the steps that led to it, what was measured of those after the last
    number, and the lines of metrics.jsonl up to that."""
    if resume:
        _check_same(task, run)
    done, seen, each, end = 0, [], task.steps_each, task.numbers[-1]
    wanted: list[int] = []
    if resume and (checkpoints.steps or partway.step):
        last = max(checkpoints.steps, default=0)
        done = max(last * each, partway.step)
        if done > end * each:
            raise TrainError(
                f"{task.kind}s (={end}) must be at least {-(-done // each)}, which {run.path} has "
                "done already"
            )
        wanted = [number for number in task.numbers if number * each <= done]
        if done > last * each:
            state, seen = partway.restore(task.shapes())
        else:
            state = checkpoints.restore(task.shapes(), last)
            wanted = sorted({*wanted, last} - {0})
    else:  # a new run, or one that was interrupted before its first checkpoint
        state = task.initial_state()
        checkpoints.save(0, state, best=0)
    records = run.keep(task.kind, wanted)
    if resume and run.config != task.describe():
        run.config = task.describe()
    return state, done, seen, records


def _check_same(task: Task[Any], run: RunDirectory) -> None:
    """Raises `TrainError` unless `run` is of the task's options and data; its length, and where its
    data lie, may be others."""
    before, now = run.config, task.describe()
    if before.get("data") != now["data"]:
        raise TrainError(f"{run.path}: was trained on other data; start a new run")
    for name, value in before.get("options", {}).items():
        if name not in (*WITHOUT_EFFECT, f"{task.kind}s") and now["options"].get(name) != value:
            raise TrainError(
                f"{run.path}: was trained with {name} (={value!r}), not with "
                f"{now['options'].get(name)!r}; go on with the former, or start a new run"
            )


def _best(task: Task[Any], records: Sequence[Record], among: Sequence[int]) -> Record:
    """The line of the highest score, of those whose checkpoints there are."""
    return max((r for r in records if r[task.kind] in among), key=task.score)


def _train_steps(
    task: Task[Any], train_step: TrainStep, state: Any, batches: Iterator[Any], steps: range,
    seen: Seen, progress: Progress, partway: Partway, stop: Stop,
) -> tuple[Any, Measured, float]:  # fmt: skip
    """The new state, the means of what was measured, of steps `seen` before too, and examples a
    second."""
    key, every = jax.random.key(task.config.seed), task.config.checkpoint_every
    before, seen = len(seen), list(seen)
    rate, clock = 0.0, time.perf_counter()

    def note(metrics: Any) -> None:
        nonlocal rate, clock
        count = len(seen) - before
        step = steps[count]
        seen.append(dict(task.read(metrics)))
        _check_finite(task, "train loss", seen[-1]["loss"], step)
        now = time.perf_counter()
        rate = max(count, 1) * task.examples_per_step / (now - clock)
        if not count:
            clock = now  # the first step of a run is mostly compilation
        progress.step(step, seen[-1], rate)

    # Reading a step's metrics waits for it, so they are read when the next step is under way.
    pending = None
    for step in steps:
        state, metrics = train_step(state, next(batches), key)
        if pending is not None:
            note(pending)
        pending = metrics
        if step == steps[-1]:
            break
        if (stopped := stop(step)) or every and step % every == 0:
            note(pending)
            pending = None
            partway.save(step, state, seen)
            if stopped:
                partway.settle()
                raise Preempted(task.where(step))
    note(pending)
    means = {name: statistics.fmean(measured[name] for measured in seen) for name in seen[0]}
    return state, means, rate


def _check_finite(task: Task[Any], name: str, loss: float, step: int) -> None:
    """Raises `TrainError` for a loss that is infinite or not a number."""
    if not math.isfinite(loss):
        raise TrainError(
            f"the {name} is {loss} {task.where(step)}; use a learning_rate below "
            f"{task.config.learning_rate}"
        )
