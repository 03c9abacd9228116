"""Dropout that is linear in its input, for hand-written backward passes."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Set elements of x to zero with probability `rate` and scale the others by 1 / (1 - rate)."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
