import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.train.errors import TrainError
from effjax.train.images.config import DenseNetRunConfig, ResNetRunConfig
from effjax.train.images.steps import (
    Batch,
    Learner,
    TrainState,
    make_train_step,
    model_builder,
)
from effjax.train.images.task import prepare
from effjax.train.mesh import make_mesh, replicated
from effjax.train.optimizers import make_sgd
from tests.train import small

WAYS = ["jit", "shard_map", "pmap"]


@pytest.fixture(scope="module")
def runs(mesh8):
    """Losses and final states of three steps: each way on 8 devices, and jit on one."""
    devices = list(mesh8.devices.flat)
    first = None

    def run(parallel, devices):
        config = DenseNetRunConfig(
            batch_size=32, learning_rate=0.02, parallel=parallel, epochs=2, validation=0
        )
        with pytest.MonkeyPatch.context() as patch:
            # Dropout would draw by device.
            builder = functools.partial(small.builder, drop_rate=0.0)
            patch.setattr("effjax.train.images.task.model_builder", builder)
            task = prepare(config, devices, small.dataset(train=100))
        step, mesh = task.make_step(), task.mesh
        nonlocal first
        first = first or jax.device_get(task.initial_state())
        state = jax.device_put(first, replicated(mesh))
        losses = []
        for batch in task.local_batches(epoch=1):
            before = jax.tree.leaves(state.params)[0]
            state, metrics = step(state, batch, jax.random.key(0))
            assert before.is_deleted()  # donated
            losses.append([float(metrics.loss), int(metrics.correct)])
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
        return losses, jax.device_get(state)

    return {"one device": run("jit", devices[:1])} | {way: run(way, devices) for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
def test_three_ways_take_the_same_steps(runs, way):
    losses, state = runs[way]
    expected_losses, expected_state = runs["one device"]
    assert len(losses) == 3
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert int(state.step) == 3
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-5)


class Noise(nnx.Module):
    """Logits that are drawn from the dropout key."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x, *, rngs):
        return self.scale[...] * jax.random.normal(rngs.dropout(), (x.shape[0], 3))


@pytest.mark.parametrize("way", ["shard_map", "pmap"])
def test_dropout_differs_by_step_and_by_device(way, mesh8):
    graphdef, params, stats = nnx.split(Noise(), nnx.Param, ...)
    optimizer = optax.sgd(0.0)
    learner = Learner(graphdef, graphdef, optimizer, np.zeros(1), np.ones(1))
    state = TrainState(np.array(0, np.int32), params, stats, optimizer.init(params))
    mesh = make_mesh(None, list(mesh8.devices.flat))
    step = make_train_step(way, learner, mesh, None)
    batch = Batch(np.zeros((8, 2, 2, 1), np.uint8), np.zeros((8,), np.int32))
    key = jax.random.key(3)
    state = jax.device_put(state, replicated(mesh))
    for number in range(2):
        state, metrics = step(state, batch, key)
        expected = []
        for device in range(8):
            folded = jax.random.fold_in(jax.random.fold_in(key, number), device)
            logits = jax.random.normal(nnx.Rngs(dropout=folded).dropout(), (1, 3))
            expected.append(-jax.nn.log_softmax(logits)[0, 0])
        np.testing.assert_allclose(metrics.loss, np.mean(expected), rtol=1e-6)


def test_weight_decay_is_of_kernels_only():
    optimizer = make_sgd(lambda _: 1.0, momentum=0.0, weight_decay=0.5)
    params = {"kernel": np.ones((2, 2), np.float32), "scale": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates: Any
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], -0.5)
    np.testing.assert_array_equal(updates["scale"], 0)


def stem(size, **options):
    """Return the shape of the first kernel for images of a size."""
    build: Any = model_builder(DenseNetRunConfig(**options), (size, size, 1), 5)
    model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    return model.stem_conv.kernel.shape


def test_small_inputs_by_image_size():
    assert stem(8, depth=10) == (3, 3, 1, 24)
    assert stem(96, depth=10) == (7, 7, 1, 24)
    assert stem(96, depth=10, small_inputs=True) == (3, 3, 1, 24)


def test_resnet_options():
    config = ResNetRunConfig(
        depth=50, dcn="v1", efficient=False, save="features", parallel="pmap", data="folder:x"
    )
    build: Any = model_builder(config, (224, 224, 3), 5)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    assert model.stage_with_dcn == (False, True, True, True) and not model.modulated
    assert not model.efficient and model.save == "features" and not model.small_inputs
    assert model.axis_name == "data" and model.num_classes == 5
    config = ResNetRunConfig(model="resnext50_32x4d")
    build = model_builder(config, (224, 224, 3), 5)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    assert model.feature_group_count == 32 and config.network == "resnext50_32x4d"
    with pytest.raises(TrainError, match=r"`model` \(='resnet77'\) must be one of resnet8, "):
        model_builder(ResNetRunConfig(model="resnet77"), (224, 224, 3), 5)
