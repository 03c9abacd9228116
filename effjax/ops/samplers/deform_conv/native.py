"""Samplers of deformable convolution that call native kernels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._common.sharding import match_varying
from ..kernels import SAMPLE_FLOPS, call_native, count_bytes, count_sampled_bytes, result_type
from . import reference
from .chunks import Sampler
from .reference import Geometry


def _as_attribute(geometry: Geometry) -> dict[str, np.int64]:
    """Return the struct `Window` of native/deform_conv_ffi.h."""
    (top, _), (left, _) = geometry.padding
    window = dict(offset_groups=geometry.offset_groups, padding_top=top, padding_left=left)
    window["kernel_h"], window["kernel_w"] = geometry.kernel_size
    window["stride_h"], window["stride_w"] = geometry.strides
    window["dilation_h"], window["dilation_w"] = geometry.kernel_dilation
    return {name: np.int64(value) for name, value in window.items()}


def _columns(x, offset, mask, row, geometry: Geometry, rows: int) -> jax.Array:
    args = match_varying((x, offset, mask, row))
    shape = (x.shape[0], rows, offset.shape[2], geometry.taps * x.shape[-1])
    result = result_type(args[0], shape)
    samples = math.prod(shape)
    return call_native(
        "effjax_deform_columns",
        result,
        args,
        flops=SAMPLE_FLOPS * samples,
        memory_bytes=count_sampled_bytes(x, samples)
        + _row_bytes(rows, offset, mask)
        + count_bytes(result),
        geometry=_as_attribute(geometry),
    )


def _columns_backward(
    x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry: Geometry, skip_dx: bool = False
) -> tuple:
    args = match_varying((x, offset, mask, row, dcolumns, dx, doffset, dmask))
    samples, added = math.prod(dcolumns.shape), 0 if skip_dx else 4 * dx.dtype.itemsize
    rows = _row_bytes(dcolumns.shape[1], offset, mask, doffset, dmask)
    dx, doffset, dmask = call_native(
        "effjax_deform_columns_backward",
        tuple(map(result_type, args[5:])),
        args,
        flops=(1 if skip_dx else 2) * SAMPLE_FLOPS * samples,
        memory_bytes=count_sampled_bytes(x, samples)
        + rows
        + count_bytes(dcolumns)
        + added * samples,
        aliases={5: 0, 6: 1, 7: 2},  # dx, doffset and dmask are updated in place
        geometry=_as_attribute(geometry),
        skip_dx=np.int64(skip_dx),
    )
    return dx, doffset, dmask


def _row_bytes(rows: int, *arrays) -> int:
    """Return the bytes of some output rows of arrays [N, Ho, ...]."""
    return sum(rows * a.shape[0] * math.prod(a.shape[2:]) * a.dtype.itemsize for a in arrays)


def _deterministic_columns_backward(
    x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry: Geometry
) -> tuple:
    """Compute all gradients; dx without atomic additions, whose order varies on a GPU."""
    # The corners of all samples are sorted by their pixel, and the corners of each pixel are summed
    # in that order.
    args = match_varying((x, offset, mask, row, dcolumns, dx, doffset, dmask))
    _, offset, mask, row, dcolumns, *_ = args
    dx, doffset, dmask = _columns_backward(*args, geometry=geometry, skip_dx=True)
    rows = lax.dynamic_slice_in_dim(offset, row[0], dcolumns.shape[1], 1)
    destination = destinations(rows, row, dx.shape[1:3], geometry)
    source = jnp.arange(destination.shape[-1], dtype=jnp.int32)
    source = jnp.broadcast_to(source, destination.shape)
    destination, source = match_varying((destination, source))
    # The pairs (destination, source) are all different, so an unstable sort is deterministic. A
    # stable sort by destination alone would carry a third array.
    destination, source = lax.sort((destination, source), num_keys=2, is_stable=False)
    args = (offset, mask, row, dcolumns, destination, source, dx)
    dx = call_native(
        "effjax_deform_scatter_sorted",
        result_type(dx),
        args,
        flops=SAMPLE_FLOPS * math.prod(dcolumns.shape),
        memory_bytes=_row_bytes(dcolumns.shape[1], offset, mask)
        + count_bytes(dcolumns, destination, source, dx, dx),
        aliases={6: 0},
        geometry=_as_attribute(geometry),
    )
    return dx, doffset, dmask


def destinations(
    offset: jax.Array, row: jax.Array, size: tuple[int, int], geometry: Geometry
) -> jax.Array:
    """Return the pixel of every corner, int32 [N, G, R * Wo * K * 4]; H * W if it is outside."""
    y, x, inside = reference.positions(offset, row, size, geometry)  # [N, R, Wo, G, K]
    y0, x0 = jnp.floor(y), jnp.floor(x)
    corners = []
    for corner in np.ndindex(2, 2):
        index, valid = reference.corner_index(y0, x0, corner, size)
        corners.append(jnp.where(inside & valid, index, size[0] * size[1]))
    by_group = jnp.moveaxis(jnp.stack(corners, -1), 3, 1)  # [N, G, R, Wo, K, 4]
    return by_group.reshape(*by_group.shape[:2], math.prod(by_group.shape[2:]))


def _sample_bytes(dtype: Any) -> tuple[int, int]:
    # Backward: the columns, their transpose (made by XLA on a CPU), and dcolumns in float32 or
    # wider.
    size = dtype.itemsize
    return size, 2 * size + max(4, size)


# For each of a tap's four corners: its pixel, and two numbers before and after the sort.
_SORT_BYTES = 4 * (4 + 2 * 4)

SAMPLER = Sampler(_columns, _columns_backward, _sample_bytes)
DETERMINISTIC_CUDA = Sampler(_columns, _deterministic_columns_backward, _sample_bytes, _SORT_BYTES)
