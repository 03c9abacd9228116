"""The training loop: train steps, and from time to time a validation and a checkpoint."""

import concurrent.futures
import contextlib
import errno
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .checkpoint import Checkpoints
from .errors import PreemptionError, TrainError
from .processes import is_first, run_on_first
from .run_directory import RunDirectory
from .task import Metrics, Progress, Record, Result, Stop, Task

WEIGHTS = "weights_sha256"  # in the `base` of config.json


def fit(
    task: Task[Result],
    run: RunDirectory,
    progress: Progress | None = None,
    resume: bool = False,
    stop: Stop = lambda step: False,
) -> Result:
    """Train a task, choose the best parameters by the validation set, test and export them.

    Writes metrics.jsonl, checkpoints, curve.png and the result of `task.finish`, and on `resume`
    the options that have changed into config.json. All randomness comes from the seed and the epoch
    or step, so a run that was interrupted and resumed ends with the same bits as one that was not.

    Of several processes, each one calls this. The first one writes all files except the arrays.

    Args:
        task: From `prepare` of `images.task` or `text.task`.
        run: Where to write.
        progress: Callbacks.
        resume: Continue after the newest intact checkpoint of `run`, or start if there is no
            checkpoint. The task must have the options and data of the run. Its length may differ:
            all further steps then follow the schedule of that length.
        stop: Called with the number of each step, after the step. If it returns True before the
            last step, the run is saved and ends.

    Returns:
        The result of the task.

    Raises:
        PreemptionError: `stop` returned True. A record of kind `interrupted` is appended.
        TrainError: The loss or a gradient is not finite, `run` cannot be resumed or written to, was
            deleted, or another process trains in it.
        KeyboardInterrupt: It was raised in a step or a callback. No checkpoint is added; a record
            of kind `interrupted` is appended.
    """
    try:
        with contextlib.ExitStack() as stack:
            run_on_first(lambda: stack.enter_context(run.locked()))
            try:
                return _fit(task, run, progress or Progress(), resume, stop)
            except (KeyboardInterrupt, PreemptionError):
                # The interruption is what the user reads.
                with contextlib.suppress(OSError, TrainError):
                    run.append({"kind": "interrupted"})
                    _draw(task, run)
                raise
    except (OSError, TrainError, PreemptionError, KeyboardInterrupt) as error:
        if run.is_gone:  # even if it has just been saved, into a directory that Orbax made again
            raise TrainError(f"{run.path} was deleted during training. Start a new run.") from error
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TrainError(
            f"{error.filename or run.path} cannot be written to ({error.strerror or error}). "
            f"{'Make room' if full else 'Correct that'}, then resume."
        ) from error


def _fit(
    task: Task[Result], run: RunDirectory, progress: Progress, resume: bool, stop: Stop
) -> Result:
    began, config = time.perf_counter(), task.describe()
    digest_base = _in_background(task.digest_base if is_first() else lambda: None)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.stop)
        checkpoints = stack.enter_context(Checkpoints(run.checkpoints, keep=task.config.keep))
        if resume:
            _check_same(task, run, config)
        restores = bool(resume and checkpoints.steps)
        if restores:
            state, done = _restore(task, run, checkpoints, progress)
            partial, records_digest = checkpoints.read_metrics(done)
        else:  # a new run, or one that was interrupted before its first checkpoint
            state, done, partial, records_digest = task.initial_state(), 0, [], None
        config = _add_digests(run, config, run_on_first(digest_base))
        records = run_on_first(lambda: run.truncate_metrics(task.unit, done, records_digest))
        if run.read_config() != config:
            run.write_config(config)
        lost = _find_lost(task, checkpoints, records, progress)
        task.start(run, None if restores else state, progress.log)
        if not restores:
            # A run that is killed before its first evaluation resumes without the files of weights.
            checkpoints.save(0, state)

        key, every = jax.random.key(task.config.seed), task.config.checkpoint_every
        eval_steps, end = set(task.eval_steps), task.eval_steps[-1]
        train_step, evaluate, batches = task.make_step(), task.make_eval(), task.batches(done)
        sample = task.make_sample()
        interval = _Interval(task, progress, done, partial)
        progress.start(end, done)

        for step in range(done + 1, end + 1):
            if _has_converged(task, [record for record in records if record["step"] not in lost]):
                break
            done = step
            state, metrics = train_step(state, next(batches), key)
            interval.add(metrics)

            if step in eval_steps:
                train = interval.means()
                validation = evaluate(state, "validation")
                _check_finite(task, "validation loss", validation.get("loss", 0.0), step)
                record = task.record(step, train, validation, interval.rate)
                if interval.skipped:
                    record["skipped"] = interval.skipped
                record |= sample(state)
                record["seconds"] = time.perf_counter() - interval.began
                records.append(record)
                run.append(record)
                checkpoints.save(step, state, score=task.score(record), records=records)
                progress.report(record)
                interval = _Interval(task, progress, step)

            stopped = stop(step) and step < end
            if step not in eval_steps and (stopped or (every and step % every == 0)):
                interval.flush()
                checkpoints.save(step, state, metrics=interval.metrics, records=records)
            if stopped:
                checkpoints.wait()
                within = f", {task.where(step)}" if task.unit == "epoch" else ""
                raise PreemptionError(f"at step {step}{within}")

        checkpoints.wait()
        best = checkpoints.evaluated_steps[0]
        if best != done:
            state = None  # free its memory
            best, state = checkpoints.restore_first_intact(
                task.shapes(), checkpoints.evaluated_steps, progress.log
            )
        tested = evaluate(state, "test")
        _check_finite(task, "test loss", tested.get("loss", 0.0), best)
        task.finish(state, run)

    best_record = next(record for record in records if record["step"] == best)
    result = task.result(records, best_record, tested, began)
    run.append({"kind": "final"} | vars(result))
    _draw(task, run)
    return result


def _has_converged(task: Task[Any], records: Sequence[Record]) -> bool:
    """Return True if the last `patience` validations were not better than one before."""
    patience = task.config.patience
    if patience is None or len(records) <= patience:
        return False
    scores = [task.score(record) for record in records]
    return max(scores) > max(scores[-patience:])


def _find_lost(
    task: Task[Any], checkpoints: Checkpoints, records: Sequence[Record], progress: Progress
) -> set[int]:
    """Return the evaluated steps that were better than all that have a checkpoint."""
    left = {*checkpoints.evaluated_steps}
    best = max((task.score(record) for record in records if record["step"] in left), default=())
    lost = [record for record in records if task.score(record) > best]
    if lost:
        step = max(lost, key=task.score)["step"]
        progress.log(
            f"{checkpoints.directory / str(step)}, the best checkpoint, is missing or damaged. The "
            "best is now chosen among those that are left and those that follow."
        )
    return {record["step"] for record in lost}


class _Interval:
    """The training steps since the last evaluation.

    The metrics of a step are read while the next step runs, so that the device does not wait for
    the host.

    Args:
        task: The task to train.
        progress: Receives the metrics of each step.
        done: The number of steps taken.
        metrics: The metrics of the last of these steps, if a run resumes within an interval.
    """

    def __init__(
        self, task: Task[Any], progress: Progress, done: int, metrics: Sequence[Metrics] = ()
    ):
        self.task, self.progress = task, progress
        self.metrics: list[Metrics] = list(metrics)
        self.skipped = [done - len(metrics) + i for i, one in enumerate(metrics, 1) if not one]
        self.step = done
        self.rate = 0.0  # images or tokens per second
        self.began = self._clock = time.perf_counter()
        self._timed = 0  # steps since `_clock`
        self._unread: Any = None

    def add(self, metrics: Any) -> None:
        """Add the metrics of a step that was started, and read those of the step before."""
        self.flush()
        self._unread = metrics

    def flush(self) -> None:
        """Read the metrics of the last step."""
        if self._unread is None:
            return
        metrics, self._unread = self.task.read(self._unread), None
        self.step += 1
        if self.task.config.on_nan == "stop":
            remedy = None
            if self.step == 1:  # no update was made before it
                remedy = "This is the first step: check the parameters at the start, and the data."
            # The loss is NaN if a gradient is not finite.
            _check_finite(self.task, "loss or a gradient", metrics["loss"], self.step, remedy)
        if not math.isfinite(metrics["loss"]):
            self.progress.log(f"skipped step {self.step}: its loss or its gradients are not finite")
            metrics = {}
            self.skipped.append(self.step)
        self.metrics.append(metrics)
        now = time.perf_counter()
        self.rate = max(self._timed, 1) * self.task.items_per_step / (now - self._clock)
        if self._timed == 0:
            self._clock = now  # the first step includes compilation
        self._timed += 1
        if metrics:
            self.progress.step(self.step, metrics, self.rate)

    def means(self) -> Metrics:
        """Return the means of the metrics over the steps that were not skipped."""
        self.flush()
        finite = [metrics for metrics in self.metrics if metrics]
        if not finite:
            raise TrainError(
                f"the last {len(self.metrics)} steps have no finite loss "
                f"{self.task.where(self.step)}. Use a `learning_rate` below "
                f"{self.task.config.learning_rate}."
            )
        return {name: statistics.fmean(one[name] for one in finite) for name in finite[0]}


def _restore(
    task: Task[Any], run: RunDirectory, checkpoints: Checkpoints, progress: Progress
) -> tuple[Any, int]:
    """Restore the newest intact checkpoint; return the state and the number of steps taken."""
    done, state = checkpoints.restore_first_intact(
        task.shapes(), checkpoints.steps[::-1], progress.log
    )
    _check_length(task, run, done, done in checkpoints.evaluated_steps)
    return state, done


def _in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function in a thread, and return a function that waits for its result."""
    # A daemon: an error of the run does not wait for gigabytes to be read.
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result


def _add_digests(run: RunDirectory, config: dict[str, Any], digest: str | None) -> dict[str, Any]:
    """Return the content of config.json with the digests of files that the run starts with.

    Args:
        run: The directory, whose config.json may have them.
        config: The content without them.
        digest: That of the weights.

    Raises:
        TrainError: The run has started with other weights.
    """
    before, arrays = run.read_config(), run.ARRAYS_DIGEST
    config = config | ({arrays: before[arrays]} if arrays in before else {})
    if digest is None:
        return config
    if before.get("base", {}).get(WEIGHTS, digest) != digest:
        raise _other_weights(run)
    return config | {"base": config["base"] | {WEIGHTS: digest}}


def _other_weights(run: RunDirectory) -> TrainError:
    return TrainError(
        f"{run.path} was started with the weights of another checkpoint. Give that one, or start "
        "a new run."
    )


def _check_same(task: Task[Any], run: RunDirectory, now: dict[str, Any]) -> None:
    """Raise TrainError unless the run has the task's options and data, apart from its length."""
    # The digest of its first weights, a second for each gigabyte, is compared in `_add_digests`.
    before = run.read_config()
    bases = [{**config.get("base", {}), WEIGHTS: None} for config in (before, now)]
    if bases[0] != bases[1]:
        raise _other_weights(run)
    if before.get("data") != now["data"]:
        raise TrainError(
            f"{run.path} was trained on other data. Give those with --data, or start a new run."
        )
    task.config.check_resumable(run.path, before.get("options", {}))


def _check_length(task: Task[Any], run: RunDirectory, done: int, evaluated: bool) -> None:
    end, length = task.eval_steps[-1], getattr(task.config, f"{task.unit}s")
    if done < end or (done == end and evaluated):
        return
    least = math.ceil((done if evaluated else done + 1) / task.steps_per_unit)
    raise TrainError(
        f"`{task.unit}s` (={length}) must be at least {least}: {run.path} has taken {done} steps."
    )


def _check_finite(
    task: Task[Any], name: str, loss: float, step: int, remedy: str | None = None
) -> None:
    if not math.isfinite(loss):
        remedy = remedy or f"Use a `learning_rate` below {task.config.learning_rate}."
        raise TrainError(f"the {name} is not finite {task.where(step)}. {remedy}")


def _draw(task: Task[Any], run: RunDirectory) -> None:
    if run.writes:
        records = [record for record in run.read_metrics() if record.get("kind") == task.unit]
        run.draw(lambda axes: task.draw(axes, records))
