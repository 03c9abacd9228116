"""Models and helpers for the tests of OffloadModel in linen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import effjax
import effjax.linen
from effjax.linen import OffloadModel
from tests.ops.offload.stacks import kinds

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(8, 6, 6, 2)).astype(np.float32)
KEY = jax.random.key(5)
# With these options, XLA computes the same bits in OffloadModel and outside.
FAST: Any = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    FAST["xla_cpu_use_fusion_emitters"] = True


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=False):
        h = nn.Dense(6)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.3, deterministic=deterministic)(h)


class Normed(nn.Module):
    """A layer of a stack with dropout and batch norm."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(6)(x))
        return x + nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


def mlp():
    return [Block() for _ in range(2)]


def cnn(norm=nn.BatchNorm, momentum: Any = 0.9):
    options: dict[str, Any] = dict(use_running_average=False, momentum=momentum)
    return [
        nn.Conv(5, (3, 3)),
        norm(**options),
        nn.relu,
        nn.Sequential([nn.Conv(3, (3, 3), strides=2), norm(**options)]),
        lambda x: x.reshape(x.shape[0], -1),
        nn.Dropout(0.3, deterministic=False),
        nn.Dense(4),
    ]


@functools.cache
def variables_of(make):
    """Return the variables of the unwrapped model."""
    module = nn.Sequential(make())
    x = X if make is mlp else IMAGES
    return jax.jit(module.init, compiler_options=FAST)({"params": KEY, "dropout": KEY}, x)


def effjax_norm():
    return cnn(effjax.linen.BatchNorm, None)


def on_host(variables):
    return {**variables, "params": effjax.to_host(variables["params"])}


def train(module, variables, x, key=KEY):
    """Return the output, gradients of the parameters and of x, and new running statistics."""

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(params, x):
        variables_now, rngs = {**variables, "params": params}, {"dropout": key}
        y, new = module.apply(variables_now, x, rngs=rngs, mutable=["batch_stats"])
        return jnp.sin(y.astype(jnp.float32)).sum(), (y, new)

    (_, (y, new)), (grads, dx) = run(variables["params"], x)
    return y, grads, dx, new


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def joined(microbatches):
    """Join the results of microbatches: (output, gradients, dx), and the mean of the others."""
    y, grads, dx, others = zip(*microbatches, strict=True)
    total = jax.tree.map(lambda *a: functools.reduce(jnp.add, a), *grads)
    mean = jax.tree.map(lambda *a: sum(a) / len(a), *others)
    return (np.concatenate(y), total, np.concatenate(dx)), mean


# The interface of the shared tests; offload_nnx has the same functions.


def offloaded(make, **options):
    return OffloadModel(make(), **options), on_host(variables_of(make))


def plain(make):
    return nn.Sequential(make()), variables_of(make)


def run(model, x):
    module, variables = model
    return train(module, variables, x)


@functools.cache
def unwrapped(make):
    """Return the results of the layers in device memory."""
    return run(plain(make), X if make is mlp else IMAGES)


def call(make, x, options, flags):
    model, variables = offloaded(make, **options)
    return model.apply(variables, x, rngs={"dropout": KEY}, **flags)


def function_of(layers):
    """Return the offloaded model of layers without parameters."""
    return functools.partial(OffloadModel(layers).apply, {})


def check_trained(model, results):
    """Check that parameters are in host memory and running statistics in device memory."""
    assert kinds(model[1]["params"]) == {"pinned_host"}
    assert kinds(results[3]) <= {"device"}


def stats(results, layer):
    """Return the running statistics of a layer after `run`."""
    return results[3]["batch_stats"][f"layers_{layer}"]


def run_microbatch(make, x, m):
    """Return the results of the layers in device memory for microbatch m, of fold_in(key, m)."""
    return train(*plain(make), x, jax.random.fold_in(KEY, m))
