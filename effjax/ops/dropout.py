"""Dropout that is linear in its input, as hand-written backward passes want it."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Zeroes values of x with probability `rate` and scales the others: linear in x."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
