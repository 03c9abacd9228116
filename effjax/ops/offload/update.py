"""Optimizers whose state lives on the host."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .compiled import guard_host_slices
from .host_init import on_host, state_sharding
from .loops import scan
from .per_leaf import check_per_leaf
from .placement import Space, put, read, write
from .trees import Tree, num_layers_of, one_layer


class StreamUpdate(NamedTuple):
    """``init(params)`` and ``update(grads, state, params, clip_norm=None)``."""

    init: Callable
    update: Callable


def stream_update(tx: Any) -> StreamUpdate:
    """An optimizer for stacked parameters in host memory, applied layer by layer on the device.

    Every layer gets what ``tx`` gives it alone: the same as optax on a list of layers. The device
    holds the parameters, gradients and state of two layers, whatever the depth; under `offload_jit`
    parameters and state are written where they were.

    Args:
      tx: an ``optax.GradientTransformation`` that treats every parameter on its own: adamw, lion,
        sgd, schedules, masks, chains of them. It sees the parameters of one layer.

    Returns:
      ``init(params) -> state``, arrays [L, ...] on the host, counts [L] on the device; and
      ``update(grads, state, params, clip_norm=None) -> (params, state)``, which differs from optax
      in that it applies the updates. With clip_norm gradients are scaled as
      ``optax.clip_by_global_norm`` does; their norm takes a pass of its own over them, which
      `offload_train_step` does not need.

    Raises:
      ValueError: from both, if tx is not leaf by leaf, with the parameters that it mixes.
    """

    def init(params: Tree) -> Tree:
        check_per_leaf(tx, one_layer(params))
        return on_host(tx.init, params, functools.partial(state_sharding, params), scalars=False)

    def update(grads: Tree, state: Tree, params: Tree, clip_norm: float | None = None):
        check_clip_norm(clip_norm)
        check_per_leaf(tx, one_layer(params))
        scale = None
        if clip_norm is not None:
            scale = clip_scale(_sum_of_squares(grads), clip_norm)
        return update_layers(tx, grads, state, params, scale)

    return StreamUpdate(init, update)


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
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"`clip_norm` (={clip_norm}) must be above 0.")


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
