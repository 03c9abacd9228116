"""Moves between host memory and device memory, inside and outside of jit."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._common.derivatives import forbid_forward_mode
from .trees import as_array_tree

Space = jax.memory.Space
MemoryName = Literal["host", "device"]
SPACES: dict[str, Space] = {"host": Space.Host, "device": Space.Device}


def to_host(tree: Any) -> Any:
    """Move the arrays of a pytree to pinned host memory.

    May be called inside jit. A gradient is in the memory of its array. Reverse mode only. Sum over
    devices (``psum``) before this call, since XLA cannot sum on the host.

    Args:
        tree: an array or a pytree of arrays.

    Returns:
        The pytree with its arrays on the host. Arrays that were there already are unchanged.

    Raises:
        TypeError: if a leaf is not an array.
    """
    return move(forbid_forward_mode("to_host", as_array_tree("tree", tree)), Space.Host)


def to_device(tree: Any) -> Any:
    """Move the arrays of a pytree to device memory; otherwise like `to_host`."""
    return move(forbid_forward_mode("to_device", as_array_tree("tree", tree)), Space.Device)


def move(tree: Any, space: Space) -> Any:
    """Move arrays and Python scalars to a memory space; differentiable in reverse mode.

    `to_host` and `to_device` also validate their argument. `put` is without this derivative.
    """
    return jax.tree.map(functools.partial(_move_array, space=space), tree)


def space_of(x: Any) -> Space:
    """Return the memory space of an array or tracer."""
    return jax.typeof(x).memory_space


def _move_array(x: Any, space: Space) -> jax.Array:
    x = jnp.asarray(x)
    if space_of(x) == space:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.device_put(x, space)
    return _device_put(space_of(x), space, x)


# The transpose of jax.device_put to the host fails inside jit: the cotangent has another type.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _device_put(source: Space, target: Space, x: jax.Array) -> jax.Array:
    return jax.device_put(x, target)


def _device_put_forward(source: Space, target: Space, x: jax.Array):
    return jax.device_put(x, target), None


def _device_put_backward(source: Space, target: Space, _, dy: jax.Array):
    return (jax.device_put(dy, source),)


_device_put.defvjp(_device_put_forward, _device_put_backward)


def put(tree: Any, space: Space) -> Any:
    """Move arrays by plain device_put, whose transpose fails inside jit.

    For forward and backward rules, which JAX does not differentiate.
    """
    return jax.tree.map(lambda x: x if space_of(x) == space else jax.device_put(x, space), tree)


def copy_shared(tree: Any) -> Any:
    """Return a tree in which no floating-point array occurs twice.

    Where one array occurs several times, JAX adds its gradients in its memory space, which XLA for
    GPUs cannot do on the host. The gradients of these copies are added on the device.
    """
    leaves, structure = jax.tree.flatten(tree)
    indices: dict[int, list[int]] = {}
    for j, a in enumerate(leaves):
        indices.setdefault(id(a), []).append(j)
    for shared in indices.values():
        a = leaves[shared[0]]
        if len(shared) > 1 and jnp.issubdtype(a.dtype, jnp.inexact):
            for j, copy in zip(shared, _copies(len(shared), space_of(a), a), strict=True):
                leaves[j] = copy
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(count: int, space: Space, x: jax.Array) -> list[jax.Array]:
    return [x] * count


def _copies_forward(count: int, space: Space, x: jax.Array):
    return [x] * count, None


def _copies_backward(count: int, space: Space, _, dy: list[jax.Array]):
    # The barrier keeps the gradients on the host until all of them have been computed.
    first, *rest = put(lax.optimization_barrier(dy), Space.Device)
    return (put(sum(rest, first), space),)


_copies.defvjp(_copies_forward, _copies_backward)


def check_space(name: str, tree: Any, where: MemoryName) -> None:
    """Raise ValueError unless all arrays of a tree are in the given memory."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    elsewhere = [
        f"{name}{jax.tree_util.keystr(path)}" for path, x in leaves if space_of(x) != SPACES[where]
    ]
    if not elsewhere:
        return
    listed = ", ".join(elsewhere[:4]) + (f" and {len(elsewhere) - 4} more" if elsewhere[4:] else "")
    remedy = (
        "Move them with effjax.to_host, with a NamedSharding of memory_kind='pinned_host', or "
        "create them with effjax.host_init; shapes for jit need a NamedSharding. jax.pmap does not "
        "take arrays in host memory: use jax.shard_map. Parameters can stay on the device with "
        "params_in='device'."
        if where == "host"
        else "Move them with effjax.to_device."
    )
    raise ValueError(
        f"`{name}` must be in {where} memory, but these arrays are not: {listed}. {remedy}"
    )
