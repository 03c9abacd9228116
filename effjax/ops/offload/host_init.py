"""Parameters, and what optimizers keep of them, made straight in host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._common.arguments import as_callable, describe
from .checks import as_keys
from .compiled import compile_offloaded, guard_host_slices
from .loops import scan
from .placement import Space, put, read
from .trees import Tree, num_layers_of


def host_init(init_fn: Callable[..., Any], keys: jax.Array, *, shardings: Any = None) -> Tree:
    """Makes the parameters of a stack of layers straight in host memory.

    ``stack([init_fn(key) for key in keys])``; the device holds one layer at a time.

    Args:
        init_fn: ``init_fn(key) -> params`` of one layer.
        keys: [L] PRNG keys, such as ``jax.random.split(key, L)``.
        shardings: a NamedSharding for all arrays [L, ...], or a pytree of them; None: on one
            device.

    Returns:
        The parameters, arrays [L, ...] in pinned host memory.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
    """
    as_callable("init_fn", init_fn)
    keys, sharding = as_keys("keys", keys), _sharding_of(shardings)
    return by_layer(lambda key, i: init_fn(key), keys, sharding, Space.Host)


def _sharding_of(shardings: Any) -> Callable[..., Any]:
    """``sharding(path, shape)`` for `by_layer`."""
    kind = jax.sharding.Sharding
    if isinstance(shardings, kind) or shardings is None:
        return lambda path, shape: shardings
    by_path = dict(jax.tree_util.tree_leaves_with_path(shardings))
    for found in by_path.values():
        if not isinstance(found, kind):
            raise TypeError(
                "`shardings` must be a jax.sharding.Sharding, a pytree of them, or None, not "
                f"{describe(found)}."
            )

    def sharding(path, shape):
        if path not in by_path:
            raise ValueError(
                "`shardings` must have the structure of the parameters, but has none for "
                f"params{jax.tree_util.keystr(path)}."
            )
        return by_path[path]

    return sharding


def by_layer(
    make: Callable[..., Any],
    stacked: Tree,
    sharding: Callable[..., Any],
    space: Space,
    scalars: bool = True,
) -> Tree:
    """``stack([make(stacked[i], i) for i in range(L)])`` in a memory, scalars there if asked for.

    ``sharding(path, shape)`` is that of an array [L, ...], or None for one device.
    """

    def run(stacked):
        def body(i, _):
            made = make(put(read(stacked, i), Space.Device), i)
            return i + 1, jax.tree.map(
                lambda a: put(jnp.asarray(a), space) if scalars or jnp.ndim(a) else a, made
            )

        return scan(body, guard_host_slices(), None, length=num_layers_of(stacked))[1]

    return made_on_host(
        run,
        stacked,
        sharding,
        lambda _, shape: space == Space.Host and (scalars or len(shape) > 1),
    )


def made_on_host(
    run: Callable[..., Any],
    tree: Tree,
    sharding: Callable[..., Any],
    is_on_host: Callable[..., Any],
) -> Tree:
    """``run(tree)``, compiled so that its arrays are made where they are to be.

    ``is_on_host(path, shape)`` is whether one is to be there; ``sharding`` is as of `by_layer`.
    """
    leaves = jax.tree.leaves(tree)
    if any(isinstance(a, Tracer) for a in leaves):
        return run(tree)
    devices = leaves[0].devices() if leaves else jax.devices()
    one = SingleDeviceSharding(min(devices, key=lambda d: d.id))

    def place(path, a):
        found = sharding(path, a.shape) or one
        return found.with_memory_kind("pinned_host" if is_on_host(path, a.shape) else "device")

    shardings = jax.tree_util.tree_map_with_path(place, jax.eval_shape(run, tree))
    return compile_offloaded(jax.jit(run, out_shardings=shardings), tree)(tree)


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
