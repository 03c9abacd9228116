"""Initialization in host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from .._common.arguments import describe
from .backends import load, mark_host_slices
from .compiled import compile_offloaded
from .placement import Space, put
from .state_places import has_places
from .trees import Tree, as_array_tree, count_layers


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
