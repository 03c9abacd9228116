"""A small data set, and a model that compiles in a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effjax.nnx import BatchNorm
from effjax.train.data.dataset import Dataset


def dataset(train=70, test=37, size=8, channels=1, classes=5) -> Dataset:
    """Noisy images whose brightness tells the class."""
    rng = np.random.default_rng(0)

    def part(count):
        labels = np.arange(count, dtype=np.int32) % classes
        noise = rng.integers(0, 60, (count, size, size, channels))
        images = noise + (190 // classes) * labels[:, None, None, None]
        return images.astype(np.uint8), labels

    (train_images, train_labels), (test_images, test_labels) = part(train), part(test)
    names = tuple("abcdefghij"[:classes])
    return Dataset("small", train_images, train_labels, test_images, test_labels, names, False)


class SmallModel(nnx.Module):
    """Takes what `DenseNet` takes."""

    def __init__(self, *, axis_name=None, rngs: nnx.Rngs, **_):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = BatchNorm(4, axis_name=axis_name, activation="relu", rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.linear = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.dropout(self.norm(self.conv(x)).mean((1, 2)), rngs=rngs)
        return self.linear(x).astype(jnp.float32)


def builder(config, *_):
    """Stands for `effjax.train.recipe.model_builder`."""
    axis_name = None if config.parallel == "jit" else "data"
    defaults: dict[str, Any] = {"axis_name": axis_name}
    return lambda **options: SmallModel(**defaults | options)
