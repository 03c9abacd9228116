"""Models and helpers for the tests of OffloadModel in nnx."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import effjax
import effjax.nnx
from effjax.nnx import OffloadModel
from tests.layers.offload_linen import FAST, IMAGES, X
from tests.ops.offload.stacks import kinds


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.3):
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.up = nnx.Linear(6, 12, rngs=rngs)
        self.down = nnx.Linear(12, 6, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Normed(nnx.Module):
    """A layer with batch norm and dropout, by its own stream and by the argument `key`."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, key=None):
        y = self.dropout(nnx.relu(self.norm(self.linear(x))))
        return x + (y if key is None else jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y, 0))


def cached_modules(make):
    """Create new modules in each call, with the same values."""

    @functools.cache
    def split(*args):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(*args)))
        state = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(*args))), compiler_options=FAST)
        return graphdef, state()

    def modules(*args):
        module = nnx.merge(*split(*args))
        return list(module) if isinstance(module, nnx.List) else module

    return modules


@cached_modules
def mlp():
    rngs = nnx.Rngs(0)
    return nnx.List([Block(rngs) for _ in range(2)])


@cached_modules
def cnn(norm=nnx.BatchNorm, momentum: Any = 0.9):
    rngs = nnx.Rngs(0)
    options: dict[str, Any] = {"momentum": momentum, "rngs": rngs}
    layers = [
        nnx.Conv(2, 5, (3, 3), rngs=rngs),
        norm(5, **options),
        nnx.relu,
        nnx.Sequential(nnx.Conv(5, 3, (3, 3), strides=2, rngs=rngs), norm(3, **options)),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(27, 4, rngs=rngs),
    ]
    return nnx.List(layers)


@cached_modules
def normed():
    return nnx.List([Normed(nnx.Rngs(i)) for i in range(4)])


def stacked(layers):
    """Return equal layers as one with stacked Variables."""
    states = [nnx.state(layer) for layer in layers]
    return nnx.merge(nnx.graphdef(layers[0]), jax.tree.map(lambda *a: jnp.stack(a), *states))


def loss_of(model, x):
    y = model(x)
    return jnp.sin(y.astype(jnp.float32)).sum(), y


def compiled(loss):
    """Return ``run(model, x) -> (output, gradients of Params, gradient of x, other state)``."""

    @functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
    def step(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        (_, y), (grads, dx) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return y, nnx.to_pure_dict(grads), dx, others_of(model)

    def run(model, x):
        results = step(*nnx.split(model), x)
        nnx.update(model, results[-1])
        return results

    return run


train = compiled(loss_of)


def others_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


# The interface of the shared tests; offload_linen has the same functions.


def effjax_norm():
    return cnn(effjax.nnx.BatchNorm, None)


def offloaded(make, **options):
    return OffloadModel(make(), **options).to_host()


def plain(make):
    return nnx.Sequential(*make())


run = train


@functools.cache
def unwrapped(make):
    """Return the results of the layers in device memory."""
    return run(plain(make), X if make is mlp else IMAGES)


def call(make, x, options, flags):
    return offloaded(make, **options)(x, **flags)


function_of = OffloadModel


def check_trained(model, results):
    """Check that parameters are in host memory and dropout streams have advanced once."""
    assert kinds(nnx.state(model, nnx.Param)) == {"pinned_host"}
    nodes: Any = [node for _, node in nnx.iter_graph(model, graph=True)]
    drops = [node for node in nodes if isinstance(node, nnx.Dropout)]
    counts: Any = [drop.rngs for drop in drops]
    assert {int(stream.count[...]) for stream in counts} == {1}


def stats(results, layer):
    """Return the running statistics of a layer after `run`."""
    return results[3]["layers"][layer]


def run_microbatch(make, x, m):
    """Return the results in device memory for microbatch m; streams have keys fold_in(key, m)."""
    model, fold = plain(make), functools.partial(jax.random.fold_in, data=m)
    nnx.update(model, jax.tree.map(fold, nnx.state(model, nnx.RngKey)))
    return run(model, x)
