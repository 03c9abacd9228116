"""Optimizers whose state lives on the host, and parameters that are made there."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .arguments import num_layers_of
from .compiled import compile_offloaded, guard_host_slices
from .per_leaf import check_per_leaf
from .placement import Space, put, read, write
from .slices import Tree


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
        return _on_host(tx.init, params, functools.partial(state_sharding, params), scalars=False)

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
    (_, carry, _), _ = lax.scan(body, (start, carry, fetch(carry, start)), None, length=num_layers)
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

    (_, total), _ = lax.scan(
        body, (guard_host_slices(), jnp.float32(0)), None, length=num_layers_of(grads)
    )
    return total


def host_init(init_fn: Callable, keys: jax.Array, *, shardings: Any = None) -> Tree:
    """Makes the parameters of a stack of layers straight in host memory.

    ``stack([init_fn(key) for key in keys])``; the device holds one layer at a time.

    Args:
      init_fn: ``init_fn(key) -> params`` of one layer.
      keys: [L] PRNG keys, such as ``jax.random.split(key, L)``.
      shardings: a NamedSharding for all arrays [L, ...], or a pytree of them; None: on one device.

    Returns:
      The parameters, arrays [L, ...] in pinned host memory.
    """
    if isinstance(shardings, jax.sharding.Sharding) or shardings is None:
        return _on_host(init_fn, keys, lambda path, shape: shardings)
    by_path = dict(jax.tree_util.tree_leaves_with_path(shardings))
    return _on_host(init_fn, keys, lambda path, shape: by_path[path])


def _on_host(make: Callable, stacked: Tree, sharding: Callable, scalars: bool = True) -> Tree:
    """``stack([make(entry) for entry in stacked])`` on the host, scalars if asked for.

    ``sharding(path, shape)`` is that of an array [L, ...], or None for one device.
    """

    def run(stacked):
        def body(i, _):
            made = make(put(read(stacked, i), Space.Device))
            return i + 1, jax.tree.map(
                lambda a: put(jnp.asarray(a), Space.Host) if scalars or jnp.ndim(a) else a, made
            )

        return lax.scan(body, guard_host_slices(), None, length=num_layers_of(stacked))[1]

    leaves = jax.tree.leaves(stacked)
    if any(isinstance(a, Tracer) for a in leaves):
        return run(stacked)
    one = SingleDeviceSharding(min(leaves[0].devices(), key=lambda d: d.id))

    def place(path, a):
        found = sharding(path, a.shape) or one
        on_host = scalars or len(a.shape) > 1
        return found.with_memory_kind("pinned_host" if on_host else "device")

    shardings = jax.tree_util.tree_map_with_path(place, jax.eval_shape(run, stacked))
    return compile_offloaded(jax.jit(run, out_shardings=shardings), stacked)(stacked)


def state_sharding(params: Tree, path: tuple, shape: tuple[int, ...]) -> Any:
    """That of the parameter whose path ends the path, a moment of it; else nothing is sharded."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves or any(isinstance(p, Tracer) for _, p in leaves):
        return None
    for name, p in leaves:
        if path[len(path) - len(name) :] == name and shape == p.shape:
            return p.sharding
    mesh = getattr(leaves[0][1].sharding, "mesh", None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def one_layer(params: Tree) -> Tree:
    """The shapes of the parameters of one layer."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)
