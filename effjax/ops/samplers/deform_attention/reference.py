"""Deformable attention in plain XLA, in chunks of queries and with all derivatives.

This is the definition of the two functions that the custom calls in `native.py` compute.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._common.platform import array_bytes, known_sizes, traced_platform
from ..._common.sharding import match_varying, zeros
from ..chunks import join, split


class Levels(NamedTuple):
    """Layout of the pixels of `value`, level by level, and the unit of locations."""

    shapes: tuple[tuple[int, int], ...]  # (H, W) of each level
    normalized: bool  # locations are fractions of a level's size; else pixels, integer at centers


# Simultaneous copies of a chunk's samples in memory, in either pass, as measured.
SAMPLE_COPIES = 4
TPU_QUERIES = 128  # of a chunk that is split again


def attend(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    *,
    levels: Levels,
    chunk_bytes: int,
) -> jax.Array:
    """Sum the weighted samples of each query, in chunks that are recomputed for each derivative.

    Args:
        value: [N, S, M, D].
        locations: [N, Q, M, L, P, 2], (x, y); at least float32.
        weights: [N, Q, M, L, P], of the dtype of locations.
        levels: layout of value.
        chunk_bytes: upper limit for the samples of a chunk.

    Returns:
        [N, Q, M, D] of value's dtype.
    """
    # Widened outside of the chunks, so that the gradient is summed over them in the wide dtype.
    wide_value = value.astype(weights.dtype)

    @jax.checkpoint
    def run(value, locations, weights):
        rows, locations, weights = match_varying((_pack_heads(value), locations, weights))
        y = _attend_rows(rows, locations, weights, levels, chunk_bytes)
        return y.reshape(*locations.shape[:3], value.shape[3])

    return run(wide_value, locations, weights).astype(value.dtype)


def attend_backward(
    value: jax.Array,
    locations: jax.Array,
    weights: jax.Array,
    dy: jax.Array,
    *,
    levels: Levels,
    chunk_bytes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of value, locations and weights, all of the dtype of weights."""
    # At integer positions, where bilinear interpolation has a kink, the derivative with respect to
    # the location is the right-sided one.
    dtype = weights.dtype
    rows, dy = _pack_heads(value.astype(dtype)), _pack_heads(dy.astype(dtype))
    rows, *arrays = match_varying((rows, locations, weights, dy))
    n, pixels, heads, depth = rows.shape
    # Pixels and heads are one axis, so that a TPU scatters into the carry without copying it.
    dvalue = zeros((n, pixels * heads, depth), dtype, rows)
    dvalue, *gradients = _add_gradients(
        dvalue, rows, *arrays, levels=levels, chunk_bytes=chunk_bytes
    )
    return dvalue.reshape(value.shape), *gradients


def _attend_rows(rows, locations, weights, levels: Levels, chunk_bytes: int) -> jax.Array:
    """Return y [N, Q, M / k, k * D], in chunks of queries."""
    queries, size = locations.shape[1], _queries_per_chunk(rows, locations, chunk_bytes)
    if queries <= size:
        return _attend_chunk(rows, locations, weights, levels)
    run = functools.partial(_attend_rows, levels=levels, chunk_bytes=chunk_bytes)
    run = jax.checkpoint(run)
    chunks = split(locations, size), split(weights, size)
    _, y = lax.scan(lambda carry, arrays: (carry, run(rows, *arrays)), None, chunks)
    return join(y)[:, :queries]


def _add_gradients(dvalue, rows, locations, weights, dy, levels: Levels, chunk_bytes: int) -> tuple:
    """Add the gradient of rows to dvalue, chunk by chunk; return it, dlocations and dweights."""
    queries, size = locations.shape[1], _queries_per_chunk(rows, locations, chunk_bytes)
    if queries <= size:
        return _add_chunk_gradients(dvalue, rows, locations, weights, dy, levels)

    # In the loop, the axes after Q are one axis, which a TPU pads less.
    arrays = locations, weights, dy
    shapes = [(a.shape[0], size, *a.shape[2:]) for a in arrays]

    def run(dvalue, chunks):
        chunks = (a.reshape(shape) for a, shape in zip(chunks, shapes, strict=True))
        dvalue, *gradients = _add_gradients(
            dvalue, rows, *chunks, levels=levels, chunk_bytes=chunk_bytes
        )
        return dvalue, [_flatten(d) for d in gradients]

    dvalue, gradients = lax.scan(run, dvalue, [split(_flatten(a), size) for a in arrays])
    dlocations, dweights = (join(d)[:, :queries] for d in gradients)
    return dvalue, dlocations.reshape(locations.shape), dweights.reshape(weights.shape)


def _flatten(a: jax.Array) -> jax.Array:
    return a.reshape(*a.shape[:2], math.prod(a.shape[2:]))


def _pack_heads(a: jax.Array) -> jax.Array:
    """Reshape [N, S, M, D] to [N, S, M / k, k * D] with k heads in a row."""
    # A TPU pads rows to 128 numbers. It reads whole rows, and the lanes of other heads are masked.
    n, pixels, heads, depth = a.shape
    count = 1
    if traced_platform() == "tpu":
        fits = lambda k: heads % k == 0 and k * depth <= 128  # noqa: E731
        count = max(filter(fits, range(1, heads + 1)), default=1)
    return a.reshape(n, pixels, heads // count, count * depth)


def _queries_per_chunk(rows: jax.Array, locations: jax.Array, chunk_bytes: int) -> int:
    """Return the number of queries of a chunk; chunks are of equal size, and as few as fit."""
    # On a TPU, queries are the last axis of locations and weights in memory, which is padded to
    # 128. Chunks of many queries are therefore split again.
    queries = locations.shape[1]
    samples = math.prod(known_sizes(*locations.shape[:5])), rows.shape[-1]
    total = max(SAMPLE_COPIES * array_bytes(samples, locations.dtype), 1)
    most = max(1, min(queries * chunk_bytes // total, queries))
    multiple = 1
    if traced_platform() == "tpu" and most < queries and queries > TPU_QUERIES:
        most, multiple = max(most, TPU_QUERIES), 128
    size = math.ceil(queries / max(math.ceil(queries / most), 1))
    return math.ceil(size / multiple) * multiple


def _attend_chunk(rows, locations, weights, levels: Levels) -> jax.Array:
    """Return y of these queries, [N, Q, M / k, k * D]."""
    x, y, inside = _positions(locations, levels)  # [N, Q, M, L, P]
    x0, y0 = jnp.floor(x), jnp.floor(y)
    weights = jnp.where(inside, weights, 0)
    heads, total = weights.shape[2], jnp.zeros((), weights.dtype)
    for corner in np.ndindex(2, 2):
        index, valid = _corner_index(y0, x0, corner, levels)
        valid &= inside
        factor = weights * _weight(y - y0, corner[0]) * _weight(x - x0, corner[1])
        index, valid, factor = (_as_points(a, rows) for a in (index, valid, factor))
        pixel = _read(rows, index, valid, heads)
        total += jnp.sum(factor[..., None] * pixel, 2)
    return total


def corners(locations: jax.Array, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """Return the pixels around each sample and whether they count, [N, Q, M, L, P, 4]."""
    x, y, inside = _positions(locations, levels)
    x0, y0 = jnp.floor(x), jnp.floor(y)
    pairs = [_corner_index(y0, x0, corner, levels) for corner in np.ndindex(2, 2)]
    index, valid = (jnp.stack(arrays, -1) for arrays in zip(*pairs, strict=True))
    return index, valid & inside[..., None]


def _add_chunk_gradients(dvalue, rows, locations, weights, dy, levels: Levels) -> tuple:
    """Add these queries to dvalue [N, S * M / k, k * D]; return it, dlocations and dweights."""
    dy = dy[:, :, None]  # [N, Q, 1, M / k, k * D]
    heads, dots = weights.shape[2], {}  # dot products with each corner's pixel, [N, Q, M, L, P]
    for corner in np.ndindex(2, 2):
        inside, x0, y0, fx, fy, factors = _split_positions(locations, weights, levels)
        index, valid = _corner_index(y0, x0, corner, levels)
        valid &= inside
        factor = factors * _weight(fy, corner[0]) * _weight(fx, corner[1])
        index, valid, factor = (_as_points(a, rows) for a in (index, valid, factor))
        dot = jnp.sum(dy * _read(rows, index, valid, heads), -1)
        dots[corner] = jnp.moveaxis(dot, 2, 3).reshape(weights.shape)
        dpixel = jnp.where(_mask_heads(valid, rows, heads), factor[..., None] * dy, 0)
        dvalue = _add_at(dvalue, index, dpixel)
        if traced_platform() == "tpu":
            # One corner after the other: the samples of all do not fit into the memory on the chip.
            after = dvalue, dots[corner], locations
            dvalue, dots[corner], locations = lax.optimization_barrier(after)
    inside, _, _, fx, fy, factors = _split_positions(locations, weights, levels)
    dx = factors * ((1 - fy) * (dots[0, 1] - dots[0, 0]) + fy * (dots[1, 1] - dots[1, 0]))
    dy_at = factors * ((1 - fx) * (dots[1, 0] - dots[0, 0]) + fx * (dots[1, 1] - dots[0, 1]))
    if levels.normalized:
        height, width = _sizes(levels, locations.dtype)
        dx, dy_at = dx * width, dy_at * height
    dlocations = jnp.where(inside[..., None], jnp.stack([dx, dy_at], -1), 0)
    dweights = sum(_weight(fy, i) * _weight(fx, j) * dot for (i, j), dot in dots.items())
    return dvalue, dlocations, jnp.where(inside, dweights, 0)


def _split_positions(locations, weights, levels: Levels) -> tuple:
    """Return which samples count, their first pixels, their distances from them, and weights."""
    x, y, inside = _positions(locations, levels)
    x0, y0 = jnp.floor(x), jnp.floor(y)
    return inside, x0, y0, x - x0, y - y0, jnp.where(inside, weights, 0)


def _as_points(a: jax.Array, rows: jax.Array) -> jax.Array:
    # [N, Q, M, L, P] -> [N, Q, k * L * P, M / k]: the heads of a row are points of that row.
    n, queries, heads = *a.shape[:2], rows.shape[2]
    return jnp.moveaxis(a.reshape(n, queries, heads, math.prod(a.shape[2:]) // heads), 3, 2)


def _mask_heads(valid: jax.Array, rows: jax.Array, heads: int) -> jax.Array:
    """Return the lanes that each point reads, [N, Q, k * L * P, M / k, 1 or k * D]."""
    count = heads // rows.shape[2]
    if count == 1:
        return valid[..., None]
    head_of_point, head_of_lane = (
        jnp.arange(size, dtype=jnp.int32) // (size // count)
        for size in (valid.shape[2], rows.shape[3])
    )
    return valid[..., None] & (head_of_point[:, None, None] == head_of_lane)


def _read(rows: jax.Array, index: jax.Array, valid: jax.Array, heads: int) -> jax.Array:
    """Return the rows at index [N, Q, k * L * P, M / k]; zero where not valid, and other heads."""
    n, queries, points, _ = index.shape
    index = index.reshape(n, queries * points, rows.shape[2], 1)
    pixel = jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")
    pixel = pixel.reshape(n, queries, points, *rows.shape[2:])
    # `where` and not a product with zero: the pixel read for a corner out of range may be infinite.
    return jnp.where(_mask_heads(valid, rows, heads), pixel, 0)


def _add_at(dvalue: jax.Array, index: jax.Array, updates: jax.Array) -> jax.Array:
    """Add updates [N, Q, P, M, D] to dvalue [N, S * M, D] at index [N, Q, P, M]."""
    n, *points, heads = index.shape
    index = index * heads + lax.broadcasted_iota(index.dtype, index.shape, 3)
    count = math.prod(points) * heads

    def add(dvalue, index, updates):
        return dvalue.at[index].add(updates, mode="promise_in_bounds")

    return jax.vmap(add)(
        dvalue, index.reshape(n, count), updates.reshape(n, count, dvalue.shape[-1])
    )


def _positions(locations: jax.Array, levels: Levels) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the positions x, y in pixels and whether they touch the level, [N, Q, M, L, P]."""
    # Samples outside, or at NaN, are moved to (0, 0); their locations get no gradient.
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
