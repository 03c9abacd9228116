"""Optimizers whose state lives on the host."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arguments import as_number
from .checks import as_arrays, check_alike, check_optimizer
from .compiled import guard_host_slices
from .host_init import by_layer, state_sharding
from .loops import scan
from .per_leaf import check_per_leaf
from .placement import Space, put, read, space_of, write
from .trees import Tree, is_key, num_layers_of, one_layer


class StreamUpdate(NamedTuple):
    """``init(params)`` and ``update(grads, state, params, clip_norm=None)``."""

    init: Callable
    update: Callable


def stream_update(tx: Any) -> StreamUpdate:
    """An optimizer for stacked parameters in host memory, applied layer by layer on the device.

    Every layer gets what ``tx`` gives it alone: the same as optax on a list of layers, but for
    noise. The device holds the parameters, gradients and state of two layers, whatever the depth;
    under `offload_jit` parameters and state are written where they were.

    Noise (``optax.add_noise``, ``optax.noisy_sgd``): each layer has an optimizer of its own, and
    draws its own. The PRNG keys in the state of layer i, counted from 0, are made of those of
    ``tx.init`` by ``fold_in(key, 2**32 - 1 - i)``; for a list optax would split one key among all
    parameters. They are part of the state, and so a run that is resumed draws what it would have.

    Args:
        tx: an ``optax.GradientTransformation`` that treats every parameter on its own: adamw, lion,
            sgd, schedules, masks, chains of them, ``optax.MultiSteps``. It sees the parameters of
            one layer.

    Returns:
        ``init(params) -> state``, arrays [L, ...] where the parameters are, counts [L] on the
        device; and ``update(grads, state, params, clip_norm=None) -> (params, state)``, which
        differs from optax in that it applies the updates. With clip_norm gradients are scaled as
        ``optax.clip_by_global_norm`` does; their norm takes a pass of its own over them, which
        `offload_train_step` does not need.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
        ValueError: from both, if tx is not leaf by leaf, with the parameters that it mixes, or
            draws numbers that would be the same in every layer: from a key that is not in its
            state.
    """
    check_optimizer(tx)

    def init(params: Tree) -> Tree:
        params = as_arrays("params", params)
        num_layers_of(params, "params")
        keys = check_per_leaf(tx, one_layer(params))

        def make(w: Tree, i: jax.Array) -> Tree:
            return _with_own_keys(tx.init(w), keys, i)

        sharding = functools.partial(state_sharding, params)
        return by_layer(make, params, sharding, space_of(jax.tree.leaves(params)[0]), scalars=False)

    def update(grads: Tree, state: Tree, params: Tree, clip_norm: float | None = None):
        check_clip_norm(clip_norm)
        params, grads = as_arrays("params", params), as_arrays("grads", grads)
        num_layers = num_layers_of(params, "params")
        check_alike("grads", grads, "`params`", params)
        check_per_leaf(tx, one_layer(params))
        check_state("state", tx, state, params, num_layers)
        scale = None
        if clip_norm is not None:
            scale = clip_scale(_sum_of_squares(grads), clip_norm)
        return update_layers(tx, grads, state, params, scale)

    return StreamUpdate(init, update)


def _with_own_keys(state: Tree, keys: set[int], i: jax.Array) -> Tree:
    """The state of layer i, in which the leaves `keys` are its own.

    Not fold_in(key, i): that is entry i of split(key), which the optimizer of the other parameters
    draws from.
    """

    def fold(key: jax.Array) -> jax.Array:
        one = lambda key: jax.random.fold_in(key, ~i.astype(jnp.uint32))  # noqa: E731
        for _ in range(key.ndim if is_key(key) else key.ndim - 1):
            one = jax.vmap(one)
        return one(key)

    leaves, structure = jax.tree.flatten(state)
    leaves = [fold(a) if j in keys else a for j, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def check_state(name: str, tx: Any, state: Tree, params: Tree, num_layers: int | None) -> None:
    """Raises ValueError unless this is the optimizer's state of parameters, or of their layers."""
    one = params if num_layers is None else one_layer(params)
    axes = () if num_layers is None else (num_layers,)
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((*axes, *a.shape), a.dtype), jax.eval_shape(tx.init, one)
    )
    check_alike(name, state, "what init makes", wanted)


def update_layers(tx: Any, grads: Tree, state: Tree, params: Tree, scale) -> tuple[Tree, Tree]:
    """One layer after the other, the next one loaded meanwhile; gradients times `scale`."""
    num_layers = num_layers_of(params)

    def fetch(carry, i):
        i = jnp.minimum(i, num_layers - 1)
        return [put(read(tree, i), Space.Device) for tree in (*carry, grads)]

    def body(at, _):
        i, carry, (w, s, g) = at
        # What is read is read before it is written: else XLA would copy the whole.
        carry, ahead = lax.optimization_barrier((carry, fetch(carry, i + 1)))
        if scale is not None:
            g = jax.tree.map(lambda a: (a * scale).astype(a.dtype), g)
        return (i + 1, write(carry, apply(tx, w, s, g), i), ahead), None

    start = guard_host_slices()
    carry = params, state
    (_, carry, _), _ = scan(body, (start, carry, fetch(carry, start)), None, length=num_layers)
    return carry


def update_slice(tx: Any, params: Tree, state: Tree, i, w: Tree, dw: Tree) -> tuple[Tree, Tree]:
    """Slice i of params and state [num_slices, slice_size, ...], by the gradients of its layers."""
    s = put(read(state, i), Space.Device)
    return write((params, state), jax.vmap(functools.partial(apply, tx))(w, s, dw), i)


def apply(tx: Any, w: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """The parameters and the state of tx after a step."""
    updates, new = tx.update(grads, state, w)
    w = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), w, updates)
    return w, jax.tree.map(lambda a, b: b.astype(a.dtype), state, new)


def check_clip_norm(clip_norm: float | None) -> None:
    if clip_norm is not None:
        as_number("clip_norm", clip_norm, lambda norm: norm > 0, "above 0")


def clip_scale(sum_of_squares: jax.Array, clip_norm: float) -> jax.Array:
    """What ``optax.clip_by_global_norm`` multiplies gradients with."""
    norm = jnp.sqrt(sum_of_squares)
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def squares(tree: Tree) -> jax.Array:
    """The sum of the squares of all numbers, in float32."""
    sizes = (jnp.abs(a).astype(jnp.float32) for a in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(a)) for a in sizes), jnp.float32(0))


def _sum_of_squares(grads: Tree) -> jax.Array:
    def body(at, _):
        i, total = at
        return (i + 1, total + squares(put(read(grads, i), Space.Device))), None

    (_, total), _ = scan(
        body, (guard_host_slices(), jnp.float32(0)), None, length=num_layers_of(grads)
    )
    return total
