"""Where the bins of boxes take their samples: boxes in, positions out.

Everything is in pixels of x, the first of which is at 0. Positions are (y, x), as
`reference.pool` takes them; boxes and offsets have x first, as everywhere in detection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Along an axis of a bin: a box of more is taken for a mistake.
MOST_SAMPLES = 2**20


class Bins(NamedTuple):
    """What `reference.pool` takes; `extent` [N, R, 2] are the sizes of the boxes, (h, w)."""

    first: jax.Array  # [N, R, P, 1, 2]
    step: jax.Array  # [N, R, 2]
    count: jax.Array  # [N, R, 2]
    extent: jax.Array


def of_roi_align(
    boxes: jax.Array,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Bins:
    """A box is divided into bins, a bin into cells, and each cell has a sample in the middle.

    With `sampling_ratio` 0 a cell is at most one pixel high and wide.
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
        # XLA may divide by a constant by multiplying, and find 2.0000001 in 14 / 7.
        count = jnp.ceil(extent / bins)
        count = jnp.maximum(jnp.where((count - 1) * bins >= extent, count - 1, count), 0.0)
    size = extent / bins
    step = size / jnp.maximum(count, 1.0)
    first = _starts(start, size, output_size) + (step / 2)[:, :, None]
    return _checked(first, step, count, extent, boxes)


def of_deform_psroi_pool(
    boxes: jax.Array, output_size: tuple[int, int], spatial_scale: float, samples: int
) -> Bins:
    """Boxes are rounded to whole pixels of the image, both ends included, and at least 0.1 pixel
    large; a bin is divided into cells, and each cell has a sample at its upper left corner.
    """
    whole = _rounded(boxes)
    start = whole[..., 1::-1] * spatial_scale - 0.5
    stop = (whole[..., :1:-1] + 1.0) * spatial_scale - 0.5
    extent = jnp.maximum(stop - start, 0.1)
    size = extent / jnp.asarray(np.array(output_size)[None, None], boxes.dtype)
    count = jnp.full_like(extent, samples)
    return _checked(_starts(start, size, output_size), size / samples, count, extent, boxes)


def moved(bins: Bins, offset: jax.Array, scale: float) -> jax.Array:
    """`first` [N, R, P, G, 2], with bins moved by offset [N, R, P, G, 2], (x, y) as parts of the
    box.
    """
    return bins.first + scale * bins.extent[:, :, None, None] * offset[..., ::-1]


def _starts(start: jax.Array, size: jax.Array, output_size: tuple[int, int]) -> jax.Array:
    """The upper left corners of the bins, [N, R, P, 2]."""
    index = np.moveaxis(np.indices(output_size), 0, -1).reshape(1, 1, -1, 2)
    return start[:, :, None] + jnp.asarray(index, start.dtype) * size[:, :, None]


def _checked(first, step, count, extent, boxes) -> Bins:
    """Without samples for a box that is none: not finite, or larger than any image."""
    finite = jnp.isfinite(boxes).all(-1) & jnp.isfinite(extent).all(-1)
    good = (finite & (count <= MOST_SAMPLES).all(-1))[..., None]
    step, count, extent = (jnp.where(good, a, 0.0).astype(a.dtype) for a in (step, count, extent))
    first = jnp.where(good[:, :, None], first, 0.0).astype(first.dtype)
    return Bins(first[:, :, :, None], step, count, extent)


def _rounded(a: jax.Array) -> jax.Array:
    """Half away from zero, as C rounds."""
    whole = jnp.trunc(a)
    return jnp.where(jnp.abs(a - whole) >= 0.5, whole + jnp.sign(a), whole)


def parts(offset: jax.Array, output_size: tuple[int, int], part_size: int) -> jax.Array:
    """The offsets of bins, [N, R, P, G, 2], out of those of parts, [N, R, part_size, part_size,
    2 * G].
    """
    rows, columns = (np.arange(count) * part_size // count for count in output_size)
    found = offset[:, :, rows[:, None], columns[None]]
    return found.reshape(*offset.shape[:2], rows.size * columns.size, offset.shape[-1] // 2, 2)
