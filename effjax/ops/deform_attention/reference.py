"""Deformable attention in plain XLA, in slices of queries and with all derivatives.

This is the definition of the two functions that the custom calls in `api.py` compute.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common.sharding import match_varying


class Levels(NamedTuple):
    """Layout of the pixels of `value`, level by level, and the unit of locations."""

    shapes: tuple[tuple[int, int], ...]  # (H, W) of each level
    normalized: bool  # locations are fractions of a level's size; else pixels, integer at centers


# Simultaneous copies of a slice's samples in memory, in either pass, as measured.
SAMPLE_COPIES = 4


def attend(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    *,
    levels: Levels,
    workspace_bytes: int,
) -> jax.Array:
    """Sum the weighted samples of each query, in slices that are recomputed for each derivative.

    Args:
        value: [N, S, M, D].
        locations: [N, Q, M, L, P, 2], (x, y); at least float32.
        weights: [N, Q, M, L, P], of the dtype of locations.
        levels: layout of value.
        workspace_bytes: upper limit for the samples of a slice.

    Returns:
        [N, Q, M, D] of value's dtype.
    """
    # Widened outside of the slices, so that the gradient is summed over them in the wide dtype.
    wide_value = value.astype(weights.dtype)
    run = functools.partial(_attend_in_slices, levels=levels, workspace_bytes=workspace_bytes)
    return jax.checkpoint(run)(wide_value, locations, weights).astype(value.dtype)


def attend_backward(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    dy: jax.Array,
    *,
    levels: Levels,
    workspace_bytes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of value, locations and weights, all of the dtype of weights.

    At integer positions, where bilinear interpolation has a kink, the derivative with respect to
    the location is the right-sided one.
    """
    args = value.astype(weights.dtype), locations, weights
    run = functools.partial(_attend_in_slices, levels=levels, workspace_bytes=workspace_bytes)
    return jax.vjp(run, *args)[1](dy.astype(weights.dtype))


def _attend_in_slices(value, locations, weights, levels: Levels, workspace_bytes: int) -> jax.Array:
    value, locations, weights = match_varying((value, locations, weights))
    n, queries = locations.shape[:2]
    size = _queries_per_slice(value, locations, workspace_bytes)
    count = math.ceil(queries / size)
    if count <= 1:
        return _attend_slice(value, locations, weights, levels)
    size = math.ceil(queries / count)

    def split(a):  # [N, Q, ...] -> [count, N, size, ...]
        padding = ((0, 0), (0, count * size - queries), *((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(jnp.pad(a, padding).reshape(n, count, size, *a.shape[2:]), 1, 0)

    run = jax.checkpoint(functools.partial(_attend_slice, levels=levels))
    slices = split(locations), split(weights)
    _, y = lax.scan(lambda carry, arrays: (carry, run(value, *arrays)), None, slices)
    return jnp.moveaxis(y, 0, 1).reshape(n, count * size, *value.shape[2:])[:, :queries]


def _queries_per_slice(value: jax.Array, locations: jax.Array, workspace_bytes: int) -> int:
    samples = math.prod(locations.shape[:1] + locations.shape[2:5]) * value.shape[-1]
    most = workspace_bytes // max(samples * SAMPLE_COPIES * locations.dtype.itemsize, 1)
    return max(1, min(most, locations.shape[1]))


def _attend_slice(value: jax.Array, locations: jax.Array, weights: jax.Array, levels: Levels):
    n, queries, heads = locations.shape[:3]
    points = math.prod(locations.shape[3:5])
    x, y, inside = _positions(locations, levels)  # [N, Q, M, L, P]
    x0, y0 = jnp.floor(x), jnp.floor(y)
    weights = jnp.where(inside, weights, 0)
    total = jnp.zeros((), weights.dtype)
    for corner in np.ndindex(2, 2):
        index, valid = _corner_index(y0, x0, corner, levels)
        valid &= inside
        factor = weights * _weight(y - y0, corner[0]) * _weight(x - x0, corner[1])
        index, valid, factor = (
            jnp.moveaxis(a.reshape(n, queries, heads, points), 3, 2) for a in (index, valid, factor)
        )  # [N, Q, L * P, M]
        index = index.reshape(n, queries * points, heads, 1)
        pixel = jnp.take_along_axis(value, index, axis=1, mode="promise_in_bounds")
        pixel = pixel.reshape(n, queries, points, *value.shape[2:])
        # `where` and not a product with zero: the pixel read for a corner out of range may be
        # infinite.
        pixel = jnp.where(valid[..., None], pixel, 0)
        total += jnp.sum(factor[..., None] * pixel, 2)
    return total


def _positions(locations: jax.Array, levels: Levels) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the positions x, y in pixels, and whether they touch the level.

    All three are [N, Q, M, L, P]. Samples outside, or at NaN, are moved to (0, 0); their locations
    get no gradient.
    """
    height, width = _sizes(levels, locations.dtype)
    x, y = locations[..., 0], locations[..., 1]
    if levels.normalized:
        x, y = x * width - 0.5, y * height - 0.5
    inside = (y > -1) & (y < height) & (x > -1) & (x < width)  # False for NaN
    return jnp.where(inside, x, 0), jnp.where(inside, y, 0), inside


def _sizes(levels: Levels, dtype) -> list[jax.Array]:
    """Return heights and widths, each [1, 1, 1, L, 1]."""
    heights, widths = zip(*levels.shapes, strict=True)
    return [_per_level(heights, dtype), _per_level(widths, dtype)]


def _per_level(numbers, dtype) -> jax.Array:
    # Not a constant array, because jax.experimental.custom_partitioning does not support them.
    return jnp.stack([jnp.full((), number, dtype) for number in numbers]).reshape(1, 1, 1, -1, 1)


def _corner_index(y0, x0, corner, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """Return the index of a corner's pixel in `value`, and whether that pixel exists."""
    height, width = _sizes(levels, jnp.int32)
    ends = itertools.accumulate(h * w for h, w in levels.shapes)
    start = _per_level([0, *ends][:-1], jnp.int32)
    y, x = (at.astype(jnp.int32) + step for at, step in zip((y0, x0), corner, strict=True))
    valid = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return jnp.where(valid, start + y * width + x, 0), valid


def _weight(fraction: jax.Array, corner: int) -> jax.Array:
    return fraction if corner else 1 - fraction
