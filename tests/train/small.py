"""A small task of images, of a model that compiles in a second, and helpers of tests of runs."""

import contextlib
import copy
import dataclasses
import functools
import resource
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax.nnx import BatchNorm
from effjax.train.checkpoint import Checkpoints
from effjax.train.images import task as images
from effjax.train.images.config import DenseNetRunConfig
from effjax.train.images.dataset import Dataset
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress


def dataset(train=70, test=37, size=8, channels=1, classes=5) -> Dataset:
    """Return noisy images whose brightness is that of their class."""
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
    """A model with the arguments of `DenseNet`."""

    def __init__(self, *, axis_name=None, drop_rate=0.2, rngs: nnx.Rngs, **_):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = BatchNorm(4, axis_name=axis_name, activation="relu", rngs=rngs)
        self.dropout = nnx.Dropout(drop_rate)
        self.linear = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.dropout(self.norm(self.conv(x)).mean((1, 2)), rngs=rngs)
        return self.linear(x).astype(jnp.float32)


def builder(config, *_, **more):
    """Replace `effjax.train.images.steps.model_builder`."""
    axis_name = None if config.parallel == "jit" else "data"
    defaults: dict[str, Any] = {"axis_name": axis_name} | more
    return lambda **options: SmallModel(**defaults | options)


def image_task(devices=2, **options) -> images.ImageTask:
    """Return a task of three epochs of four steps, of the small model."""
    config = DenseNetRunConfig(**{"batch_size": 16, "epochs": 3, "learning_rate": 0.05} | options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "model_builder", builder)
        return images.prepare(config, jax.devices()[:devices], dataset())


class CachedTask:
    """A task that is compiled once, however often it is trained.

    Keyword arguments replace options that change no program.
    """

    def __init__(self, task, **options):
        self.task = task
        self.config = dataclasses.replace(task.config, **options)

    def __getattr__(self, name):
        return getattr(self.task, name)

    @functools.cached_property
    def _programs(self):
        return self.task.make_step(), self.task.make_eval()

    @functools.cached_property
    def _initial_state(self):
        return jax.device_get(self.task.initial_state()), self.task.shapes()

    def initial_state(self):
        state, like = self._initial_state
        # Copy keys, which `device_get` leaves on the device: steps donate them.
        return jax.tree.map(lambda a, s: jax.device_put(copy.copy(a), s.sharding), state, like)

    def make_step(self):
        return self._programs[0]

    def make_eval(self):
        return self._programs[1]


class RecordedProgress(Progress):
    """The messages and the steps of a run."""

    def __init__(self):
        self.texts, self.steps = [], []

    def log(self, text):
        self.texts.append(text)

    def step(self, step, metrics, rate):
        self.steps.append(step)


class InterruptAt(Progress):
    """Ctrl-C at a step."""

    def __init__(self, step):
        self.at, self.stopped = step, False

    def step(self, step, metrics, rate):
        if step == self.at:
            signal.raise_signal(signal.SIGINT)

    def stop(self):
        self.stopped = True


@contextlib.contextmanager
def limited_files(size):
    """Let no file grow beyond a size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def new_run(path, task):
    """Create the run directory of a task."""
    return RunDirectory.create(path, task.describe(), overwrite=False)


def lines_without_times(run):
    """Return the lines of metrics.jsonl without what differs between equal runs."""
    times = {"seconds", "images_per_second", "tokens_per_second"}
    return [{k: v for k, v in line.items() if k not in times} for line in run.read_metrics()]


def assert_same_parameters(task, run, other):
    """Assert that the last checkpoints of two runs have the same bits."""
    states = []
    for path in (run.checkpoints, other.checkpoints):
        with Checkpoints(path) as checkpoints:
            states.append(checkpoints.restore(task.shapes(), task.eval_steps[-1]))
    jax.tree.map(assert_same_bits, *states)


def assert_same_run(task, run, other):
    """Assert that two runs have the same metrics and, at the last step, the same parameters."""
    assert lines_without_times(run) == lines_without_times(other)
    assert_same_parameters(task, run, other)


def as_numbers(a):
    """Return an array as NumPy's, and a PRNG key as its bits."""
    return np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)


def assert_same_bits(a, b):
    np.testing.assert_array_equal(as_numbers(a), as_numbers(b))
