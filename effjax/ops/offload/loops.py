"""Loops over slices of host arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._common.platform import traced_platform
from .._common.sharding import cast_to_varying, explicit_axes, explicit_spec, varying_axes
from .compiled import barrier
from .placement import Space, put, read, write
from .trees import Tree, is_key


def scan_slices(
    body: Callable[..., Any], carry: Tree, xs: Tree, length: int, reverse: bool = False
) -> tuple[Tree, Tree]:
    """Compute ``lax.scan(body, carry, xs, length, reverse)``. Not differentiable.

    A turn is one call of `body`. On TPUs an iteration has two turns. The carry of a loop has one
    place in memory, and XLA for TPUs loads the next slice into the memory of the current one, after
    its last use. With two turns per iteration, each of the two slices has its own place, and one
    arrives while the other is used.
    """
    if traced_platform() != "tpu" or length == 1:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)

    def turn(state: tuple) -> tuple:
        j, carry, results = state
        carry, result = body(carry, read(xs, j))
        results = write(results, jax.tree.leaves(result), j)
        return (j - 1 if reverse else j + 1), carry, results

    def two_turns(state: tuple) -> tuple:
        j, carry, results = turn(state)
        # Without the barrier, XLA could fuse the turns, which could change the last bit.
        leaves, structure = jax.tree.flatten(carry)
        on_device = [i for i, a in enumerate(leaves) if jax.typeof(a).memory_space == Space.Device]
        for i, a in zip(on_device, barrier([leaves[i] for i in on_device]), strict=True):
            leaves[i] = a
        return turn((j, structure.unflatten(leaves), results))

    first = read(xs, jnp.int32(0))
    results, structure = allocate_results(length, lambda *a: body(*a)[1], carry, first)
    state = jnp.int32(length - 1 if reverse else 0), carry, results
    if length < 4:
        state = run_as_loop(two_turns, state)
    else:
        state, _ = lax.scan(lambda s, _: (two_turns(s), None), state, None, length=length // 2)
    _, carry, results = run_as_loop(turn, state) if length % 2 else state
    return carry, structure.unflatten(results)


def run_as_loop(turn: Callable[[Tree], Tree], state: Tree) -> Tree:
    """Compute ``turn(state)`` as a loop of one iteration.

    XLA fuses a turn outside of a loop with the code around it, which can change the last bit. It
    also inlines loops that are known to have one iteration, so it must not know that.
    """
    return lax.fori_loop(0, barrier(jnp.int32(1)), lambda _, state: turn(state), state)


def repeat_turns(
    turn: Callable[[jax.Array, Tree], Tree], state: Tree, start: jax.Array, indices: range
) -> Tree:
    """Compute ``state = turn(i, state)`` for all indices, which may descend.

    Args:
        turn: gets i and the state.
        state: the first state.
        start: the guard of the loop, zero.
        indices: the values of i.
    """
    if not indices:
        return state
    if len(indices) == 1:
        return run_as_loop(lambda state: turn(start + indices[0], state), state)

    # Each loop starts at a constant index, or XLA would not see that the index is linear. The loop
    # carries the previous index: if it carried the next one, XLA could store it over the current
    # index, and would first wait for the copies that use it.
    def body(carry, _):
        before, state = carry
        i = before + indices.step
        return (i, turn(i, state)), None

    carry = start + indices[0] - indices.step, state
    return lax.scan(body, carry, None, len(indices))[0][1]


def allocate_results(length: int, run: Callable[..., Tree], *args: Tree) -> tuple[list, Any]:
    """Allocate arrays [length, ...] for the results of ``run(*args)``; return (leaves, structure).

    In host memory XLA allocates them uninitialized, so the loop must write every slice.
    """
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    leaves, structure = jax.tree.flatten(shapes)
    spaces = [a.memory_space for a in closed.out_avals]
    return [_allocate(length, *kind) for kind in zip(leaves, spaces, strict=True)], structure


def _allocate(length: int, like: Any, space: Space) -> jax.Array:
    """Return an array [length, ...] for results with the type of `like`."""
    zero = jax.random.key(0, impl=like.dtype) if is_key(like) else jnp.zeros((), like.dtype)
    zero = put(cast_to_varying(zero, varying_axes(like)), space)
    sharding = None
    if explicit_axes(like):
        spec = PartitionSpec(None, *explicit_spec(like))
        sharding = NamedSharding(jax.typeof(like).sharding.mesh, spec)
    return lax.broadcast(zero, (length, *like.shape), out_sharding=sharding)
