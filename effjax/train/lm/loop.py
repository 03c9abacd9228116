"""The run: steps of training, and from time to time the loss on the test set and a checkpoint."""

import contextlib
import dataclasses
import math
import statistics
import time
from typing import Any

import jax

from ..checkpoint import Checkpoints
from ..data.text import test_batches, train_batches
from ..errors import TrainError
from ..images.steps import data_mesh
from ..run_directory import RunDirectory
from .job import LMJob, initial_state, job_step
from .offloaded import shardings_of
from .steps import compile_lm_step, make_lm_eval_step


@dataclasses.dataclass(frozen=True)
class LMResult:
    """What a run came to; losses are means over bytes, in nats.

    train_loss: of the last steps, as many as between two reports.
    tokens_per_second: of training, the median of the reports; the first step after a start, which
        can include compilation, is not counted unless it is the only one.
    unigram_bits: bits per test byte without any context, to compare with.
    """

    train_loss: float
    test_loss: float
    test_bits_per_byte: float
    best_test_loss: float
    best_step: int
    tokens_per_second: float
    unigram_bits: float
    num_params: int
    seconds: float


class LMProgress:
    """Is told how a run goes. This one does nothing with it."""

    def start(self, steps: int, done: int) -> None:
        """Before training: the number of steps, and how many an earlier run has done."""

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """After each step, with the loss of its batch."""

    def report(self, record: dict[str, Any]) -> None:
        """After each test; `record` is its line of metrics.jsonl."""

    def stop(self) -> None:
        """After training, however it ends."""


def fit(
    job: LMJob, run: RunDirectory, progress: LMProgress | None = None, resume: bool = False
) -> LMResult:
    """Trains, tests every `report_every` steps, and writes metrics.jsonl, checkpoints, curve.png.

    The windows of text and dropout are drawn from the seed and the step, so a run that goes on
    after an interruption ends with the same bits as one that was not interrupted.

    Args:
      job: from `prepare`.
      run: where to write.
      progress: is told how it goes.
      resume: begin after the last checkpoint of `run`; if it has none, from the beginning.

    Raises:
      TrainError: the loss is not finite, `run` cannot be gone on with, or a full disk.
      KeyboardInterrupt: after the files have been brought up to date.
    """
    try:
        return _fit(job, run, progress or LMProgress(), resume)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, TrainError):  # it is Ctrl-C that shall be said
            run.append({"kind": "interrupted"})
            run.draw_losses()
        raise
    except OSError as error:
        raise TrainError(
            f"{error.filename or run.path}: cannot be written to ({error.strerror or error}); make "
            "room, then resume"
        ) from error


def _fit(job: LMJob, run: RunDirectory, progress: LMProgress, resume: bool) -> LMResult:
    began = time.perf_counter()
    try:
        with Checkpoints(run.checkpoints) as checkpoints:
            records = _train(job, run, checkpoints, progress, resume)
    finally:
        progress.stop()
    last, best = records[-1], min(records, key=lambda record: record["test_loss"])
    result = LMResult(
        train_loss=last["train_loss"],
        test_loss=last["test_loss"],
        test_bits_per_byte=last["test_loss"] / math.log(2),
        best_test_loss=best["test_loss"],
        best_step=best["step"],
        tokens_per_second=statistics.median(r["tokens_per_second"] for r in records),
        unigram_bits=job.text.unigram_bits,
        num_params=job.num_params,
        seconds=time.perf_counter() - began,
    )
    run.append({"kind": "final"} | dataclasses.asdict(result))
    run.draw_losses()
    return result


def _train(
    job: LMJob, run: RunDirectory, checkpoints: Checkpoints, progress: LMProgress, resume: bool
) -> list[dict[str, Any]]:
    """All steps; returns the lines of metrics.jsonl."""
    if resume and run.config.get("data") != job.describe()["data"]:
        raise TrainError(f"{run.path}: was trained on other data; start a new run")
    state = initial_state(job)
    if resume and checkpoints.epochs:
        done = checkpoints.epochs[-1]
        state = checkpoints.restore(state, done)
    else:  # a new run, or one that was interrupted before its first checkpoint
        done = 0
        checkpoints.save(0, state, best_epoch=0)
    reports = report_steps(job)
    records = run.keep("step", [step for step in reports if step <= done])

    mesh = data_mesh(job.devices)
    train_step = compile_lm_step(job_step(job), mesh)
    eval_step = make_lm_eval_step(job.graphdef, mesh, job.apply_layers_in_test)
    state = jax.device_put(state, shardings_of(state, mesh))
    config = job.config
    batches = train_batches(job.text.train, config.context, config.batch_size, config.seed, done)
    progress.start(config.steps, done)
    for report in reports[len(records) :]:
        began = time.perf_counter()
        state, losses, rate = _train_until(job, train_step, state, batches, done, report, progress)
        test_loss = evaluate(job, eval_step, state)
        check_finite("test loss", test_loss, report, job)
        record = {
            "kind": "step", "step": report, "train_loss": statistics.fmean(losses),
            "test_loss": test_loss, "test_bits_per_byte": test_loss / math.log(2),
            "learning_rate": float(job.learning_rate(report - 1)), "tokens_per_second": rate,
            "seconds": time.perf_counter() - began,
        }  # fmt: skip
        records.append(record)
        run.append(record)
        best = min(records, key=lambda r: r["test_loss"])["step"]
        checkpoints.save(report, state, best_epoch=best)
        progress.report(record)
        done = report
    return records


def report_steps(job: LMJob) -> list[int]:
    """After which steps the model is tested: every so many, and the last one."""
    steps, every = job.config.steps, job.config.report_every
    return [*range(every, steps, every), steps]


def _train_until(
    job: LMJob, train_step: Any, state: Any, batches: Any, done: int, last: int,
    progress: LMProgress,
) -> tuple[Any, list[float], float]:  # fmt: skip
    """Steps `done + 1` to `last`; the new state, the losses, and tokens per second."""
    key = jax.random.key(job.config.seed)
    tokens = job.config.batch_size * job.config.context
    losses: list[float] = []
    rate, clock = 0.0, time.perf_counter()

    def note(loss: Any) -> None:
        nonlocal rate, clock
        losses.append(float(loss))
        check_finite("train loss", losses[-1], done + len(losses), job)
        now = time.perf_counter()
        rate = max(len(losses) - 1, 1) * tokens / (now - clock)
        if len(losses) == 1:
            clock = now  # the first step of a run is mostly compilation
        progress.step(done + len(losses), losses[-1], rate)

    # Reading a step's loss waits for it, so it is read when the next step is under way.
    pending = None
    for _ in range(done, last):
        state, loss = train_step(state, next(batches), key)
        if pending is not None:
            note(pending)
        pending = loss
    note(pending)
    return state, losses, rate


def check_finite(name: str, loss: float, step: int, job: LMJob) -> None:
    """Raises `TrainError` for a loss that is infinite or not a number."""
    if not math.isfinite(loss):
        raise TrainError(
            f"the {name} is {loss} at step {step}; use a learning_rate below "
            f"{job.config.learning_rate}"
        )


def evaluate(job: LMJob, eval_step: Any, state: Any) -> float:
    """Mean loss over the windows of the test set."""
    total, count = 0.0, 0.0
    config = job.config
    for tokens, weights in test_batches(job.text.test, config.context, config.batch_size):
        total += float(eval_step(state.params, tokens, weights))
        count += float(weights.sum())
    return total / count
