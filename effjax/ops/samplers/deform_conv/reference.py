"""Samples of a deformable convolution and their gradients, in plain XLA.

This is the definition of the two functions that the custom calls in `native.py` compute.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Geometry(NamedTuple):
    """Geometry of a convolution: the pixel under each tap of each output pixel at offset zero."""

    kernel_size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]  # ((top, bottom), (left, right))
    kernel_dilation: tuple[int, int]
    offset_groups: int

    @property
    def taps(self) -> int:
        """Number of taps of the kernel, K."""
        return self.kernel_size[0] * self.kernel_size[1]


def columns(
    x: jax.Array, offset: jax.Array, mask: jax.Array, row: jax.Array, geometry: Geometry
) -> jax.Array:
    """Return the samples of R output rows, starting at `row`: for each tap all channels.

    Args:
        x: [N, H, W, C].
        offset: [N, R, Wo, G * K * 2], (y, x) for each group and tap; at least float32.
        mask: [N, R, Wo, G * K], or [N, R, Wo, 0] for none; of offset's dtype.
        row: int32 [1], the output row of the first row of offset and mask.
        geometry: of the convolution.

    Returns:
        [N, R, Wo, K * C] of x's dtype.
    """
    n, h, w, c = x.shape
    groups, taps = geometry.offset_groups, geometry.taps
    rows, width = offset.shape[1:3]
    y, x_at, inside = positions(offset, row, (h, w), geometry)  # [N, R, Wo, G, K]
    y0, x0 = jnp.floor(y), jnp.floor(x_at)
    pixels = x.reshape(n, h * w, groups, c // groups)
    value = jnp.zeros((), offset.dtype)
    for corner in np.ndindex(2, 2):
        weight = _weight(y - y0, corner[0]) * _weight(x_at - x0, corner[1])
        index, valid = corner_index(y0, x0, corner, (h, w))
        index = jnp.swapaxes(index, 3, 4).reshape(n, rows * width * taps, groups, 1)
        pixel = jnp.take_along_axis(pixels, index, axis=1, mode="promise_in_bounds")
        pixel = pixel.reshape(n, rows, width, taps, groups, c // groups).astype(offset.dtype)
        # `where` and not a product with zero: the pixel read for a corner out of range may be
        # infinite.
        pixel = jnp.where(_channels(inside & valid), pixel, 0)
        value += _channels(weight) * pixel
    if mask.shape[-1]:
        value *= _channels(mask.reshape(inside.shape))
    value = jnp.where(_channels(inside), value, 0)
    return value.astype(x.dtype).reshape(n, rows, width, taps * c)


def columns_backward(
    x: jax.Array,
    offset: jax.Array,
    mask: jax.Array,
    row: jax.Array,
    dcolumns: jax.Array,
    dx: jax.Array,
    geometry: Geometry,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add the contribution of these rows to dx [N, H, W, C]; return dx, doffset and dmask.

    dx has offset's dtype. At integer positions, where bilinear interpolation has a kink, the
    derivative with respect to the position is the right-sided one.
    """
    n, h, w, c = x.shape
    groups, taps = geometry.offset_groups, geometry.taps
    rows, width = offset.shape[1:3]
    y, x_at, inside = positions(offset, row, (h, w), geometry)  # [N, R, Wo, G, K]
    y0, x0 = jnp.floor(y), jnp.floor(x_at)
    factor = mask.reshape(inside.shape) if mask.shape[-1] else jnp.ones_like(y)
    dvalue = dcolumns.reshape(n, rows, width, taps, groups, c // groups).astype(offset.dtype)
    dvalue = jnp.where(_channels(inside), dvalue, 0)
    pixels, dpixels = (a.reshape(n, h * w, groups, c // groups) for a in (x, dx))
    dots = {}  # dot products of the gradient with each corner's pixel, [N, R, Wo, G, K]
    for corner in np.ndindex(2, 2):
        index, valid = corner_index(y0, x0, corner, (h, w))
        index = jnp.swapaxes(index, 3, 4).reshape(n, rows * width * taps, groups)
        valid = _channels(inside & valid)
        pixel = jnp.take_along_axis(pixels, index[..., None], axis=1, mode="promise_in_bounds")
        pixel = jnp.where(valid, pixel.reshape(dvalue.shape).astype(offset.dtype), 0)
        dots[corner] = jnp.swapaxes(jnp.sum(dvalue * pixel, -1), 3, 4)
        weight = factor * _weight(y - y0, corner[0]) * _weight(x_at - x0, corner[1])
        dpixel = jnp.where(valid, dvalue * _channels(weight), 0)
        dpixels = _add_at(dpixels, index, dpixel.reshape(*index.shape, c // groups))
    fy, fx = y - y0, x_at - x0
    dy = factor * ((1 - fx) * (dots[1, 0] - dots[0, 0]) + fx * (dots[1, 1] - dots[0, 1]))
    dx_at = factor * ((1 - fy) * (dots[0, 1] - dots[0, 0]) + fy * (dots[1, 1] - dots[1, 0]))
    dfactor = sum(_weight(fy, i) * _weight(fx, j) * dot for (i, j), dot in dots.items())
    doffset, dmask = (
        jnp.where(at, d, 0)
        for at, d in ((inside[..., None], jnp.stack([dy, dx_at], -1)), (inside, dfactor))
    )
    dmask = dmask.reshape(mask.shape) if mask.shape[-1] else mask
    return dpixels.reshape(dx.shape), doffset.reshape(offset.shape), dmask


def _add_at(pixels: jax.Array, index: jax.Array, updates: jax.Array) -> jax.Array:
    """Add updates [N, P, G, C] to pixels [N, H * W, G, C] at index [N, P, G]."""

    def add(pixels, index, updates):
        return pixels.at[index].add(updates, mode="promise_in_bounds")

    return jax.vmap(jax.vmap(add, 1, 1))(pixels, index, updates)


def positions(
    offset: jax.Array, row: jax.Array, size: tuple[int, int], geometry: Geometry
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the positions y, x of all samples and whether they touch x, [N, R, Wo, G, K]."""
    # Samples outside, or at NaN, are moved to (0, 0); their offsets get no gradient.
    n, rows, width, _ = offset.shape
    offset = offset.reshape(n, rows, width, geometry.offset_groups, geometry.taps, 2)
    tap = jnp.arange(geometry.taps, dtype=jnp.int32)
    tap = tap // geometry.kernel_size[1], tap % geometry.kernel_size[1]
    at = []
    for axis, first, count in ((0, row[0], rows), (1, 0, width)):
        start = (first + jnp.arange(count, dtype=jnp.int32)) * geometry.strides[axis]
        start -= geometry.padding[axis][0]
        grid = (start[:, None] + tap[axis][None] * geometry.kernel_dilation[axis]).astype(
            offset.dtype
        )  # [R or Wo, K]
        shape = (1, rows, 1, 1, -1) if axis == 0 else (1, 1, width, 1, -1)
        at.append(jnp.reshape(grid, shape) + offset[..., axis])
    y, x = at
    inside = (y > -1) & (y < size[0]) & (x > -1) & (x < size[1])  # False for NaN
    return jnp.where(inside, y, 0), jnp.where(inside, x, 0), inside


def corner_index(
    y0: jax.Array, x0: jax.Array, corner: tuple[int, ...], size: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """Return the flat index of a corner's pixel in its image, and whether that pixel exists."""
    y, x = (at.astype(jnp.int32) + step for at, step in zip((y0, x0), corner, strict=True))
    valid = (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
    return jnp.where(valid, y * size[1] + x, 0), valid


def _weight(fraction: jax.Array, corner: int) -> jax.Array:
    return fraction if corner else 1 - fraction


def _channels(a: jax.Array) -> jax.Array:
    # [N, R, Wo, G, K] -> [N, R, Wo, K, G, 1]
    return jnp.swapaxes(a, 3, 4)[..., None]
