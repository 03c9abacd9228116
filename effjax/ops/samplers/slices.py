"""Slices of the queries or boxes of each image, for loops that limit the memory of samples."""

import math

import jax
import jax.numpy as jnp


def split(a: jax.Array, size: int) -> jax.Array:
    """Split [N, Q, ...] into slices [count, N, size, ...], the last one padded with zeros."""
    n, queries = a.shape[:2]
    count = math.ceil(queries / size)
    padding = ((0, 0), (0, count * size - queries), *((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(jnp.pad(a, padding).reshape(n, count, size, *a.shape[2:]), 1, 0)


def join(slices: jax.Array) -> jax.Array:
    """Join slices [count, N, size, ...] to [N, count * size, ...], with the padding."""
    count, n, size = slices.shape[:3]
    return jnp.moveaxis(slices, 0, 1).reshape(n, count * size, *slices.shape[3:])
