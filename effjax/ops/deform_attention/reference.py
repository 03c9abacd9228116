"""Deformable attention in plain XLA, some queries at a time; open to every derivative.

The custom calls in `custom_call.py` compute the same; here is what they mean.
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
    """How the pixels of a value lie, one level after the other, and what locations mean."""

    shapes: tuple[tuple[int, int], ...]  # (H, W) of each level
    normalized: bool  # locations are shares of a level's size; else pixels, whole at their centers

    @property
    def pixels(self) -> int:
        return sum(h * w for h, w in self.shapes)


# How often the samples of a slice lie in memory at once, in either pass; as measured.
SAMPLE_COPIES = 4


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
    # Nothing is rounded to value's dtype in between: its gradient would be rounded in each slice.
    wide = value.astype(weights.dtype)
    run = functools.partial(_in_slices, levels=levels, workspace_bytes=workspace_bytes)
    return jax.checkpoint(run)(wide, locations, weights).astype(value.dtype)


def attend_backward(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    dy: jax.Array,
    *,
    levels: Levels,
    workspace_bytes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of value, locations and weights, all of the dtype of weights.

    At a whole pixel the derivative by a location is the one to the right, as the formula with
    `floor` has it.
    """
    args = value.astype(weights.dtype), locations, weights
    run = functools.partial(_in_slices, levels=levels, workspace_bytes=workspace_bytes)
    return jax.vjp(run, *args)[1](dy.astype(weights.dtype))


def _in_slices(value, locations, weights, levels: Levels, workspace_bytes: int) -> jax.Array:
    """`attend` of a value that is of the dtype of weights."""
    value, locations, weights = match_varying((value, locations, weights))
    n, queries = locations.shape[:2]
    size = queries_of_slice(value, locations, workspace_bytes)
    count = math.ceil(queries / size)
    if count <= 1:
        return _attend(value, locations, weights, levels)
    size = math.ceil(queries / count)

    def slices(a):  # [N, Q, ...] -> [count, N, size, ...]
        more = ((0, 0), (0, count * size - queries), *((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(jnp.pad(a, more).reshape(n, count, size, *a.shape[2:]), 1, 0)

    one = jax.checkpoint(functools.partial(_attend, levels=levels))
    parts = slices(locations), slices(weights)
    _, y = lax.scan(lambda carry, at: (carry, one(value, *at)), None, parts)
    return jnp.moveaxis(y, 0, 1).reshape(n, count * size, *value.shape[2:])[:, :queries]


def queries_of_slice(value: jax.Array, locations: jax.Array, workspace_bytes: int) -> int:
    """How many queries have their samples in a workspace, one at least."""
    one = math.prod(locations.shape[:1] + locations.shape[2:5]) * value.shape[-1]
    most = workspace_bytes // max(one * SAMPLE_COPIES * locations.dtype.itemsize, 1)
    return max(1, min(most, locations.shape[1]))


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


def positions(locations: jax.Array, levels: Levels) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where a level is sampled, (x, y) in pixels, and whether that touches it: [N, Q, M, L, P].

    A sample outside, or at a position that is no number, is moved to (0, 0); the choice passes no
    gradient to its location.
    """
    height, width = _sizes(levels, locations.dtype)
    x, y = locations[..., 0], locations[..., 1]
    if levels.normalized:
        x, y = x * width - 0.5, y * height - 0.5
    inside = (y > -1) & (y < height) & (x > -1) & (x < width)  # no for NaN
    return jnp.where(inside, x, 0), jnp.where(inside, y, 0), inside


def _sizes(levels: Levels, dtype) -> list[jax.Array]:
    """Heights and widths, each [1, 1, 1, L, 1]."""
    heights, widths = zip(*levels.shapes, strict=True)
    return [_of_levels(heights, dtype), _of_levels(widths, dtype)]


def _of_levels(numbers, dtype) -> jax.Array:
    # Not a constant array, which jax.experimental.custom_partitioning does not take.
    return jnp.stack([jnp.full((), number, dtype) for number in numbers]).reshape(1, 1, 1, -1, 1)


def _corner_index(y0, x0, corner, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """The index of a corner's pixel in all levels, and whether there is such a pixel."""
    height, width = _sizes(levels, jnp.int32)
    ends = itertools.accumulate(h * w for h, w in levels.shapes)
    start = _of_levels([0, *ends][:-1], jnp.int32)
    y, x = (at.astype(jnp.int32) + step for at, step in zip((y0, x0), corner, strict=True))
    valid = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return jnp.where(valid, start + y * width + x, 0), valid


def _share(fraction: jax.Array, corner: int) -> jax.Array:
    return fraction if corner else 1 - fraction
