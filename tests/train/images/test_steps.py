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


@pytest.fixture(scope="module")
def train(mesh8):
    """Return a function that takes three steps, and returns losses and the final state."""
    first = None

    def train(parallel, num_devices=8, mesh=None):
        nonlocal first
        config = DenseNetRunConfig(
            batch_size=32, learning_rate=0.02, parallel=parallel, epochs=2, validation=0, mesh=mesh
        )
        with pytest.MonkeyPatch.context() as patch:
            # Dropout would draw by device.
            builder = functools.partial(small.builder, drop_rate=0.0)
            patch.setattr("effjax.train.images.task.model_builder", builder)
            task = prepare(config, [*mesh8.devices.flat][:num_devices], small.dataset(train=100))
        step = task.make_step()
        first = first or jax.device_get(task.initial_state())
        places = jax.tree.map(lambda like: like.sharding, task.shapes())
        state, losses = jax.device_put(first, places), []
        for batch in task.local_batches(epoch=1):
            before = jax.tree.leaves(state.params)[0]
            state, metrics = step(state, batch, jax.random.key(0))
            assert before.is_deleted()  # donated
            losses.append([float(metrics.loss), int(metrics.correct)])
        is_split = [not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state)]
        assert any(is_split) == ("fsdp" in task.mesh.shape)
        assert len(losses) == int(state.step) == 3
        return losses, jax.device_get(state)

    return train


@pytest.fixture(scope="module")
def on_one_device(train):
    return train("jit", 1)


@pytest.mark.parametrize(
    ("way", "mesh"),
    [("jit", None), ("shard_map", None), ("pmap", None), ("jit", "data=2,fsdp=4")],
)
def test_all_ways_take_the_same_steps(train, on_one_device, monkeypatch, way, mesh):
    monkeypatch.setattr("effjax.train.mesh.SMALL", 1)  # split all parameters that can be
    (losses, state), (expected_losses, expected) = train(way, mesh=mesh), on_one_device
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 2e-5), state, expected)


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
    config = DenseNetRunConfig(parallel=way)
    learner = Learner(config, graphdef, graphdef, optimizer, np.zeros(1), np.ones(1))
    state = TrainState(np.array(0, np.int32), params, stats, optimizer.init(params))
    mesh = make_mesh(None, list(mesh8.devices.flat))
    step = make_train_step(learner, mesh, None)
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


def model_of(config, size, channels=3):
    build: Any = model_builder(config, (size, size, channels), 5)
    return nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("size", "options", "kernel"), [(8, {}, 3), (96, {}, 7), (96, {"small_inputs": True}, 3)]
)
def test_small_inputs_by_image_size(size, options, kernel):
    model = model_of(DenseNetRunConfig(depth=10, **options), size, 1)
    assert model.stem_conv.kernel.shape == (kernel, kernel, 1, 24)


def test_resnet_options():
    config = ResNetRunConfig(
        depth=50, dcn="v1", efficient=False, save="features", parallel="pmap", data="folder:x"
    )
    model = model_of(config, 224)
    assert model.stage_with_dcn == (False, True, True, True) and not model.modulated
    assert not model.efficient and model.save == "features" and not model.small_inputs
    assert model.axis_name == "data" and model.num_classes == 5
    config = ResNetRunConfig(model="resnext50_32x4d")
    assert model_of(config, 224).feature_group_count == 32
    assert config.network == "resnext50_32x4d"
    with pytest.raises(TrainError, match=r"`model` \(='resnet77'\) must be one of resnet8, "):
        model_of(ResNetRunConfig(model="resnet77"), 224)
