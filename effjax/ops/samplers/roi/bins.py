"""Positions of the samples of bins.

All positions are in pixels of x, with the center of the first pixel at 0. They are (y, x), as in
`reference.pool`; boxes and offsets are (x, y), as in detection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Samples along an axis of a bin. A box with more is treated as invalid.
MAX_SAMPLES = 2**20


class Bins(NamedTuple):
    """Samples of bins, as `reference.pool` takes them, and the sizes of the boxes."""

    first: jax.Array  # [N, R, P, 1, 2]
    step: jax.Array  # [N, R, 2]
    count: jax.Array  # [N, R, 2]
    extent: jax.Array  # [N, R, 2], (height, width) of the boxes


# The functions that make bins take their static options first, and then arrays.


def roi_align_bins(
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    boxes: jax.Array,
) -> Bins:
    """Return the bins of `roi_align`.

    A box is divided into bins and a bin into cells, with a sample at the center of each cell. With
    `sampling_ratio` 0 a cell is at most one pixel high and wide.
    """
    corners = boxes * spatial_scale - (0.5 if aligned else 0.0)
    start, stop = corners[..., 1::-1], corners[..., :1:-1]  # (y, x)
    extent = stop - start
    if not aligned:
        extent = jnp.maximum(extent, 1.0)
    bins = jnp.asarray(np.array(output_size)[None, None], boxes.dtype)
    if sampling_ratio:
        count = jnp.full_like(extent, sampling_ratio)
    else:
        # XLA may divide by a constant by multiplying with its reciprocal: 14 / 7 = 2.0000001.
        count = jnp.ceil(extent / bins)
        count = jnp.maximum(jnp.where((count - 1) * bins >= extent, count - 1, count), 0.0)
    size = extent / bins
    step = size / jnp.maximum(count, 1.0)
    first = _starts(start, size, output_size) + (step / 2)[:, :, None]
    return _drop_invalid(first, step, count, extent, boxes)


def deformed_bins(
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
    boxes: jax.Array,
    offset: jax.Array | None = None,  # [N, R, rows, columns, 2]
) -> Bins:
    """Return the bins of `deform_roi_pool`."""
    bins = roi_align_bins(output_size, spatial_scale, sampling_ratio, True, boxes)
    return bins if offset is None else _move(bins, offset.reshape(*bins.first.shape), gamma)


def psroi_bins(
    output_size: tuple[int, int],
    spatial_scale: float,
    samples: int,
    part_size: int,
    trans_std: float,
    boxes: jax.Array,
    offset: jax.Array | None = None,  # [N, R, part_size, part_size, 2 * G]
) -> Bins:
    """Return the bins of `deform_psroi_pool`.

    Boxes are rounded to whole pixels of the image, both ends included, and are at least 0.1 pixels
    large. A bin is divided into cells, with a sample at the upper left corner of each cell.
    """
    whole = _round_half_away(boxes)
    start = whole[..., 1::-1] * spatial_scale - 0.5
    stop = (whole[..., :1:-1] + 1.0) * spatial_scale - 0.5
    extent = jnp.maximum(stop - start, 0.1)
    size = extent / jnp.asarray(np.array(output_size)[None, None], boxes.dtype)
    count = jnp.full_like(extent, samples)
    first = _starts(start, size, output_size)
    bins = _drop_invalid(first, size / samples, count, extent, boxes)
    if offset is None:
        return bins
    rows, columns = (np.arange(count) * part_size // count for count in output_size)
    offset = offset[:, :, rows[:, None], columns[None]]
    shape = *offset.shape[:2], rows.size * columns.size, offset.shape[-1] // 2, 2
    return _move(bins, offset.reshape(shape), trans_std)


def _move(bins: Bins, offset: jax.Array, scale: float) -> Bins:
    """Move bins by offset [N, R, P, G, 2], (x, y) in fractions of the box."""
    first = bins.first + scale * bins.extent[:, :, None, None] * offset[..., ::-1]
    return bins._replace(first=first)


def _starts(start: jax.Array, size: jax.Array, output_size: tuple[int, int]) -> jax.Array:
    """Return the upper left corners of the bins, [N, R, P, 2]."""
    index = np.moveaxis(np.indices(output_size), 0, -1).reshape(1, 1, -1, 2)
    return start[:, :, None] + jnp.asarray(index, start.dtype) * size[:, :, None]


def _drop_invalid(first, step, count, extent, boxes) -> Bins:
    """Return bins without samples for boxes that are not finite, or larger than any image."""
    finite = jnp.isfinite(boxes).all(-1) & jnp.isfinite(extent).all(-1)
    valid = (finite & (count <= MAX_SAMPLES).all(-1))[..., None]
    step, count, extent = (jnp.where(valid, a, 0.0).astype(a.dtype) for a in (step, count, extent))
    first = jnp.where(valid[:, :, None], first, 0.0).astype(first.dtype)
    return Bins(first[:, :, :, None], step, count, extent)


def _round_half_away(a: jax.Array) -> jax.Array:
    # As C's round().
    whole = jnp.trunc(a)
    return jnp.where(jnp.abs(a - whole) >= 0.5, whole + jnp.sign(a), whole)
