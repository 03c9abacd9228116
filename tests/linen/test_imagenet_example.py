"""The program of Flax's ImageNet example, with a small network, before and after conversion."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax import linen as nn
from flax.training import train_state

from effjax.linen import convert_batch_norm
from tests.contexts import assert_trees_close

IMAGES = np.random.default_rng(0).normal(1, 2, (16, 8, 8, 3)).astype(np.float32)
LABELS = np.arange(16) % 4


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    act: Callable
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.act(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(nn.Module):
    block_cls: Any = ResNetBlock
    num_filters: int = 4
    dtype: Any = jnp.float32
    act: Callable = nn.relu
    conv: Any = nn.Conv

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(self.conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5,
            dtype=self.dtype,
        )  # fmt: skip
        x = conv(self.num_filters, (3, 3), name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        options: Any = dict(conv=conv, norm=norm, act=self.act)
        x = self.block_cls(self.num_filters, **options)(x)
        x = self.block_cls(2 * self.num_filters, strides=(2, 2), **options)(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(nn.Dense(4, dtype=self.dtype)(x), self.dtype)


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_train_state(rng, model):
    variables = jax.jit(model.init)({"params": rng}, jnp.ones((1, 8, 8, 3), model.dtype))
    return TrainState.create(
        apply_fn=model.apply, tx=optax.sgd(0.1, 0.9, nesterov=True), **variables
    )


def train_step(state, batch):
    def loss_fn(params):
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["image"],
            mutable=["batch_stats"],
        )  # fmt: skip
        labels = jax.nn.one_hot(batch["label"], 4)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, labels))
        decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 5e-5 * decay, new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    new_state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return new_state, jax.lax.pmean(loss, axis_name="batch")


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
    return jax.lax.pmean(jnp.mean(logits, 0), axis_name="batch")


def train(model, num_devices):
    """Take two steps; return the parameters, the statistics of each device, and an evaluation."""
    devices = jax.devices("cpu")[:num_devices]
    pmap = functools.partial(jax.pmap, axis_name="batch", devices=devices)
    state = jax_utils.replicate(create_train_state(jax.random.key(0), model), devices)
    split = lambda a: a.reshape(num_devices, -1, *a.shape[1:])  # noqa: E731
    batch = {"image": split(IMAGES), "label": split(LABELS)}
    p_train_step = pmap(train_step)
    for _ in range(2):
        state, loss = p_train_step(state, batch)
    stats = state.batch_stats
    state = state.replace(batch_stats=pmap(lambda x: jax.lax.pmean(x, "batch"))(stats))
    logits = pmap(eval_step)(state, batch)
    return jax.tree.map(lambda a: a[0], jax.device_get((state.params, loss, logits))), stats


@pytest.mark.exhaustive
def test_example_runs_with_a_converted_model():
    want, want_stats = train(ResNet(), 1)
    converted = convert_batch_norm(convert_batch_norm(ResNet()), axis_name="batch")
    assert isinstance(converted, ResNet)
    got, stats = train(converted, 2)
    assert_trees_close(got, want, 1e-4)
    assert_trees_close(stats, jax.tree.map(lambda a: a.repeat(2, 0), want_stats), 1e-4)
    _, local = train(ResNet(), 2)
    assert not np.allclose(*local["bn_init"]["mean"], rtol=1e-3)
