"""The run: everything that can be wrong is found first, then epochs of training and testing."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..memory import ResidualReport, residual_bytes
from .checkpoint import Checkpoints
from .data.augment import augment
from .errors import TrainError
from .images.job import Job
from .images.recipe import forms
from .images.steps import Batch, TrainState, TrainStep, make_eval_step, make_train_step, replicate
from .run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to.

    images_per_second: of training, the median epoch; an epoch's first step, which can include
        compilation, is not counted unless it is the only one.
    kept_bytes: for the backward pass of one batch, by each form of the model.
    """

    test_accuracy: float
    test_loss: float
    best_test_accuracy: float
    best_epoch: int
    images_per_second: float
    kept_bytes: dict[str, int]
    seconds: float


class Progress:
    """Is told how a run goes. This one does nothing with it."""

    def start(self, steps: int, done: int) -> None:
        """Before training: the number of steps, and how many an earlier run has done."""

    def step(self, epoch: int, loss: float, accuracy: float, images_per_second: float) -> None:
        """After each step, with the loss and the accuracy of its batch."""

    def epoch(self, record: dict[str, Any]) -> None:
        """After each epoch; `record` is its line of metrics.jsonl."""

    def stop(self) -> None:
        """After training, however it ends."""


def fit(
    job: Job, run: RunDirectory, progress: Progress | None = None, resume: bool = False
) -> Result:
    """Trains, tests after each epoch, and writes metrics.jsonl, checkpoints and curve.png.

    The images' order, augmentation and dropout are drawn from the seed and the epoch or the step,
    so a run that goes on after an interruption ends with the same bits as one that was not
    interrupted.

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
        return _fit(job, run, progress or Progress(), resume)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, TrainError):  # it is Ctrl-C that shall be said
            run.append({"kind": "interrupted"})
            run.draw_curve()
        raise
    except OSError as error:
        raise TrainError(
            f"{error.filename or run.path}: cannot be written to ({error.strerror or error}); make "
            "room, then resume"
        ) from error


def _fit(job: Job, run: RunDirectory, progress: Progress, resume: bool) -> Result:
    began = time.perf_counter()
    try:
        with Checkpoints(run.checkpoints) as checkpoints:
            records = _train(job, run, checkpoints, progress, resume)
    finally:
        progress.stop()
    best = max(records, key=lambda record: record["test_accuracy"])
    result = Result(
        test_accuracy=records[-1]["test_accuracy"],
        test_loss=records[-1]["test_loss"],
        best_test_accuracy=best["test_accuracy"],
        best_epoch=best["epoch"],
        images_per_second=statistics.median(r["images_per_second"] for r in records),
        kept_bytes={
            name: backward_bytes(job, **form).bytes for name, form in forms(job.config).items()
        },
        seconds=time.perf_counter() - began,
    )
    run.append({"kind": "final"} | dataclasses.asdict(result))
    run.draw_curve()
    return result


def _train(
    job: Job, run: RunDirectory, checkpoints: Checkpoints, progress: Progress, resume: bool
) -> list[dict[str, Any]]:
    """All epochs; returns their lines of metrics.jsonl."""
    if resume and run.config.get("data") != job.describe()["data"]:
        raise TrainError(f"{run.path}: was trained on other data; start a new run")
    state = initial_state(job)
    if resume and checkpoints.epochs:
        done = checkpoints.epochs[-1]
        state = checkpoints.restore(state, done)
    else:  # a new run, or one that was interrupted before its first checkpoint
        done = 0
        checkpoints.save(0, state, best_epoch=0)
    records = run.keep_epochs(done)

    train_step = make_train_step(job.config.parallel, job.task, job.devices)
    eval_step = make_eval_step(job.task, job.devices)
    state = replicate(state, job.devices)
    progress.start(job.config.epochs * job.steps_per_epoch, done * job.steps_per_epoch)
    for epoch in range(done + 1, job.config.epochs + 1):
        began = time.perf_counter()
        state, train_record = _train_epoch(job, train_step, state, epoch, progress)
        test_loss, test_accuracy = evaluate(job, eval_step, state)
        check_finite("test loss", test_loss, epoch, job)
        record = {"kind": "epoch", "epoch": epoch, "step": epoch * job.steps_per_epoch}
        record |= train_record | {"test_loss": test_loss, "test_accuracy": test_accuracy}
        record |= {"seconds": time.perf_counter() - began}
        records.append(record)
        run.append(record)
        best = max(records, key=lambda r: r["test_accuracy"])["epoch"]
        checkpoints.save(epoch, state, best_epoch=best)
        progress.epoch(record)
    return records


def initial_state(job: Job) -> TrainState:
    """Parameters drawn from the seed, and the optimizer's first state."""

    @jax.jit
    def init() -> TrainState:
        model = job.build(rngs=nnx.Rngs(job.config.seed))
        _, params, stats = nnx.split(model, nnx.Param, ...)
        return TrainState(jnp.int32(0), params, stats, job.task.optimizer.init(params))

    return init()


def _train_epoch(
    job: Job, train_step: TrainStep, state: TrainState, epoch: int, progress: Progress
) -> tuple[TrainState, dict[str, float]]:
    """One pass over the train set, less what does not fill a batch."""
    key = jax.random.key(job.config.seed)
    batch_size = job.config.batch_size
    losses: list[float] = []
    correct = 0
    rate, clock = 0.0, time.perf_counter()

    def note(metrics: Any) -> None:
        nonlocal correct, rate, clock
        losses.append(float(metrics.loss))
        correct += int(metrics.correct)
        check_finite("train loss", losses[-1], epoch, job)
        now = time.perf_counter()
        rate = max(len(losses) - 1, 1) * batch_size / (now - clock)
        if len(losses) == 1:
            clock = now  # the first step of a run is mostly compilation
        progress.step(epoch, losses[-1], int(metrics.correct) / batch_size, rate)

    # Reading a step's metrics waits for it, so they are read when the next step is under way.
    pending = None
    for batch in train_batches(job, epoch):
        state, metrics = train_step(state, batch, key)
        if pending is not None:
            note(pending)
        pending = metrics
    note(pending)
    return state, {
        "train_loss": statistics.fmean(losses),
        "train_accuracy": correct / (len(losses) * batch_size),
        "learning_rate": float(job.learning_rate((epoch - 1) * job.steps_per_epoch)),
        "images_per_second": rate,
    }


def check_finite(name: str, loss: float, epoch: int, job: Job) -> None:
    """Raises `TrainError` for a loss that is infinite or not a number."""
    if not math.isfinite(loss):
        raise TrainError(
            f"the {name} is {loss} in epoch {epoch}; use a learning_rate below "
            f"{job.config.learning_rate}"
        )


def train_batches(job: Job, epoch: int) -> Iterator[Batch]:
    """The shuffled and augmented batches of an epoch, the same for the same seed and epoch."""
    rng = np.random.default_rng([job.config.seed, epoch])
    images, labels = job.dataset.train_images, job.dataset.train_labels
    size = job.config.batch_size
    order = rng.permutation(len(images))[: job.steps_per_epoch * size]
    for chosen in order.reshape(-1, size):
        batch = images[chosen]
        if job.augmentation is not None:
            batch = augment(batch, job.augmentation, rng)
        yield Batch(batch, labels[chosen])


def evaluate(job: Job, eval_step: Any, state: TrainState) -> tuple[float, float]:
    """Loss and accuracy on the test set; the last batch is filled up with images of weight 0."""
    images, labels = job.dataset.test_images, job.dataset.test_labels
    size = job.config.batch_size
    loss, correct = 0.0, 0.0
    for start in range(0, len(images), size):
        count = min(size, len(images) - start)
        fill = size - count
        batch = Batch(
            np.pad(images[start : start + count], ((0, fill), (0, 0), (0, 0), (0, 0))),
            np.pad(labels[start : start + count], (0, fill)),
        )
        sums = eval_step(state, batch, np.arange(size, dtype=np.float32) < count)
        loss += float(sums.loss)
        correct += float(sums.correct)
    return loss / len(images), correct / len(images)


def backward_bytes(job: Job, **form: Any) -> ResidualReport:
    """What one batch keeps for the backward pass, in one of the `forms` of the model."""
    model: Any = nnx.eval_shape(lambda: job.build(**form, axis_name=None, rngs=nnx.Rngs(0)))
    model.train()
    graphdef, params, stats = nnx.split(model, nnx.Param, ...)
    task = dataclasses.replace(job.task, graphdef=graphdef)
    stats = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), stats)
    size = job.config.batch_size
    batch = Batch(np.zeros((size, *job.dataset.image_shape), np.uint8), np.zeros((size,), np.int32))
    key = jax.random.key(0)
    return residual_bytes(lambda p: task.loss(p, stats, batch, key), params, has_aux=True)
