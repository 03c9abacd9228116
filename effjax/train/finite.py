"""A step whose loss or gradients are not finite: how it is known, and that it changes nothing."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

OnNan = Literal["stop", "skip", "rollback"]


def all_finite(*trees: Any) -> jax.Array:
    """Whether all numbers are; integers are."""
    leaves = [a for a in jax.tree.leaves(trees) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return jnp.stack([jnp.all(jnp.isfinite(a)) for a in leaves]).all()


def marked(loss: jax.Array, finite: jax.Array) -> jax.Array:
    """The loss, and NaN in its place where something else is not finite."""
    return jnp.where(finite, loss, jnp.full_like(loss, jnp.nan))


def guarded(on_nan: OnNan, new: Any, old: Any, loss: jax.Array, grads: Any) -> tuple[Any, Any]:
    """The state after a step, and its loss.

    Args:
        on_nan: with `skip`, a step whose loss or gradients are not finite counts, and changes
            nothing else; with `rollback` too it shows in the loss, which is then NaN.
        new, old: the states, with a `step`.
    """
    if on_nan == "stop":
        return new, loss
    finite = all_finite(loss, grads)
    if on_nan == "skip":
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        new = kept._replace(step=new.step)
    return new, marked(loss, finite)
