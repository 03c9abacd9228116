"""The run of any task: steps of training, and from time to time a test and a checkpoint."""

import contextlib
import errno
import shutil
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .begin import begin, last_whole, places, remedy
from .checkpoint import Checkpoints, Partway, Seen
from .errors import Damaged, Preempted, TrainError
from .processes import from_first
from .run_directory import ROLLED_BACK, RunDirectory
from .steps import NotFinite, Run, check_finite, train_steps
from .task import Measured, Progress, Record, Result, Stop, Task

ROLLBACKS = 5  # of a run


def fit(
    task: Task[Result], run: RunDirectory, progress: Progress | None = None, resume: bool = False,
    stop: Stop = lambda step: False, fall_back: bool = False,
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

        fall_back: where the last checkpoint of `run` is damaged, begin after the one before.

    Raises:
        Preempted: `stop` said so.
        TrainError: the loss is not finite, `run` cannot be gone on with, a full disk, or another
            process that trains in `run`.
        KeyboardInterrupt: after the files have been brought up to date.
    """
    try:
        with contextlib.ExitStack() as stack:
            from_first(lambda: stack.enter_context(run.locked()))
            return _fit(task, run, progress or Progress(), How(resume, fall_back, stop))
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


class How(NamedTuple):
    """Arguments of `fit`."""

    resume: bool
    fall_back: bool
    stop: Stop


class Saved(NamedTuple):
    """The checkpoints of a run."""

    checkpoints: Checkpoints
    partway: Partway


def _fit(task: Task[Result], run: RunDirectory, progress: Progress, how: How) -> Result:
    began = time.perf_counter()
    try:
        with (
            Checkpoints(run.checkpoints, keep=task.config.keep) as checkpoints,
            Partway(run.partway, checkpoints) as partway,
        ):
            trained = _train(task, run, Saved(checkpoints, partway), progress, how)
    finally:
        progress.stop()
    result = task.result(*trained, began)
    run.append({"kind": "final"} | vars(result))
    if run.writes:
        shutil.rmtree(run.partway, ignore_errors=True)
    _draw(task, run)
    return result


def _draw(task: Task[Any], run: RunDirectory) -> None:
    if not run.writes:
        return
    records = [record for record in run.metrics if record.get("kind") == task.kind]
    run.draw(lambda axes: task.draw(axes, records))


def _train(
    task: Task[Any], run: RunDirectory, saved: Saved, progress: Progress, how: How
) -> tuple[list[Record], Record, Measured]:
    """All steps, and the test; returns their lines of metrics.jsonl, the best one of these, and
    what was measured of its parameters in the test."""
    begun = begin(task, run, *saved, how.resume, how.fall_back, progress.say)
    state, done, seen, records = begun
    del begun
    test, each, end = task.make_test(), task.steps_each, task.numbers[-1]
    left_out = set(
        from_first(lambda: [r["step"] for r in run.metrics if r.get("kind") == ROLLED_BACK])
    )
    steps = Run(task, task.make_step(), progress, saved.partway, how.stop, left_out)
    batches = task.batches(done)
    progress.start(end * each, done)
    while done < end * each:
        number = next(number for number in task.numbers if number * each > done)
        began, bad = time.perf_counter(), None
        try:
            trained = train_steps(steps, state, batches, range(done + 1, number * each + 1), seen)
        except NotFinite as found:
            bad = found.step, found.loss
        if bad is not None:
            state = None  # its memory is needed
            state, done, seen = _roll_back(steps, run, saved, *bad)
            batches = task.batches(done)
            continue
        state, done, seen = trained.state, number * each, []
        validation = test(state, "validation")
        check_finite(task, "validation loss", validation.get("loss", 0.0), done)
        record = task.record(number, trained.means, validation, trained.rate)
        record |= {"skipped": trained.skipped} if trained.skipped else {}
        record |= {"seconds": time.perf_counter() - began}
        records.append(record)
        run.append(record)
        best = _best(task, records, [*saved.checkpoints.steps, number])
        saved.partway.settle()  # the two are not written at once: see Partway
        saved.checkpoints.save(number, state, best=best[task.kind])
        progress.report(record)
        if number != end and how.stop(done):
            saved.checkpoints.settle()
            raise Preempted(task.where(done))
        del trained
    saved.checkpoints.settle()
    best = _best(task, records, saved.checkpoints.steps)
    if best[task.kind] != end:
        state = None  # its memory is needed
        state, best = _restore_best(task, run, saved, progress, how.fall_back, records)
    tested = test(state, "test")
    check_finite(task, "test loss", tested["loss"], best[task.kind] * each)
    return records, best, tested


def _roll_back(
    steps: Run, run: RunDirectory, saved: Saved, step: int, loss: float
) -> tuple[Any, int, Seen]:
    """Back to the last checkpoint, from where the batch of `step` is left out: its state, the steps
    that led to it, and what was measured of those after the last number."""
    task = steps.task
    if len(steps.left_out) == ROLLBACKS:
        raise TrainError(
            f"the train loss is {loss} {task.where(step)}, and {ROLLBACKS} batches have been left "
            f"out already; use a learning_rate below {task.config.learning_rate}"
        )
    for one in saved:
        one.settle()
    place, state, seen = last_whole(task, run, places(task, *saved), False, steps.progress.say)
    steps.left_out.add(step)
    to = {"checkpoint": place.name, "checkpoint_step": place.done}
    run.append({"kind": ROLLED_BACK, "step": step} | to)
    steps.progress.say(
        f"step {step}: its loss or its gradients are not finite; goes back to {place.name}, after "
        f"step {place.done}, and leaves its batch out"
    )
    return state, place.done, seen


def _restore_best(
    task: Task[Any], run: RunDirectory, saved: Saved, progress: Progress, fall_back: bool,
    records: Sequence[Record],
) -> tuple[Any, Record]:  # fmt: skip
    """The best parameters, and their line."""
    while True:
        best = _best(task, records, saved.checkpoints.steps)
        number = best[task.kind]
        try:
            return saved.checkpoints.restore(task.shapes(), number), best
        except Damaged as error:
            others = [p for p in places(task, *saved) if p.name != f"checkpoints/{number}"]
            if not (fall_back and others):
                raise TrainError(f"{error}; {remedy(run, others)}") from error
            progress.say(f"{error}; it is left out")
        saved.checkpoints.delete(number)


def _best(task: Task[Any], records: Sequence[Record], among: Sequence[int]) -> Record:
    """The line of the highest score, of those whose checkpoints there are."""
    return max((r for r in records if r[task.kind] in among), key=task.score)
