"""Dtypes of intermediate results."""

import jax
import jax.numpy as jnp


def accumulation_dtype(x: jax.Array) -> jnp.dtype:
    """Return float32, or the dtype of x if that is wider."""
    return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Return x in float32, or unchanged if it is wider."""
    return x.astype(accumulation_dtype(x))
