"""Classification of images, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..._version import __version__
from ..errors import TrainError, counted
from ..mesh import (
    FSDP,
    Devices,
    check_batch_size,
    global_batch,
    local_rows,
    make_mesh,
    with_shardings,
)
from ..optimizers import make_schedule, make_sgd
from ..processes import is_multiprocess, sum_over_processes
from ..task import Metrics, Part, Record, Task, TrainStep
from .augment import Augmentation, augment, default_padding
from .config import ImageConfig
from .dataset import Dataset, ImageFiles, channel_counts, channel_statistics, hold_out
from .folder import IN_MEMORY
from .load import load_dataset
from .plans import backward_bytes
from .source_weights import SourceWeights, overlay, read_source
from .steps import (
    Batch,
    Learner,
    StepMetrics,
    TrainState,
    initial_state,
    make_eval_step,
    make_learner,
    make_train_step,
    model_builder,
    state_shardings,
    trace_model,
)


@dataclasses.dataclass(frozen=True)
class ImageResult:
    """Result of a run.

    Attributes:
        test_accuracy: Of the parameters of `best_epoch`.
        test_loss: Of the same parameters.
        best_epoch: The epoch with the best validation accuracy, or the last one without validation.
        validation_accuracy: Of `best_epoch`; None without validation.
        validation_loss: Of `best_epoch`; None without validation.
        images_per_second: Median over the epochs. The first step of an epoch, which may include
            compilation, counts only if there is no other.
        kept_bytes: Bytes that one batch keeps for the backward pass, by form of the model.
        seconds: The duration of the run.
    """

    test_accuracy: float
    test_loss: float
    best_epoch: int
    validation_accuracy: float | None
    validation_loss: float | None
    images_per_second: float
    kept_bytes: dict[str, int]
    seconds: float


# Mean and standard deviation of ImageNet's RGB pixels, scaled to [0, 1]. torchvision's weights were
# trained on images that these had normalized.
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)


def prepare(
    config: ImageConfig,
    devices: Devices | None = None,
    dataset: Dataset | None = None,
    resume: bool = False,
) -> "ImageTask":
    """Read the data and check the options. Nothing is written.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        dataset: The default is that of `config.data`.
        resume: The task is that of a run that continues, which does not need `config.init_from`.

    Raises:
        DataError: The data cannot be read, or are invalid.
        TrainError: The options do not fit each other, the data or the devices.
    """
    config = config.resolve()
    mesh = make_mesh(config.mesh, devices)
    if FSDP in mesh.shape and config.parallel != "jit":
        raise TrainError(
            f"`mesh` (={config.mesh}) with {FSDP} needs `parallel` (={config.parallel}) to be jit"
        )
    check_batch_size(config.batch_size, mesh)
    if dataset is None:
        # Each of several processes reads its own images.
        dataset = load_dataset(
            config.data, config.image_size, 0 if is_multiprocess() else IN_MEMORY
        )
    dataset = hold_out(dataset, config.validation)
    for images in (dataset.validation_images, dataset.test_images):
        if isinstance(images, ImageFiles):
            # Read all files, to report an unreadable one before training. The counts do not matter.
            sum_over_processes(functools.partial(channel_counts, images))
    images = len(dataset.train_images)
    if config.batch_size > images:
        raise TrainError(
            f"`batch_size` (={config.batch_size}) is larger than the train set "
            f"(={counted(images, 'image')}). Use a smaller one."
        )
    # Images that do not fill a batch wait for another epoch's order: one shape, one compilation.
    steps = config.epochs * (images // config.batch_size)
    schedule = make_schedule(config.schedule, config.learning_rate, steps)
    optimizer = make_sgd(schedule, config.momentum, config.weight_decay)
    source = None if resume else read_source(config)
    if source is not None:
        config = _complete(config, source)
    build = model_builder(config, dataset.image_shape, len(dataset.class_names))
    model = trace_model(build, dataset.image_shape)
    learner = make_learner(config, model, optimizer, *_pixel_statistics(config, dataset))
    weights = None if source is None else source.load(build)
    flip = dataset.flip if config.flip is None else config.flip
    wanted = config.augment is None or config.augment
    augmentation = Augmentation(default_padding(dataset.image_shape), flip) if wanted else None
    return ImageTask(config, mesh, schedule, dataset, build, learner, augmentation, source, weights)


def _complete(config: ImageConfig, source: SourceWeights) -> ImageConfig:
    """Return the options of a run that starts with weights, as its config.json records them."""
    assert config.init_from is not None
    return dataclasses.replace(
        config,
        init_from=os.path.realpath(config.init_from),  # the run may be resumed in another folder
        small_inputs=source.small_inputs if config.small_inputs is None else config.small_inputs,
        normalize=config.normalize or "imagenet",
    )


def _pixel_statistics(config: ImageConfig, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation that normalize the pixels, [C]."""
    if config.normalize != "imagenet" or isinstance(dataset.train_images, ImageFiles):
        counts = sum_over_processes(functools.partial(channel_counts, dataset.train_images))
        if config.normalize != "imagenet":
            return channel_statistics(counts)
    channels = dataset.image_shape[-1]
    if channels != len(IMAGENET_MEAN):
        raise TrainError(
            f"`normalize` (=imagenet) needs RGB images, but those of {dataset.name} have "
            f"{counted(channels, 'channel')}. Use RGB images, or --normalize data."
        )
    return IMAGENET_MEAN, IMAGENET_STD


@dataclasses.dataclass(frozen=True, eq=False)
class ImageTask(Task[ImageResult]):
    """A run on images, from `prepare`."""

    items = "images"

    config: ImageConfig
    dataset: Dataset
    build: Callable[..., nnx.Module]
    learner: Learner
    augmentation: Augmentation | None
    source: SourceWeights | None = None  # whose weights a new run starts with
    weights: Mapping[str, np.ndarray] | None = None  # of `source`, by path

    @property
    def steps_per_unit(self) -> int:
        return len(self.dataset.train_images) // self.config.batch_size

    @property
    def eval_steps(self) -> Sequence[int]:
        each = self.steps_per_unit
        return range(each, self.config.epochs * each + 1, each)

    @property
    def items_per_step(self) -> int:
        return self.config.batch_size

    def describe(self) -> dict[str, Any]:
        data = self.dataset
        held_out = {"validation_images": len(data.validation_images)}
        return self.config.describe(
            __version__,
            {
                "train_images": len(data.train_images),
                **(held_out if len(data.validation_images) else {}),
                "test_images": len(data.test_images),
                "image_shape": list(data.image_shape),
                "class_names": list(data.class_names),
                "mean": self.learner.mean.tolist(),
                "std": self.learner.std.tolist(),
            },
        )

    def initial_state(self) -> TrainState:
        weights = self.weights
        if weights is None and (source := read_source(self.config)):
            weights = source.load(self.build)  # of a run that stopped before its first checkpoint
        state = jax.jit(self._init, out_shardings=self._shardings)()
        if weights is None:
            return state
        # Weights replace the random ones after these were drawn in their places, so that a
        # classifier of other classes stays as drawn.
        places = self._shardings
        return state._replace(
            params=overlay(state.params, weights, places.params),
            stats=overlay(state.stats, weights, places.stats),
        )

    def shapes(self) -> TrainState:
        return with_shardings(jax.eval_shape(self._init), self._shardings)

    def _init(self) -> TrainState:
        return initial_state(self.learner, self.build)

    @functools.cached_property
    def _shardings(self) -> TrainState:
        return state_shardings(jax.eval_shape(self._init), self.mesh)

    def num_params(self) -> tuple[int, int]:
        """Return the number of trained parameters, and that of all."""
        shapes = jax.eval_shape(self._init)
        trained = sum(p.size for p in jax.tree.leaves(shapes.params))
        frozen = nnx.filter_state(shapes.stats, nnx.Param)
        return trained, trained + sum(p.size for p in jax.tree.leaves(frozen))

    def make_step(self) -> TrainStep:
        return make_train_step(self.learner, self.mesh, self._shardings)

    def make_eval(self) -> Callable[[TrainState, Part], Metrics]:
        eval_step = make_eval_step(self.learner, self.mesh, self._shardings)
        return lambda state, part: self._evaluate(eval_step, state, part)

    def batches(self, done: int) -> Iterator[Batch]:
        epochs, skip = divmod(done, self.steps_per_unit)
        for epoch in itertools.count(epochs + 1):
            for batch in self.local_batches(epoch, skip):
                if self.config.parallel == "pmap":  # which distributes the batch itself
                    yield batch
                else:
                    yield global_batch(batch, self.config.batch_size, self.mesh)
            skip = 0

    def local_batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this process's rows of the batches of an epoch, without the first `skip` batches.

        The order and the augmentation depend on the seed and the epoch only. Images that do not
        fill a batch are left out.
        """
        seed, size = self.config.seed, self.config.batch_size
        images, labels = self.dataset.train_images, self.dataset.train_labels
        rows = local_rows(size, self.mesh)
        # Drawn from numbers, not from the state of a generator: a resumed run begins in the middle.
        order = np.random.default_rng([seed, epoch]).permutation(len(images))
        for number in range(skip, self.steps_per_unit):
            chosen = order[number * size : (number + 1) * size][rows]
            batch = images[chosen]
            if self.augmentation is not None:
                rng = np.random.default_rng([seed, epoch, number])
                batch = augment(batch, self.augmentation, rng, size, rows)
            yield Batch(batch, labels[chosen])

    def read(self, metrics: StepMetrics) -> Metrics:
        accuracy = int(metrics.correct) / self.config.batch_size
        return {"loss": float(metrics.loss), "accuracy": accuracy}

    def score(self, record: Record) -> tuple[float, ...]:
        return record.get("validation_accuracy", 0), *super().score(record)

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        super().draw(axes, records)
        if len(self.dataset.validation_images):
            right, x = axes.twinx(), [record["epoch"] for record in records]
            accuracy = [100 * r["validation_accuracy"] for r in records]
            right.plot(x, accuracy, "C2.--", label="validation accuracy", clip_on=False)
            right.set(ylabel="validation accuracy (%)", ylim=(0, 100))

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> ImageResult:
        batch = self.config.batch_size, *self.dataset.image_shape

        def kept(efficient: bool) -> int:
            return backward_bytes(self.config, self.build, batch, efficient=efficient).bytes

        return ImageResult(
            test_accuracy=tested["accuracy"],
            test_loss=tested["loss"],
            best_epoch=best["epoch"],
            validation_accuracy=best.get("validation_accuracy"),
            validation_loss=best.get("validation_loss"),
            images_per_second=statistics.median(r["images_per_second"] for r in records),
            kept_bytes={"plain": kept(efficient=False), "efficient": kept(efficient=True)},
            seconds=time.perf_counter() - began,
        )

    def _evaluate(self, eval_step: Any, state: TrainState, part: Part) -> Metrics:
        """Return loss and accuracy on a part of the data; empty if the part is."""
        images = getattr(self.dataset, f"{part}_images")
        labels = getattr(self.dataset, f"{part}_labels")
        if not len(images):
            return {}
        size = self.config.batch_size
        rows = np.arange(size)[local_rows(size, self.mesh)]
        loss, correct = 0.0, 0.0
        for start in range(0, len(images), size):
            numbers = start + rows
            # The last batch repeats an image with weight 0, because devices need equal rows.
            there = numbers < len(images)
            chosen = np.where(there, numbers, 0)
            batch = Batch(images[chosen], labels[chosen]), there.astype(np.float32)
            sums = eval_step(state, *global_batch(batch, size, self.mesh))
            loss += float(sums.loss)
            correct += float(sums.correct)
        return {"loss": loss / len(images), "accuracy": correct / len(images)}
