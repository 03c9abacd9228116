"""Averages of samples over the bins of boxes, and their gradients, in plain XLA.

This is the definition of the two functions that the custom calls in `pooling.py` compute. They
get bins instead of boxes: each bin has the position of its first sample, and all bins of a box
share the step between samples and the number of samples along each axis (`bins.py`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common.sharding import match_varying, zeros


class Pooling(NamedTuple):
    """Static configuration of a pooling."""

    output_size: tuple[int, int]
    parts: int  # the channels of x are parts**2 blocks; each bin reads one of them
    margin: float  # samples up to this distance outside of the outermost pixels count
    of_inside: bool  # average the samples that count, instead of all
    samples: int  # along each axis; 0: given by `count`
    moves: bool  # the positions of bins have gradients


def pool(
    x: jax.Array,
    first: jax.Array,
    step: jax.Array,
    count: jax.Array,
    so_far: jax.Array,
    pooling: Pooling,
) -> jax.Array:
    """Average the samples of each bin, interpolated bilinearly.

    Args:
        x: [N, H, W, parts**2 * C].
        first: [N, R, P, G, 2], (y, x) of the first sample, for P bins and G groups of channels; at
            least float32. A bin is zero if its position is not finite.
        step: [N, R, 2], of the same dtype: sample i is at ``first + i * step``.
        count: [N, R, 2], number of samples, an integer of the same dtype.
        so_far: [N, R, P, C] of x's dtype, to which the averages are added; or [N, R, P, 0].
        pooling: static configuration.

    Returns:
        [N, R, P, C] of x's dtype.
    """
    n, boxes, bins, groups, _ = first.shape
    size, pixels = x.shape[1:3], _pixels(x, groups, pooling)

    def body(corners, value):
        for index, weight, _, touched in corners:
            pixel = _gather(pixels, _places(index, pooling), value.dtype)
            # `where` and not a product with zero: an untouched pixel may be infinite.
            unseen = ~touched | ((weight == 0) & ~jnp.isfinite(pixel).all(-1))
            value += weight[..., None] * jnp.where(unseen[..., None], 0, pixel)
        return value

    value = zeros((n, boxes, bins, groups, pixels.shape[-1]), first.dtype, first)
    x, first, so_far, value = match_varying((x, first, so_far, value))
    value = _over_samples(body, value, size, first, step, count, pooling)
    value /= _divisor(first, step, count, size, pooling)[..., None]
    value = value.reshape(n, boxes, bins, groups * pixels.shape[-1])
    value = value + so_far.astype(value.dtype) if so_far.shape == value.shape else value
    return value.astype(x.dtype)


def pool_backward(
    x: jax.Array,
    first: jax.Array,
    step: jax.Array,
    count: jax.Array,
    dy: jax.Array,
    pooling: Pooling,
) -> tuple[jax.Array, jax.Array]:
    """Return dx like x, and dfirst like first (of size 0 if no bin moves), of first's dtype.

    The derivative with respect to a position is zero for samples outside and for samples that are
    clamped to the outermost pixels. At integer positions it is the right-sided one.
    """
    size, pixels = x.shape[1:3], _pixels(x, first.shape[3], pooling)
    dvalue = dy.astype(first.dtype).reshape(*first.shape[:4], pixels.shape[-1])
    dvalue /= _divisor(first, step, count, size, pooling)[..., None]

    def body(corners, carry):
        dpixels, dfirst = carry
        for index, weight, slopes, touched in corners:
            places = _places(index, pooling)
            dpixel = jnp.where((touched & (weight != 0))[..., None], weight[..., None] * dvalue, 0)
            dpixels = _add_at(dpixels, places, dpixel)
            if pooling.moves:
                pixel = _gather(pixels, places, dvalue.dtype)
                dot = jnp.sum(dvalue * jnp.where(touched[..., None], pixel, 0), -1)
                dfirst += jnp.where(slopes != 0, slopes * dot[..., None], 0)
        return dpixels, dfirst

    wide = zeros(pixels.shape, first.dtype, first)
    dfirst = zeros((*first.shape[:4], 2 if pooling.moves else 0), first.dtype, first)
    *_, wide, dfirst = match_varying((x, first, dy, wide, dfirst))
    wide, dfirst = _over_samples(body, (wide, dfirst), size, first, step, count, pooling)
    return wide.reshape(x.shape), dfirst


def _over_samples(
    body: Callable, carry: Any, size: tuple[int, ...], first, step, count, pooling: Pooling
) -> Any:
    """Run ``carry = body(corners of sample (i, j) of all bins, carry)`` for all samples.

    Each iteration computes one sample of every bin. `checkpoint` recomputes them for derivatives.
    """
    start, turns = _range(first, step, count, size, pooling)

    @jax.checkpoint
    def turn(i, j, carry):
        y, x = (
            _axis(
                first[..., a], step[..., a], count[..., a],
                start[a] + jnp.asarray(k).astype(first.dtype), size[a], pooling,
            )
            for a, k in enumerate((i, j))
        )  # fmt: skip
        return body(list(_corners(y, x, size[1])), carry)

    def row(i, carry):
        return lax.fori_loop(0, turns[1], lambda j, carry: turn(i, j, carry), carry)

    return lax.fori_loop(0, turns[0], row, carry)


def _range(first, step, count, size, pooling: Pooling) -> tuple[list, list]:
    """Return each bin's first sample that may count, and the number of iterations, by axis.

    Only a few samples of a large box are inside the image.
    """
    if pooling.samples:
        return [jnp.zeros((), first.dtype)] * 2, [pooling.samples] * 2
    starts, turns = [], []
    for a in range(2):
        at, by, most = first[..., a], _of_bins(step[..., a]), _of_bins(count[..., a])
        by = jnp.where(by > 0, by, 1)
        # One more on either side, because sums are rounded.
        start = jnp.ceil((-pooling.margin - at) / by) - 1
        stop = jnp.floor((size[a] - 1 + pooling.margin - at) / by) + 2
        valid = jnp.isfinite(at) & (most > 0)
        start = jnp.where(valid, jnp.clip(start, 0, most), 0)
        stop = jnp.where(valid, jnp.clip(stop, start, most), 0)
        starts.append(start)
        turns.append(jnp.max(stop - start, initial=0).astype(jnp.int32))
    return starts, turns


def _axis(first, step, count, i, size: int, pooling: Pooling) -> tuple:
    """Return the position of a sample along one axis.

    Returns:
        Its two pixels, its distance from the first one, whether that distance changes with the
        position, and whether the sample counts.
    """
    at = first + i * _of_bins(step)
    counts = _counts(at, i, count, size, pooling)
    within = counts & (at >= 0) & (at < size - 1)
    at = jnp.where(within, at, jnp.where(counts & (at > 0), float(size - 1), 0.0).astype(at.dtype))
    low = jnp.floor(at)
    pixel = low.astype(jnp.int32)
    return pixel, jnp.minimum(pixel + 1, size - 1), at - low, within, counts


def _counts(at, i, count, size: int, pooling: Pooling) -> jax.Array:
    """Return True where sample i of a bin, at position `at`, counts; False for NaN."""
    inside = (at >= -pooling.margin) & (at <= size - 1 + pooling.margin)
    return inside & (i < _of_bins(count))


def _corners(y: tuple, x: tuple, width: int):
    """Yield the index, weight, slopes and validity of each of four pixels, all [N, R, P, G].

    The slopes are the derivatives of the weight with respect to y and x.
    """
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
    if not pooling.of_inside:
        return jnp.maximum(_of_bins(count[..., 0]) * _of_bins(count[..., 1]), 1)
    counted = jnp.ones((), first.dtype)
    for a in range(2):
        inside = jnp.zeros(first.shape[:4], first.dtype)
        for i in range(pooling.samples):
            at = first[..., a] + i * _of_bins(step[..., a])
            inside += _counts(at, i, count[..., a], size[a], pooling).astype(first.dtype)
        counted *= inside
    return jnp.maximum(counted, 1)


def _of_bins(a: jax.Array) -> jax.Array:
    # [N, R] -> [N, R, 1, 1]
    return a[..., None, None]


def _pixels(x: jax.Array, groups: int, pooling: Pooling) -> jax.Array:
    """Return x as [N, H * W * blocks * G, C / G], for C channels in a block."""
    n, h, w, channels = x.shape
    parts = pooling.parts**2 * groups
    return x.reshape(n, h * w * parts, channels // parts)


def _places(index: jax.Array, pooling: Pooling) -> jax.Array:
    """Return the index into `_pixels` of each bin and group, for `index` [N, R, P, G]."""
    bins, groups = index.shape[2:]
    (rows, columns), parts = pooling.output_size, pooling.parts
    # Not NumPy constants, because jax.experimental.custom_partitioning does not support them.
    p, g = (jnp.arange(size, dtype=jnp.int32) for size in (bins, groups))
    block = p // columns * parts // rows * parts + p % columns * parts // columns
    return (index * parts**2 + block[None, None, :, None]) * groups + g[None, None, None]


def _gather(pixels: jax.Array, places: jax.Array, dtype: Any) -> jax.Array:
    # [N, R, P, G, C / G]
    flat = places.reshape(places.shape[0], math.prod(places.shape[1:]), 1)
    values = jnp.take_along_axis(pixels, flat, axis=1, mode="promise_in_bounds")
    return values.reshape(*places.shape, pixels.shape[-1]).astype(dtype)


def _add_at(pixels: jax.Array, places: jax.Array, updates: jax.Array) -> jax.Array:
    count = math.prod(places.shape[1:])

    def add(pixels, places, updates):
        return pixels.at[places].add(updates, mode="promise_in_bounds")

    places = places.reshape(places.shape[0], count)
    return jax.vmap(add)(pixels, places, updates.reshape(*places.shape, pixels.shape[-1]))
