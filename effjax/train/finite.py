"""Steps whose loss or gradients are not finite."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

OnNan = Literal["stop", "skip"]


def skip_nonfinite(
    on_nan: OnNan, new: Any, old: Any, loss: jax.Array, grads: Any
) -> tuple[Any, jax.Array]:
    """Return the state after a step, and its loss.

    With `on_nan="skip"`, a step whose loss or gradients are not finite advances `step` and changes
    nothing else in the state, and its loss is NaN. With `"stop"`, the new state and the loss are
    returned as they are.

    Args:
        on_nan: `"stop"` or `"skip"`.
        new: The state after the step, a NamedTuple with a field `step`.
        old: The state before it.
        loss: The loss, [].
        grads: The gradients, a pytree.
    """
    if on_nan == "stop":
        return new, loss
    leaves = [x for x in jax.tree.leaves((loss, grads)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    # The host learns from the loss that gradients were not finite.
    return kept._replace(step=new.step), jnp.where(finite, loss, jnp.full_like(loss, jnp.nan))
