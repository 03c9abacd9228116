"""Deformable attention in plain XLA, some queries at a time; open to every derivative.

The custom calls in `custom_call.py` compute the same; here is what they mean.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._parallel import same_varying


class Levels(NamedTuple):
    """How the pixels of a value lie, one level after the other, and what locations mean."""

    shapes: tuple[tuple[int, int], ...]  # (H, W) of each level
    normalized: bool  # locations are shares of a level's size; else pixels, whole at their centers

    @property
    def pixels(self) -> int:
        return sum(h * w for h, w in self.shapes)


# Of a number of the samples, in either pass; as measured.
SAMPLE_BYTES = 16


def attend(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    *,
    levels: Levels,
    workspace_bytes: int,
) -> jax.Array:
    """The weighted samples of all queries, in slices that are sampled again for each derivative.

    Args:
        value: [N, S, M, D].
        locations: [N, Q, M, L, P, 2], (x, y); at least float32.
        weights: [N, Q, M, L, P], of the dtype of locations.

    Returns:
        [N, Q, M, D] of value's dtype.
    """
    n, queries = locations.shape[:2]
    # Nothing is rounded to value's dtype in between: its gradient would be rounded in each slice.
    wide, locations, weights = same_varying((value.astype(weights.dtype), locations, weights))
    size = queries_of_slice(value, locations, workspace_bytes)
    count = math.ceil(queries / max(size, 1))
    if count <= 1:
        return _attend(wide, locations, weights, levels).astype(value.dtype)
    size = math.ceil(queries / count)

    def slices(a):  # [N, Q, ...] -> [count, N, size, ...]
        more = ((0, 0), (0, count * size - queries), *((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(jnp.pad(a, more).reshape(n, count, size, *a.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(wide, locations, weights):
        return _attend(wide, locations, weights, levels).astype(value.dtype)

    parts = slices(locations), slices(weights)
    _, y = lax.scan(lambda carry, at: (carry, one(wide, *at)), None, parts)
    y = jnp.moveaxis(y, 0, 1).reshape(n, count * size, *value.shape[2:])
    return y[:, :queries]


def queries_of_slice(value: jax.Array, locations: jax.Array, workspace_bytes: int) -> int:
    """How many queries have their samples in a workspace, one at least."""
    one = math.prod(locations.shape[:1] + locations.shape[2:5]) * value.shape[-1]
    most = workspace_bytes // max(one * SAMPLE_BYTES * weights_bytes(locations) // 4, 1)
    return max(1, min(most, locations.shape[1]))


def weights_bytes(locations: jax.Array) -> int:
    return locations.dtype.itemsize


def _attend(value: jax.Array, locations: jax.Array, weights: jax.Array, levels: Levels):
    """The same of a slice: value of the dtype of weights, the result too."""
    n, queries, heads = locations.shape[:3]
    points = math.prod(locations.shape[3:5])
    x, y, inside = positions(locations, levels)  # [N, Q, M, L, P]
    x0, y0 = jnp.floor(x), jnp.floor(y)
    weights = jnp.where(inside, weights, 0)
    total = jnp.zeros((), weights.dtype)
    for corner in np.ndindex(2, 2):
        index, valid = _corner_index(y0, x0, corner, levels)
        valid &= inside
        factor = weights * _share(y - y0, corner[0]) * _share(x - x0, corner[1])
        index, valid, factor = (
            jnp.moveaxis(a.reshape(n, queries, heads, points), 3, 2) for a in (index, valid, factor)
        )  # [N, Q, L * P, M]
        index = index.reshape(n, queries * points, heads, 1)
        pixel = jnp.take_along_axis(value, index, axis=1, mode="promise_in_bounds")
        pixel = pixel.reshape(n, queries, points, *value.shape[2:])
        # Chosen, not multiplied by zero: the pixel read in place of a corner out of range may be
        # infinite.
        pixel = jnp.where(valid[..., None], pixel, 0)
        total += jnp.sum(factor[..., None] * pixel, 2)
    return total


def positions(
    locations: jax.Array, levels: Levels
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where a level is sampled, (x, y) in pixels, and whether that touches it: [N, Q, M, L, P].

    A sample outside, or at a position that is no number, is moved to (0, 0); the choice passes no
    gradient to its location.
    """
    height, width = _sizes(levels, locations.dtype)
    x, y = locations[..., 0], locations[..., 1]
    if levels.normalized:
        x, y = (a * jnp.broadcast_to(s, a.shape) - 0.5 for a, s in ((x, width), (y, height)))
    inside = (y > -1) & (y < height) & (x > -1) & (x < width)  # no for NaN
    return jnp.where(inside, x, 0), jnp.where(inside, y, 0), inside


def _sizes(levels: Levels, dtype) -> tuple[jax.Array, jax.Array]:
    """Heights and widths, each [1, 1, 1, L, 1]."""
    sizes = np.asarray(levels.shapes).T.reshape(2, 1, 1, 1, -1, 1)
    return jnp.asarray(sizes[0], dtype), jnp.asarray(sizes[1], dtype)


def _corner_index(y0, x0, corner, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """The index of a corner's pixel in all levels, and whether there is such a pixel."""
    height, width = _sizes(levels, jnp.int32)
    ends = np.cumsum([h * w for h, w in levels.shapes])
    start = jnp.asarray([0, *ends[:-1]], jnp.int32)[:, None]
    y, x = (at.astype(jnp.int32) + step for at, step in zip((y0, x0), corner, strict=True))
    valid = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    start, width = (jnp.broadcast_to(a, y.shape) for a in (start, width))
    return jnp.where(valid, start + y * width + x, 0), valid


def _share(fraction: jax.Array, corner: int) -> jax.Array:
    return fraction if corner else 1 - fraction
