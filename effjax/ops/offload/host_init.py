"""Initialization of parameters and optimizer state in host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._common.arguments import describe
from .compiled import compile_offloaded, mark_host_slices
from .placement import Space, load, put
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
        lambda key, i: init_fn(key), keys, _make_sharding_fn(shardings), Space.Host
    )


def _make_sharding_fn(shardings: Any) -> Callable[..., Any]:
    """Return ``sharding(path, shape)`` for `init_by_layer`."""
    if isinstance(shardings, jax.sharding.Sharding) or shardings is None:
        return lambda path, shape: shardings
    by_path = dict(jax.tree_util.tree_leaves_with_path(shardings))

    def sharding(path, shape):
        entry = by_path.get(path)
        if not isinstance(entry, jax.sharding.Sharding):
            raise ValueError(
                "`shardings` must be a Sharding, or a pytree with one for each parameter. At "
                f"params{jax.tree_util.keystr(path)} it has {describe(entry)}."
            )
        return entry

    return sharding


def init_by_layer(
    make: Callable[..., Any],
    stacked: Tree,
    sharding: Callable[..., Any],
    space: Space,
    put_scalars: bool = True,
) -> Tree:
    """Compute ``stack([make(stacked[i], i) for i in range(L)])`` in a memory space.

    Args:
        make: ``make(entry, i)`` for entry i of `stacked`, on the device.
        stacked: arrays [L, ...].
        sharding: ``sharding(path, shape)`` of a result [L, ...], or None for one device.
        space: the memory space of the results.
        put_scalars: whether scalars, [L] in the result, are in `space` too, or on the device.
    """

    def run(stacked):
        def body(i, _):
            entry = make(load(stacked, i), i)
            return i + 1, jax.tree.map(
                lambda a: put(jnp.asarray(a), space) if put_scalars or jnp.ndim(a) else a, entry
            )

        return lax.scan(body, mark_host_slices(), None, length=count_layers(stacked))[1]

    def is_on_host(path, shape):
        return space == Space.Host and (put_scalars or len(shape) > 1)

    return init_in_place(run, stacked, sharding, is_on_host)


def init_in_place(
    run: Callable[..., Any],
    tree: Tree,
    sharding: Callable[..., Any],
    is_on_host: Callable[..., Any],
) -> Tree:
    """Compile and call ``run(tree)`` so that each result is created in its final memory.

    ``is_on_host(path, shape)`` and ``sharding(path, shape)`` describe the results.
    """
    leaves = jax.tree.leaves(tree)
    if any(isinstance(a, Tracer) for a in leaves):
        return run(tree)
    devices = leaves[0].devices() if leaves else jax.local_devices()
    one_device = SingleDeviceSharding(min(devices, key=lambda d: d.id))

    def place(path, a):
        memory_kind = "pinned_host" if is_on_host(path, a.shape) else "device"
        return (sharding(path, a.shape) or one_device).with_memory_kind(memory_kind)

    shardings = jax.tree_util.tree_map_with_path(place, jax.eval_shape(run, tree))
    return compile_offloaded(jax.jit(run, out_shardings=shardings), tree)(tree)


def state_sharding(params: Tree, path: tuple, shape: tuple[int, ...]) -> Any:
    """Return the sharding of an entry of the optimizer's state.

    A moment has the shape and the sharding of its parameter, whose path is the end of `path`. Other
    entries are replicated.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves or any(isinstance(p, Tracer) for _, p in leaves):
        return None
    # The state mu["mlp"]["kernel"] belongs to params["mlp"]["kernel"], not to params["kernel"].
    matching = [(len(end), p) for end, p in leaves if path[len(path) - len(end) :] == end]
    _, p = max(matching, key=lambda match: match[0], default=(0, None))
    if p is not None and p.shape == shape:
        return p.sharding
    mesh = getattr(leaves[0][1].sharding, "mesh", None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
