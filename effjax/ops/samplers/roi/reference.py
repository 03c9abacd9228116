"""Averages of samples over the bins of boxes, and their gradients, in plain XLA.

This is the definition of the two functions that the custom calls in `native.py` compute. They
get bins instead of boxes: each bin has the position of its first sample, and all bins of a box
share the step between samples and the number of samples along each axis (`bins.py`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._common.platform import array_bytes, traced_platform
from ..._common.sharding import match_varying, zeros
from ..chunks import join, split

# A TPU stores the pixels of one sample of each bin, several times. These chunks, of padded bytes,
# stay in the memory on the chip (as planned, not measured). Other platforms fuse the samples.
TPU_CHUNK_BYTES = 64 * 2**20
SAMPLE_COPIES = 6


class Pooling(NamedTuple):
    """Static configuration of a pooling."""

    output_size: tuple[int, int]
    parts: int  # channels are parts**2 blocks; a bin reads the block that belongs to its position
    margin: float  # samples up to this distance outside of the outermost pixels count
    average_inside_only: bool  # divide by the samples that count, not by all; needs samples > 0
    samples: int  # along each axis; 0: given by `count`
    has_position_gradients: bool  # of the positions of bins


def pool(
    x: jax.Array,
    first: jax.Array,
    step: jax.Array,
    count: jax.Array,
    initial: jax.Array,
    pooling: Pooling,
) -> jax.Array:
    """Average the samples of each bin, interpolated bilinearly.

    Args:
        x: [N, H, W, parts**2 * C].
        first: [N, R, P, G, 2], (y, x) of the first sample, for P bins and G groups of channels; at
            least float32. The average of a bin is zero if its position is not finite.
        step: [N, R, 2], of the same dtype: sample i is at ``first + i * step``.
        count: [N, R, 2], numbers of samples; integral values of first's dtype.
        initial: [N, R, P, C] of x's dtype, to which the averages are added; or [N, R, P, 0].
        pooling: static configuration.

    Returns:
        [N, R, P, C] of x's dtype.
    """
    run = functools.partial(_pool_chunk, pooling=pooling)
    arrays, boxes = (first, step, count, initial), first.shape[1]
    size = _boxes_per_chunk(x, first, pooling)
    if boxes <= size:
        return run(x, *arrays)
    x, *arrays = match_varying((x, *arrays))
    run = jax.checkpoint(run)
    # The boxes of the padding have no samples.
    chunks = [split(a, size) for a in arrays]
    _, y = lax.scan(lambda carry, chunks: (carry, run(x, *chunks)), None, chunks)
    return join(y)[:, :boxes]


def _pool_chunk(x, first, step, count, initial, pooling: Pooling) -> jax.Array:
    n, boxes, bins, groups, _ = first.shape
    size, pixels = x.shape[1:3], _pixels(x, groups, pooling)

    def body(corners, value):
        for index, weight, _, touched in corners:
            pixel = _gather(pixels, _pixel_indices(index, pooling), value.dtype)
            # Excluded pixels may be infinite, and 0 * inf is NaN. A finite pixel with weight 0 is
            # included, because autodiff needs it for the derivative of the weight.
            is_excluded = ~touched | ((weight == 0) & ~jnp.isfinite(pixel).all(-1))
            value += weight[..., None] * jnp.where(is_excluded[..., None], 0, pixel)
        return value

    value = zeros((n, boxes, bins, groups, pixels.shape[-1]), first.dtype, first)
    x, first, initial, value = match_varying((x, first, initial, value))
    value = _over_samples(body, value, size, first, step, count, pooling)
    value /= _divisor(first, step, count, size, pooling)[..., None]
    value = value.reshape(n, boxes, bins, groups * pixels.shape[-1])
    value = value + initial.astype(value.dtype) if initial.shape == value.shape else value
    return value.astype(x.dtype)


def pool_backward(
    x: jax.Array,
    first: jax.Array,
    step: jax.Array,
    count: jax.Array,
    dy: jax.Array,
    pooling: Pooling,
) -> tuple[jax.Array, jax.Array]:
    """Return dx like x and dfirst like first, both of first's dtype.

    Without `has_position_gradients`, dfirst has size 0.
    The derivative with respect to a position is zero for samples outside and for samples that are
    clamped to the outermost pixels. At integer positions it is the right-sided one.
    """
    arrays, boxes = (first, step, count, dy), first.shape[1]
    size = _boxes_per_chunk(x, first, pooling)
    if boxes <= size:
        dpixels, dfirst = _add_chunk_gradients(None, x, *arrays, pooling=pooling)
        return dpixels.reshape(x.shape), dfirst
    x, *arrays = match_varying((x, *arrays))
    dpixels = zeros(_pixels(x, first.shape[3], pooling).shape, first.dtype, x)

    def run(dpixels, chunks):
        return _add_chunk_gradients(dpixels, x, *chunks, pooling=pooling)

    dpixels, dfirst = lax.scan(run, dpixels, [split(a, size) for a in arrays])
    return dpixels.reshape(x.shape), join(dfirst)[:, :boxes]


def _add_chunk_gradients(dpixels, x, first, step, count, dy, pooling: Pooling) -> tuple:
    """Add the gradient of these boxes to dpixels (None: to zeros); return it and dfirst."""
    size, pixels = x.shape[1:3], _pixels(x, first.shape[3], pooling)
    dvalue = dy.astype(first.dtype).reshape(*first.shape[:4], pixels.shape[-1])
    dvalue /= _divisor(first, step, count, size, pooling)[..., None]

    def body(corners, carry):
        dpixels, dfirst = carry
        for index, weight, slopes, touched in corners:
            indices = _pixel_indices(index, pooling)
            dpixel = jnp.where((touched & (weight != 0))[..., None], weight[..., None] * dvalue, 0)
            dpixels = _add_at(dpixels, indices, dpixel)
            if pooling.has_position_gradients:
                pixel = _gather(pixels, indices, dvalue.dtype)
                dot = jnp.sum(dvalue * jnp.where(touched[..., None], pixel, 0), -1)
                dfirst += jnp.where(slopes != 0, slopes * dot[..., None], 0)
        return dpixels, dfirst

    if dpixels is None:
        dpixels = zeros(pixels.shape, first.dtype, first)
    coordinates = 2 if pooling.has_position_gradients else 0
    dfirst = zeros((*first.shape[:4], coordinates), first.dtype, first)
    *_, dpixels, dfirst = match_varying((x, first, dy, dpixels, dfirst))
    return _over_samples(body, (dpixels, dfirst), size, first, step, count, pooling)


def _boxes_per_chunk(x: jax.Array, first: jax.Array, pooling: Pooling) -> int:
    """Return the number of boxes of a chunk: all, except on a TPU, which stores the samples."""
    n, boxes, bins, groups, _ = first.shape
    if traced_platform() != "tpu":
        return boxes
    pixels = n * boxes * bins * groups, x.shape[-1] // (pooling.parts**2 * groups)
    most = boxes * TPU_CHUNK_BYTES // max(SAMPLE_COPIES * array_bytes(pixels, first.dtype), 1)
    return math.ceil(boxes / math.ceil(boxes / max(1, most))) if boxes else 0


def _over_samples(
    body: Callable, carry: Any, size: tuple[int, ...], first, step, count, pooling: Pooling
) -> Any:
    """Run ``carry = body(corners, carry)`` for all samples that may be inside the image."""
    # The corners are those of one sample of every bin. `checkpoint` recomputes them.
    start, num_iterations = _range(first, step, count, size, pooling)

    @jax.checkpoint
    def run_sample(i, j, carry):
        y, x = (
            _axis(
                first[..., a], step[..., a], count[..., a],
                start[a] + jnp.asarray(k).astype(first.dtype), size[a], pooling,
            )
            for a, k in enumerate((i, j))
        )  # fmt: skip
        return body(list(_corners(y, x, size[1])), carry)

    def row(i, carry):
        return lax.fori_loop(0, num_iterations[1], lambda j, carry: run_sample(i, j, carry), carry)

    return lax.fori_loop(0, num_iterations[0], row, carry)


def _range(first, step, count, size, pooling: Pooling) -> tuple[list, list]:
    """Return each bin's first sample that may count, and the number of iterations, by axis."""
    # Only a few samples of a large box are inside the image.
    if pooling.samples:
        return [jnp.zeros((), first.dtype)] * 2, [pooling.samples] * 2
    starts, num_iterations = [], []
    for a in range(2):
        position, distance = first[..., a], _broadcast_to_bins(step[..., a])
        n = _broadcast_to_bins(count[..., a])
        distance = jnp.where(distance > 0, distance, 1)
        # One more on either side, because sums are rounded.
        start = jnp.ceil((-pooling.margin - position) / distance) - 1
        stop = jnp.floor((size[a] - 1 + pooling.margin - position) / distance) + 2
        valid = jnp.isfinite(position) & (n > 0)
        start = jnp.where(valid, jnp.clip(start, 0, n), 0)
        stop = jnp.where(valid, jnp.clip(stop, start, n), 0)
        starts.append(start)
        num_iterations.append(jnp.max(stop - start, initial=0).astype(jnp.int32))
    return starts, num_iterations


def _axis(first, step, count, i, size: int, pooling: Pooling) -> tuple:
    """Return the two pixels of a sample along one axis, and its distance from the first one.

    Also return whether that distance changes with the position, and whether the sample counts.
    """
    position = first + i * _broadcast_to_bins(step)
    counts = _counts(position, i, count, size, pooling)
    within = counts & (position >= 0) & (position < size - 1)
    border = jnp.where(counts & (position > 0), float(size - 1), 0.0).astype(position.dtype)
    position = jnp.where(within, position, border)
    low = jnp.floor(position)
    pixel = low.astype(jnp.int32)
    return pixel, jnp.minimum(pixel + 1, size - 1), position - low, within, counts


def _counts(position, i, count, size: int, pooling: Pooling) -> jax.Array:
    """Return True where sample i of a bin counts, given its position; False for NaN."""
    inside = (position >= -pooling.margin) & (position <= size - 1 + pooling.margin)
    return inside & (i < _broadcast_to_bins(count))


def _corners(y: tuple, x: tuple, width: int):
    """Yield the index, weight, slopes and validity of each of four pixels, all [N, R, P, G]."""
    # The slopes are the derivatives of the weight with respect to y and x.
    touched = y[4] & x[4]
    for lower, right in np.ndindex(2, 2):
        weights, slopes = [], []
        for (_, _, fraction, within, _), far in ((y, lower), (x, right)):
            weights.append(fraction if far else 1 - fraction)
            slopes.append(within.astype(fraction.dtype) * (1 if far else -1))
        index = (y[1] if lower else y[0]) * width + (x[1] if right else x[0])
        slope = jnp.stack([slopes[0] * weights[1], slopes[1] * weights[0]], -1)
        yield index, weights[0] * weights[1], jnp.where(touched[..., None], slope, 0), touched


def _divisor(first, step, count, size, pooling: Pooling) -> jax.Array:
    """Return the number of averaged samples, at least one: [N, R, P, G] or [N, R, 1, 1]."""
    if not pooling.average_inside_only:
        rows, columns = (_broadcast_to_bins(count[..., a]) for a in range(2))
        return jnp.maximum(rows * columns, 1)
    counted = jnp.ones((), first.dtype)
    for a in range(2):
        inside = jnp.zeros(first.shape[:4], first.dtype)
        for i in range(pooling.samples):
            position = first[..., a] + i * _broadcast_to_bins(step[..., a])
            inside += _counts(position, i, count[..., a], size[a], pooling).astype(first.dtype)
        counted *= inside
    return jnp.maximum(counted, 1)


def _broadcast_to_bins(a: jax.Array) -> jax.Array:
    # [N, R] -> [N, R, 1, 1]
    return a[..., None, None]


def _pixels(x: jax.Array, groups: int, pooling: Pooling) -> jax.Array:
    """Return x as [N, H * W * blocks * G, C / G], for C channels in a block."""
    n, h, w, channels = x.shape
    parts = pooling.parts**2 * groups
    return x.reshape(n, h * w * parts, channels // parts)


def _pixel_indices(index: jax.Array, pooling: Pooling) -> jax.Array:
    """Return the index into `_pixels` of each bin and group, for `index` [N, R, P, G]."""
    bins, groups = index.shape[2:]
    (rows, columns), parts = pooling.output_size, pooling.parts
    # Not NumPy constants, because jax.experimental.custom_partitioning does not support them.
    p, g = (jnp.arange(size, dtype=jnp.int32) for size in (bins, groups))
    block = p // columns * parts // rows * parts + p % columns * parts // columns
    return (index * parts**2 + block[None, None, :, None]) * groups + g[None, None, None]


def _gather(pixels: jax.Array, indices: jax.Array, dtype: Any) -> jax.Array:
    # [N, R, P, G, C / G]
    flat = indices.reshape(indices.shape[0], math.prod(indices.shape[1:]), 1)
    values = jnp.take_along_axis(pixels, flat, axis=1, mode="promise_in_bounds")
    return values.reshape(*indices.shape, pixels.shape[-1]).astype(dtype)


def _add_at(pixels: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    count = math.prod(indices.shape[1:])

    def add(pixels, indices, updates):
        return pixels.at[indices].add(updates, mode="promise_in_bounds")

    indices = indices.reshape(indices.shape[0], count)
    return jax.vmap(add)(pixels, indices, updates.reshape(*indices.shape, pixels.shape[-1]))
