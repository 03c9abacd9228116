"""A small data set, a model that compiles in a second, and small tasks of both kinds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax.nnx import BatchNorm
from effjax.train.data.dataset import Dataset
from effjax.train.data.text import split_text
from effjax.train.images import task as images
from effjax.train.images.config import DenseNetConfig
from effjax.train.lm import task as lm
from effjax.train.lm.config import LMConfig
from effjax.train.task import Progress

TEXT = split_text("fox", b"The quick brown fox jumps over the lazy dog.\n" * 40)


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

    def __init__(self, *, axis_name=None, drop_rate=0.2, rngs: nnx.Rngs, **_):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = BatchNorm(4, axis_name=axis_name, activation="relu", rngs=rngs)
        self.dropout = nnx.Dropout(drop_rate)
        self.linear = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.dropout(self.norm(self.conv(x)).mean((1, 2)), rngs=rngs)
        return self.linear(x).astype(jnp.float32)


def builder(config, *_, **more):
    """Stands for `effjax.train.images.recipe.model_builder`."""
    axis_name = None if config.parallel == "jit" else "data"
    defaults: dict[str, Any] = {"axis_name": axis_name} | more
    return lambda **options: SmallModel(**defaults | options)


def image_task(devices=2, **options) -> images.ImageTask:
    """Three epochs of four steps, of the small model."""
    config = DenseNetConfig(**{"batch_size": 16, "epochs": 3, "learning_rate": 0.05} | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "model_builder", builder)
        return images.prepare(config, jax.devices()[:devices], dataset())


def lm_task(devices=2, resume=False, **options) -> lm.LMTask:
    """Five steps, tested after the second, the fourth and the last one."""
    tiny: dict[str, Any] = dict(
        layers=2, width=16, heads=2, context=12, batch_size=4, steps=5, report_every=2, dropout=0.1
    )  # fmt: skip
    return lm.prepare(LMConfig(**tiny | options), jax.devices()[:devices], TEXT, resume)


class CompiledOnce:
    """A task whose programs are those of its first run."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    @functools.cached_property
    def _programs(self):
        return self.task.make_step(), self.task.make_test()

    @functools.cached_property
    def _initial_state(self):
        return jax.device_get(self.task.initial_state()), self.task.shapes()

    def initial_state(self):
        state, like = self._initial_state
        return jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), state, like)

    def make_step(self):
        return self._programs[0]

    def make_test(self):
        return self._programs[1]


class Said(Progress):
    """Keeps what it is told."""

    def __init__(self):
        self.texts, self.steps = [], []

    def say(self, text):
        self.texts.append(text)

    def step(self, step, measured, rate):
        self.steps.append(step)
