"""Arrays in host memory and in device memory, inside jit."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .checks import as_arrays

Space = jax.memory.Space
Where = Literal["host", "device"]
SPACES: dict[str, Space] = {"host": Space.Host, "device": Space.Device}


def to_host(tree: Any) -> Any:
    """Moves the arrays of a pytree to pinned host memory.

    Works inside jit too, where the gradient of an array arrives in the memory where the array is.
    Reverse mode only. Arrays that are there already stay as they are. A sum over devices
    (``psum``) must be taken before this: XLA cannot on the host.

    Args:
        tree: an array or a pytree of arrays.

    Returns:
        The same pytree, with its arrays there.

    Raises:
        TypeError: for what is no array.
    """
    return moved(as_arrays("tree", tree), Space.Host)


def to_device(tree: Any) -> Any:
    """Moves the arrays of a pytree to device memory; otherwise as `to_host`."""
    return moved(as_arrays("tree", tree), Space.Device)


def moved(tree: Any, space: Space) -> Any:
    """`to_host` or `to_device`, also of Python's numbers."""
    return jax.tree.map(functools.partial(move, space=space), tree)


def space_of(x: Any) -> Space:
    """The memory that an array, or its tracer, is in."""
    return jax.typeof(x).memory_space


def move(x: Any, space: Space) -> jax.Array:
    x = jnp.asarray(x)
    if space_of(x) == space:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.device_put(x, space)
    return _move(space_of(x), space, x)


# A transpose that JAX does not have for moves inside jit.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(here: Space, there: Space, x: jax.Array) -> jax.Array:
    return jax.device_put(x, there)


def _move_forward(here: Space, there: Space, x: jax.Array):
    return jax.device_put(x, there), None


def _move_backward(here: Space, there: Space, _, dy: jax.Array):
    return (jax.device_put(dy, here),)


_move.defvjp(_move_forward, _move_backward)


def apart(tree: Any) -> Any:
    """The same tree, with an array of its own in each place.

    Where one array is in several places JAX adds its gradients where it is, which XLA for GPUs
    cannot on the host: here they are added on the device.
    """
    leaves, structure = jax.tree.flatten(tree)
    places: dict[int, list[int]] = {}
    for j, a in enumerate(leaves):
        places.setdefault(id(a), []).append(j)
    for found in places.values():
        a = leaves[found[0]]
        if len(found) > 1 and jnp.issubdtype(a.dtype, jnp.inexact):
            for j, copy in zip(found, _copies(len(found), space_of(a), a), strict=True):
                leaves[j] = copy
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(count: int, here: Space, x: jax.Array) -> list[jax.Array]:
    return [x] * count


def _copies_forward(count: int, here: Space, x: jax.Array):
    return [x] * count, None


def _copies_backward(count: int, here: Space, _, dy: list[jax.Array]):
    # Kept on the host from one place to the next, whatever lies between.
    first, *rest = put(lax.optimization_barrier(dy), Space.Device)
    return (put(sum(rest, first), here),)


_copies.defvjp(_copies_forward, _copies_backward)


def put(tree: Any, space: Space) -> Any:
    """Moves without a gradient: for inside a rule."""
    return jax.tree.map(lambda x: x if space_of(x) == space else jax.device_put(x, space), tree)


def read(tree: Any, i: jax.Array) -> Any:
    """Entry i of all arrays, where they are."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def write(tree: Any, entry: Any, i: jax.Array) -> Any:
    """Entry i of all arrays replaced, where they are."""
    return jax.tree.map(
        lambda a, b: lax.dynamic_update_index_in_dim(a, put(b, space_of(a)), i, 0), tree, entry
    )


def check_space(name: str, tree: Any, where: Where) -> None:
    """Raises ValueError unless all arrays of a tree are where the caller says they are."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    elsewhere = [jax.tree_util.keystr(path) for path, x in leaves if space_of(x) != SPACES[where]]
    if not elsewhere:
        return
    which = "None" if len(elsewhere) == len(leaves) else f"All but {', '.join(elsewhere[:4])}"
    hint = (
        "Put them there with effjax.to_host, a NamedSharding of memory_kind='pinned_host', or "
        "effjax.host_init; shapes for jit need a NamedSharding. jax.pmap takes no arrays from the "
        "host: use jax.shard_map."
        if where == "host"
        else "Move them with effjax.to_device."
    )
    raise ValueError(
        f"`{name}` is {where!r}, but not all parameters are in {where} memory. {which} of them "
        f"are. {hint}"
    )
