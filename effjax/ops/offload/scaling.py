"""What gradients are divided and multiplied by before an optimizer sees them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .optimizer import clip_scale, squares
from .trees import Tree

GROWTH_INTERVAL = 2000  # finite steps


class LossScale(NamedTuple):
    """What the loss is multiplied with before the backward pass; of no use without loss_scale."""

    scale: jax.Array  # float32 []
    finite_steps: jax.Array  # int32 [], since the scale changed


class Measured(NamedTuple):
    """Of gradients that come one after the other."""

    squares: jax.Array  # float32 [], their sum
    finite: jax.Array  # bool []


class Adjusted(NamedTuple):
    """An optimizer, as far as `apply` needs it."""

    update: Callable


def next_scale(now: LossScale, finite: jax.Array) -> LossScale:
    """After a step whose gradients are finite, or are not."""
    largest = jnp.finfo(jnp.float32).max
    grows = now.finite_steps == GROWTH_INTERVAL
    larger = jnp.where(grows, jnp.minimum(2 * now.scale, largest), now.scale)
    smaller = jnp.maximum(now.scale / 2, 1)
    return LossScale(
        jnp.where(finite, larger, smaller), jnp.where(grows | ~finite, 0, now.finite_steps + 1)
    )


def unmeasured() -> Measured:
    """Before there are any gradients."""
    return Measured(jnp.float32(0), jnp.bool_(True))


def measure(before: Measured, grads: Tree, scale: jax.Array | None) -> Measured:
    """`before` with more gradients, which are those of the loss times `scale`."""
    if scale is None:
        return before._replace(squares=before.squares + squares(grads))
    grads = _unscaled(grads, scale)
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return Measured(before.squares + squares(grads), jnp.stack([before.finite, *finite]).all())


def adjusted(
    tx: Any, found: Measured, clip_norm: float | None, scale: jax.Array | None
) -> Adjusted:
    """`tx` for gradients of the loss times `scale`, as they are found to be.

    It divides and clips them; if some are not finite, it changes nothing.
    """
    clip = None if clip_norm is None else clip_scale(found.squares, clip_norm)

    def update(grads, state, params):
        if scale is not None:
            grads = _unscaled(grads, scale)
        if clip is not None:
            grads = jax.tree.map(lambda g: (g * clip).astype(g.dtype), grads)
        updates, new = tx.update(grads, state, params)
        if scale is not None:
            # p + (-0) is p to the bit, and p + 0 is not.
            none = jax.tree.map(lambda u: -jnp.zeros_like(u), updates)
            keep = functools.partial(jax.tree.map, functools.partial(jnp.where, found.finite))
            updates, new = keep((updates, new), (none, state))
        return updates, new

    return Adjusted(update)


def _unscaled(grads: Tree, scale: jax.Array) -> Tree:
    """In float32, or wider if they are."""
    wide = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))  # noqa: E731
    return jax.tree.map(lambda g: wide(g) / scale, grads)
