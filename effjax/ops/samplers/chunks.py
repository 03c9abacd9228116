"""Chunks of the queries or boxes of each image, for loops that limit the memory of samples."""

import math

import jax
import jax.numpy as jnp


def split(a: jax.Array, size: int) -> jax.Array:
    """Split [N, Q, ...] into chunks [count, N, size, ...], the last one padded with zeros."""
    n, queries = a.shape[:2]
    count = math.ceil(queries / size)
    padding = ((0, 0), (0, count * size - queries), *((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(jnp.pad(a, padding).reshape(n, count, size, *a.shape[2:]), 1, 0)


def join(chunks: jax.Array) -> jax.Array:
    """Join chunks [count, N, size, ...] to [N, count * size, ...], with the padding."""
    count, n, size = chunks.shape[:3]
    return jnp.moveaxis(chunks, 0, 1).reshape(n, count * size, *chunks.shape[3:])
