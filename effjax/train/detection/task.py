"""Training of a detector, as a task of the training loop."""
# ruff: noqa: D102 (`Task` documents the methods)

import dataclasses
import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..._version import __version__
from ...convert import load_detector, save_detector
from ...models.rt_detr_config import RTDetrConfig
from ..errors import DataError, TrainError, counted
from ..images.steps import StepMetrics, TrainState, jit_step, state_shardings
from ..mesh import (
    Devices,
    check_batch_size,
    describe_devices,
    global_batch,
    local_rows,
    make_mesh,
    put,
    replicated,
    with_shardings,
)
from ..optimizers import make_schedule
from ..run_directory import RunDirectory, digest_json
from ..task import Metrics, Part, Record, Task, TrainStep, report_steps
from ..text.base import convert_errors
from .config import DetectorConfig
from .data import (
    PARTS,
    Batch,
    DetectionData,
    average_precision,
    hold_out,
    load_coco,
    make_batch,
    most_objects,
)
from .steps import (
    DetectorLearner,
    make_eval_step,
    make_learner,
    model_options,
    read_model,
)

MODEL = "model"  # the folder of a run that is written at its end


@dataclasses.dataclass(frozen=True)
class DetectorResult:
    """Result of a run. AP is the mean over IoU of 0.5 to 0.95, and None for a part without images.

    Attributes:
        best_step: The step with the best validation AP, or the last one without validation.
        validation_ap: Of `best_step`.
        test_ap: Of the same parameters.
        images_per_second: Median over the validations.
        exported: The folder with the parameters of `best_step`, within the run.
        seconds: The duration of the run.
    """

    best_step: int
    validation_ap: float | None
    test_ap: float | None
    images_per_second: float
    exported: str
    seconds: float


def prepare(
    config: DetectorConfig, devices: Devices | None = None, resume: bool = False
) -> "DetectorTask":
    """Read the data and the weights, and check the options. Nothing is written.

    Args:
        config: The options.
        devices: Where to train. The default is all devices of all processes.
        resume: Whether the weights will be those of a checkpoint of the run. Of `config.weights`,
            only config.json is read then.

    Raises:
        DataError: The data or the weights cannot be read, or do not belong to each other.
        TrainError: The options do not fit each other or the devices.
    """
    config = config.resolve()
    mesh = make_mesh(config.mesh, devices)
    check_batch_size(config.batch_size, mesh)
    if not config.data or not config.weights:
        raise TrainError("`data` and `weights` must be given: a folder, and an RT-DETR.")
    data = hold_out(load_coco(Path(config.data)), config.validation)
    source, weights = read_model(config.weights)
    most, file = most_objects(data)
    if most > source.num_queries:
        raise DataError(
            f"{file}: {most} objects, more than the queries of {config.weights} "
            f"(={source.num_queries}). Use a model with more queries, or split the image."
        )
    steps = config.steps or max(round(config.epochs * len(data.train) / config.batch_size), 1)
    config = dataclasses.replace(config, steps=steps, weights=weights)
    schedule = make_schedule(config.schedule, config.learning_rate, steps, config.warmup)
    model = dataclasses.replace(source, id2label=data.class_names)
    learner = make_learner(config, model, schedule)
    task = DetectorTask(config, mesh, schedule, data, most, source, learner)
    return task if resume else dataclasses.replace(task, start_arrays=task.load())


@dataclasses.dataclass(frozen=True, eq=False)
class DetectorTask(Task[DetectorResult]):
    """A run of a detector, from `prepare`.

    Attributes:
        data: The images and their objects.
        max_objects: The number to which the objects of an image are padded.
        source: The model that a new run starts with.
        learner: The model and its optimizer.
        start_arrays: The arrays of that model, on the host; of a run that continues, None.
    """

    items = "images"

    config: DetectorConfig
    data: DetectionData
    max_objects: int
    source: RTDetrConfig
    learner: DetectorLearner
    start_arrays: Any = None

    @property
    def eval_steps(self) -> Sequence[int]:
        return report_steps(self.config, len(self.data.train))

    @property
    def items_per_step(self) -> int:
        return self.config.batch_size

    def describe(self) -> dict[str, Any]:
        counts = {f"{part}_images": len(getattr(self.data, part)) for part in PARTS}
        description = self.config.describe(
            __version__,
            {**counts, "class_names": list(self.data.class_names), "sha256": self.data.sha256},
        )
        return description | {"base": {"config_sha256": digest_json(self.learner.model.to_dict())}}

    def load(self) -> tuple[nnx.State, nnx.State]:
        """Return parameters and statistics of the model that the run starts with, on the host."""
        classes, options = len(self.data.class_names), model_options(self.config)
        options |= {"num_classes": classes, "seed": self.config.seed}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`num_classes`")  # `describe` tells of it
            model = convert_errors(Path(str(self.config.weights)), load_detector, **options)
        _, params, stats = nnx.split(model, nnx.Param, ...)
        return jax.device_get((params, stats))

    def initial_state(self) -> TrainState:
        arrays = self.start_arrays or self.load()
        return jax.jit(self.learner.init, out_shardings=self._shardings)(*arrays)

    def shapes(self) -> TrainState:
        return with_shardings(self.learner.shapes(), self._shardings)

    @functools.cached_property
    def _shardings(self) -> TrainState:
        return state_shardings(self.learner.shapes(), self.mesh)

    def make_step(self) -> TrainStep:
        return jit_step(self.learner, self.mesh, self._shardings)

    def make_eval(self) -> Callable[[TrainState, Part], Metrics]:
        eval_step = make_eval_step(self.learner, self.mesh, self._shardings)
        return lambda state, part: self._evaluate(eval_step, state, part)

    def _evaluate(self, eval_step: Any, state: TrainState, part: Part) -> Metrics:
        """Return loss and AP of a part of the data; empty if the part is."""
        images, size = getattr(self.data, part), self.config.batch_size
        if not images:
            return {}
        loss, count, detections = 0.0, 0, []
        rows = np.arange(size)[local_rows(size, self.mesh)]
        for start in range(0, len(images), size):
            # Devices need equal rows: the last batch repeats images, which do not count.
            chosen = [images[i % len(images)] for i in start + rows]
            batch = make_batch(chosen, self.config.image_size, self.max_objects)
            sizes = np.array([image.size[::-1] for image in chosen], np.float32)
            arrays = global_batch((batch, sizes, start + rows < len(images)), size, self.mesh)
            total, objects, found = jax.device_get(eval_step(state, *arrays))
            loss, count = loss + float(total), count + int(objects)
            detections.append(found)
        found = [np.concatenate(a)[: len(images)] for a in zip(*detections, strict=True)]
        precision = average_precision(images, len(self.data.class_names), *found)
        return {"loss": loss / count, **precision}

    def batches(self, done: int) -> Iterator[Batch]:
        for step in itertools.count(done + 1):
            yield global_batch(self.local_batch(step), self.config.batch_size, self.mesh)

    def local_batch(self, step: int) -> Batch:
        """Return this process's rows of the batch of a step, which the seed determines.

        Batches cross the ends of epochs, so that no image is left out.
        """
        seed, size, images = self.config.seed, self.config.batch_size, self.data.train
        rows = range(size)[local_rows(size, self.mesh)]
        places = (divmod((step - 1) * size + row, len(images)) for row in rows)
        chosen = [images[_order(seed, epoch, len(images))[place]] for epoch, place in places]
        side = np.random.default_rng([seed, step]).choice(self.config.train_sizes)
        rngs = [np.random.default_rng([seed, step, row]) for row in rows]
        return make_batch(
            chosen, int(side), self.max_objects, rngs if self.config.augment else None
        )

    def read(self, metrics: StepMetrics) -> Metrics:
        return {"loss": float(metrics.loss)}

    def score(self, record: Record) -> tuple[float, ...]:
        return record.get("validation_ap", 0), *super().score(record)

    def draw(self, axes: Any, records: Sequence[Record]) -> None:
        super().draw(axes, records)
        if self.data.validation:
            right, x = axes.twinx(), [record["step"] for record in records]
            right.plot(x, [r["validation_ap"] for r in records], "C2.--", label="validation AP")
            right.set(ylabel="validation AP", ylim=(0, 1))

    def finish(self, state: TrainState, run: RunDirectory) -> None:
        whole = jax.tree.map(lambda _: replicated(self.mesh), (state.params, state.stats))
        arrays = put((state.params, state.stats), whole)
        if run.writes:
            model = nnx.merge(self.learner.eval_graphdef, *jax.device_get(arrays))
            names, side = self.data.class_names, self.config.image_size
            save_detector(model, run.path / MODEL, id2label=names, image_size=side)

    def result(
        self, records: Sequence[Record], best: Record, tested: Metrics, began: float
    ) -> DetectorResult:
        return DetectorResult(
            best_step=best["step"],
            validation_ap=best.get("validation_ap"),
            test_ap=tested.get("ap"),
            images_per_second=statistics.median(r["images_per_second"] for r in records),
            exported=MODEL,
            seconds=time.perf_counter() - began,
        )


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def describe(task: DetectorTask) -> list[str]:
    """Describe the data, the model and the devices, one per line."""
    config, data = task.config, task.data
    counts = ", ".join(f"{len(getattr(data, part))} {part}" for part in PARTS)
    sides = " or ".join(map(str, config.train_sizes))
    left_out = f"; left out, because of no size: {data.left_out} boxes" if data.left_out else ""
    heads, classes = "", task.source.num_labels
    if classes != len(data.class_names):
        heads = f", which have {classes} classes: the heads of classes are new"
    return [
        f"{config.data}: {counts} images, {len(data.class_names)} classes, at most "
        f"{counted(task.max_objects, 'object')} in an image{left_out}",
        f"weights: those of {config.weights}{heads}",
        f"{sides} pixels, {config.dtype}, batch {config.batch_size}, "
        f"{counted(config.steps or 0, 'step')} over {describe_devices(task.mesh)}",
    ]


def result_rows(result: DetectorResult) -> list[tuple[str, str]]:
    """Return the names and values of the final table."""
    parts = {"validation AP": result.validation_ap, "test AP": result.test_ap}
    rows = [(name, f"{value:.3f}") for name, value in parts.items() if value is not None]
    rows.append(("best step", str(result.best_step)))
    rows.append(("images/s", f"{result.images_per_second:.1f}"))
    return [*rows, ("time", f"{result.seconds:.0f} s")]
