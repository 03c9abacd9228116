"""A run before it begins: its data are read, and what can be wrong has been looked for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ... import __version__
from ..data.augment import Augmentation, default_padding
from ..data.dataset import Dataset, channel_statistics
from ..data.load import load_dataset
from ..errors import TrainError
from .config import Config
from .recipe import make_optimizer, make_schedule, model_builder
from .steps import Devices, Task


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What `fit` needs. Nothing has been written yet."""

    config: Config
    dataset: Dataset
    build: Callable[..., nnx.Module]
    task: Task
    devices: Devices
    steps_per_epoch: int
    learning_rate: Callable[[int], Any]
    augmentation: Augmentation | None

    def describe(self) -> dict[str, Any]:
        """For config.json: the options, and what a user of the checkpoints needs to know."""
        return {
            "effjax": __version__,
            "options": dataclasses.asdict(self.config),
            "data": {
                "train_images": len(self.dataset.train_images),
                "test_images": len(self.dataset.test_images),
                "image_shape": list(self.dataset.image_shape),
                "class_names": list(self.dataset.class_names),
                "mean": self.task.mean.tolist(),
                "std": self.task.std.tolist(),
            },
        }


def prepare(config: Config, devices: Devices | None = None, dataset: Dataset | None = None) -> Job:
    """Reads the data and checks what can be checked; writes nothing.

    Args:
      config: the options.
      devices: those to train on; default: all local ones.
      dataset: the images; default: those that `config.data` names.

    Raises:
      DataError: the data cannot be read, or are not sound.
      TrainError: the options do not fit each other, the data or the devices.
    """
    if dataset is None:
        dataset = load_dataset(config.data, config.image_size)
    devices = local_devices() if devices is None else devices
    steps_per_epoch = _steps_per_epoch(config, len(dataset.train_images), len(devices))
    schedule = make_schedule(config, steps_per_epoch)
    build = model_builder(config, dataset.image_shape, len(dataset.class_names))
    graphdef, eval_graphdef = _graphdefs(build, dataset.image_shape)
    mean, std = channel_statistics(dataset.train_images)
    task = Task(graphdef, eval_graphdef, make_optimizer(config, schedule), mean, std)
    flip = dataset.flip if config.flip is None else config.flip
    wanted = config.augment is None or config.augment
    augmentation = Augmentation(default_padding(dataset.image_shape), flip) if wanted else None
    return Job(config, dataset, build, task, devices, steps_per_epoch, schedule, augmentation)


def local_devices() -> Devices:
    """All devices of this process; `TrainError` if there is none."""
    try:
        return jax.local_devices()
    except RuntimeError as error:
        raise TrainError(f"JAX finds no device ({error}); run effjax doctor") from error


def _steps_per_epoch(config: Config, images: int, devices: int) -> int:
    if config.batch_size % devices:
        smaller = config.batch_size // devices * devices
        raise TrainError(
            f"batch_size (={config.batch_size}) is not divisible by the number of devices "
            f"(={devices}); use {smaller or devices}"
        )
    if config.batch_size > images:
        raise TrainError(
            f"batch_size (={config.batch_size}) is larger than the train set (={images} images); "
            "use a smaller one"
        )
    return images // config.batch_size


def _graphdefs(
    build: Callable[..., nnx.Module], image_shape: tuple[int, int, int]
) -> tuple[nnx.GraphDef, nnx.GraphDef]:
    """The structure of the model in training and in evaluation, after a trial with one image."""
    try:
        model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        model.eval()
        nnx.eval_shape(lambda m, x: m(x), model, jnp.zeros((1, *image_shape)))
        eval_graphdef = nnx.graphdef(model)
        model.train()
        return nnx.graphdef(model), eval_graphdef
    except ValueError as error:
        raise TrainError(str(error)) from error
