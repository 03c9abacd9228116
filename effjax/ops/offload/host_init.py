"""Initialization in host memory, and the place of each array of an optimizer's state."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._common.arguments import describe
from .backends import load, mark_host_slices
from .compiled import compile_offloaded
from .placement import Space, put
from .trees import Tree, as_array_tree, count_layers, is_key

Spec = tuple[Any, ...]  # an entry for each axis, as in a PartitionSpec


def host_init(init_fn: Callable[..., Any], keys: jax.Array, *, shardings: Any = None) -> Tree:
    """Initialize the parameters of a stack of layers in host memory.

    Computes ``stack([init_fn(key) for key in keys])``. The device holds one layer at a time.

    Args:
        init_fn: ``init_fn(key) -> params`` of one layer.
        keys: [L] PRNG keys, such as ``jax.random.split(key, L)``.
        shardings: a Sharding for all arrays [L, ...], or a pytree of them. If None, the arrays are
            on one device.

    Returns:
        The parameters, arrays [L, ...] in pinned host memory.

    Raises:
        ValueError: if `keys` is not one key per layer, or a parameter has no sharding.
        TypeError: if `keys` is not an array.
    """
    keys = as_array_tree("keys", keys)
    count_layers(keys, "keys")
    return init_by_layer(
        lambda key, i: init_fn(key),
        keys,
        lambda a: Space.Host,
        lambda shapes: _place_params(shapes, keys, shardings),
    )


def _place_params(shapes: Tree, keys: jax.Array, shardings: Any) -> Tree:
    """Return the sharding of each parameter, in host memory."""
    if shardings is None:
        shardings = SingleDeviceSharding(min(keys.devices(), key=lambda d: d.id))
    is_one = isinstance(shardings, jax.sharding.Sharding)
    by_path = {} if is_one else dict(jax.tree_util.tree_leaves_with_path(shardings))

    def place(path: tuple, a: Any) -> jax.sharding.Sharding:
        sharding = shardings if is_one else by_path.get(path)
        if not isinstance(sharding, jax.sharding.Sharding):
            raise ValueError(
                "`shardings` must be a Sharding, or a pytree with one for each parameter. At "
                f"params{jax.tree_util.keystr(path)} it has {describe(sharding)}."
            )
        return sharding.with_memory_kind("pinned_host")

    return jax.tree_util.tree_map_with_path(place, shapes)


def init_by_layer(
    make: Callable[..., Any],
    stacked: Tree,
    space: Callable[[jax.Array], Space],
    place: Callable[[Tree], Tree],
) -> Tree:
    """Compute ``stack([make(stacked[i], i) for i in range(L)])``.

    Args:
        make: ``make(entry, i)`` for entry i of `stacked`, on the device.
        stacked: arrays [L, ...].
        space: returns the memory of a result of `make`.
        place: as of `init_in_place`.
    """

    def run(stacked):
        def body(i, _):
            entry = jax.tree.map(jnp.asarray, make(load(stacked, i), i))
            return i + 1, jax.tree.map(lambda a: put(a, space(a)), entry)

        return lax.scan(body, mark_host_slices(), None, length=count_layers(stacked))[1]

    return init_in_place(run, stacked, place)


def init_in_place(run: Callable[[Tree], Tree], tree: Tree, place: Callable[[Tree], Tree]) -> Tree:
    """Compile and call ``run(tree)`` so that each result is created in its final memory.

    ``place(shapes)`` returns the sharding of each result, with its memory.
    """
    if not has_places(tree):
        return run(tree)
    shardings = place(jax.eval_shape(run, tree))
    return compile_offloaded(jax.jit(run, out_shardings=shardings), tree)(tree)


# The places of optimizer states.


def state_space(ndim: int, space: Space) -> Space:
    """Return the memory of an array of the state, for parameters in the memory `space`.

    Scalars, such as counts, are on the device. In the state of a stack, `ndim` is that of a layer.
    """
    return space if ndim else Space.Device


def place_state(state: Tree, params: Tree, stacked: bool = False) -> Tree:
    """Return the sharding, with its memory, of each array of an optimizer's state.

    An array belongs to the parameter whose path is the end of its own. It has the sharding of that
    parameter if it has its shape. Factored moments (``optax.adafactor``) and the scales of 8-bit
    moments (`effjax.optimizers`) are sharded along the axes that they share with their parameter.
    Single numbers and PRNG keys are replicated. So is everything else if no parameter is sharded.

    Args:
        state: the state, or its shapes.
        params: the parameters, or their shapes with shardings. All are in the same memory.
        stacked: whether both consist of arrays [L, ...] of L layers.

    Raises:
        ValueError: for an array of another shape, if its parameter is sharded.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    first = leaves[0][1].sharding if leaves else SingleDeviceSharding(jax.local_devices()[0])
    on_host = first.memory_kind == "pinned_host"
    is_sharded = any(not p.sharding.is_fully_replicated for _, p in leaves)

    def place(path: tuple, a: Any) -> Sharding:
        # The state mu["mlp"]["kernel"] belongs to params["mlp"]["kernel"], not to params["kernel"].
        matching = [(len(end), p) for end, p in leaves if path[len(path) - len(end) :] == end]
        length, p = max(matching, key=lambda match: match[0], default=(0, None))
        name = getattr(path[len(path) - length - 1], "name", "") if len(path) > length else ""
        if p is not None and p.shape == a.shape:
            sharding = p.sharding
        elif math.prod(a.shape[stacked:]) == 1 or _holds_keys(a) or not is_sharded:
            sharding = _replicate(first)
        elif p is not None and p.sharding.is_fully_replicated:
            sharding = _replicate(p.sharding)
        else:
            sharding = _apply_rule(name, p, a, stacked)
        if sharding is None:
            raise ValueError(_describe_error(path, a, p))
        space = state_space(a.ndim - stacked, Space.Host if on_host else Space.Device)
        return sharding.with_memory_kind("pinned_host" if space == Space.Host else "device")

    return jax.tree_util.tree_map_with_path(place, state)


def has_places(tree: Tree) -> bool:
    """Return False for arrays that are being traced, which have no devices yet."""
    return not any(isinstance(a, Tracer) for a in jax.tree.leaves(tree))


def _holds_keys(a: Any) -> bool:
    return is_key(a) or a.dtype == jnp.uint32


def _replicate(sharding: Any) -> Sharding:
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return SingleDeviceSharding(min(sharding.device_set, key=lambda d: d.id))
    return NamedSharding(mesh, PartitionSpec())


def _describe_error(path: tuple, a: Any, p: Any) -> str:
    of = (
        "belongs to no parameter, and parameters are sharded."
        if p is None
        else f"belongs to a parameter of shape {p.shape} that is sharded, {p.sharding}."
    )
    return (
        f"The optimizer's state{jax.tree_util.keystr(path)} of shape {a.shape} {of} effjax knows "
        "the sharding of arrays with the shape of their parameter, of adafactor's factored moments "
        "and of 8-bit moments only. Replicate the parameters over the devices."
    )


# Rules for arrays with another shape than their parameter, by the name of their field. A rule gets
# the shape and the spec of the parameter and the shape of the array, of one layer in a stack, and
# returns the spec of the array, or None if it has an unexpected shape.


def _apply_rule(name: str, p: Any, a: Any, stacked: bool) -> NamedSharding | None:
    if p is None or name not in _RULES or not isinstance(p.sharding, NamedSharding):
        return None
    mesh, spec = p.sharding.mesh, p.sharding.spec
    spec = (*spec, *[None] * (len(p.shape) - len(spec)))
    new = _RULES[name](p.shape[stacked:], spec[stacked:], a.shape[stacked:])
    if new is None:
        return None
    # An axis that its devices do not divide, such as a few blocks, is not sharded.
    shards = [math.prod(mesh.shape[n] for n in _names(entry)) for entry in new]
    sizes = zip(new, a.shape[stacked:], shards, strict=True)
    new = [None if size % count else entry for entry, size, count in sizes]
    return NamedSharding(mesh, PartitionSpec(*spec[:stacked], *new))


def _names(entry: Any) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _without_axis(rank: int) -> Callable[[Spec, Spec, Spec], Spec | None]:
    """Return the rule of means over the axis at index `rank` of the axes sorted by size."""

    def rule(shape: Spec, spec: Spec, new_shape: Spec) -> Spec | None:
        axis = int(np.argsort(shape)[rank])  # as optax sorts them
        if new_shape != shape[:axis] + shape[axis + 1 :]:
            return None
        return spec[:axis] + spec[axis + 1 :]

    return rule


def _blocks(shape: Spec, spec: Spec, new_shape: Spec) -> Spec | None:
    """Return the spec of an array with a number for each block of the last axis."""
    return spec if new_shape[:-1] == shape[:-1] else None


_RULES = {
    "v_row": _without_axis(-1),
    "v_col": _without_axis(-2),
    "mu_scale": _blocks,
    "nu_scale": _blocks,
}
