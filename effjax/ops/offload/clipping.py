"""Gradient clipping by the norm of all gradients, of the previous step, or of each layer."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import as_number, check_choice
from .._common.dtypes import at_least_float32
from .._common.sharding import varying_axes
from .trees import Tree

ClipBy = Literal["global", "previous", "layer"]


class TransformedOptimizer(NamedTuple):
    """An optimizer without `init`."""

    update: Callable  # (grads, state, params) -> (updates, state)


def check_clipping(
    clip_norm: float | None,
    clip_by: str = "global",
    choices: tuple[str, ...] = ("global", "previous", "layer"),
) -> None:
    """Raise TypeError or ValueError unless both arguments are valid and fit each other."""
    check_choice("clip_by", clip_by, *choices)
    if clip_norm is not None:
        as_number("clip_norm", clip_norm, lambda norm: norm > 0, "above 0")
    elif clip_by != "global":
        raise ValueError(
            f"`clip_by` (={clip_by!r}) needs `clip_norm`, without which gradients are not clipped."
        )


def clip_factor(norm: jax.Array, clip_norm: float | jax.Array) -> jax.Array:
    """Return the factor of ``optax.clip_by_global_norm``; NaN for a norm that is NaN."""
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def make_clip(
    clip_norm: float | jax.Array, clip_by: ClipBy, norm: jax.Array | None
) -> Callable[[Tree], Tree]:
    """Return the function that clips the gradients of one layer, or all others together.

    Args:
        clip_norm: The largest norm.
        clip_by: The norm that it limits.
        norm: The norm of all gradients of this or the previous step. Unused with "layer".
    """
    if norm is None or clip_by == "layer":
        return functools.partial(clip_gradients, clip_norm=clip_norm)
    return functools.partial(scale_gradients, factor=clip_factor(norm, clip_norm))


def scale_gradients(grads: Tree, factor: jax.Array) -> Tree:
    """Multiply gradients by a factor, and keep their dtypes."""
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def clip_gradients(grads: Tree, clip_norm: float | jax.Array) -> Tree:
    """Clip gradients by their own norm."""
    return scale_gradients(grads, clip_factor(jnp.sqrt(sum_of_squares(grads)), clip_norm))


def with_clipping(tx: Any, clip: Callable[[Tree], Tree]) -> TransformedOptimizer:
    """Return `tx` that first clips the gradients it gets."""

    def update(grads, state, params):
        return tx.update(clip(grads), state, params)

    return TransformedOptimizer(update)


def measure_squares(tx: Any) -> TransformedOptimizer:
    """Return `tx` with the state (state of tx, sum of the squares of the last gradients)."""

    def update(grads, state, params):
        updates, new = tx.update(grads, state[0], params)
        return updates, (new, sum_of_squares(grads))

    return TransformedOptimizer(update)


def next_grad_norm(old: jax.Array, norm: jax.Array) -> jax.Array:
    """Return the norm for the next step; the old one if the new one is not finite."""
    norm = norm.astype(old.dtype)
    return jnp.where(jnp.isfinite(norm), norm, old)


def sum_of_squares(tree: Tree) -> jax.Array:
    """Return the sum of the squares of all numbers, in float32 or the widest dtype of the tree.

    In shard_map, the squares of arrays that are sharded over devices are summed over them, once for
    all arrays that are sharded over the same axes.
    """
    totals: dict[tuple, Any] = {}
    for a in jax.tree.leaves(tree):
        axes = tuple(sorted(varying_axes(a)))
        squares = jnp.sum(jnp.square(at_least_float32(jnp.abs(a))))
        totals[axes] = totals.get(axes, jnp.float32(0)) + squares
    summed = [lax.psum(total, axes) if axes else total for axes, total in totals.items()]
    return sum(summed[1:], summed[0]) if summed else jnp.float32(0)


def zero_squares(tree: Tree) -> jax.Array:
    """Return a zero of the dtype of `sum_of_squares`."""
    return jnp.zeros((), jax.eval_shape(sum_of_squares, tree).dtype)


def finite_leaves(tree: Tree) -> list[jax.Array]:
    """Return whether each leaf is finite, on all devices over which it is sharded."""

    def is_finite(a: jax.Array) -> jax.Array:
        finite, axes = jnp.all(jnp.isfinite(a)), tuple(varying_axes(a))
        return lax.psum((~finite).astype(jnp.int32), axes) == 0 if axes else finite

    return [is_finite(a) for a in jax.tree.leaves(tree)]
