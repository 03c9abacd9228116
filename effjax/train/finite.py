"""Steps whose loss or gradients are not finite."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

OnNan = Literal["stop", "skip"]


def check_finite(
    on_nan: OnNan, new: Any, old: Any, loss: jax.Array, grads: Any
) -> tuple[Any, jax.Array]:
    """Return the state after a step, and its loss: NaN if the loss or a gradient is not finite.

    The host learns from the loss that gradients were not finite. It then ends the run, or with
    `on_nan="skip"` goes on with the old state, of which only `step` advances.

    Args:
        on_nan: `"stop"` or `"skip"`.
        new: The state after the step, a NamedTuple with a field `step`.
        old: The state before it.
        loss: The loss, [].
        grads: The gradients, a pytree.
    """
    leaves = [x for x in jax.tree.leaves((loss, grads)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()
    loss = jnp.where(finite, loss, jnp.full_like(loss, jnp.nan))
    if on_nan == "stop":
        return new, loss
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return kept._replace(step=new.step), loss
