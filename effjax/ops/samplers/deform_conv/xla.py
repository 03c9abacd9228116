"""Deformable convolution in plain XLA: a sampler, and an operator with all derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._common.platform import traced_platform
from . import chunks, reference
from .chunks import Sampler, Static
from .reference import Geometry


def _sample_bytes(dtype: Any) -> tuple[int, int]:
    size = max(4, dtype.itemsize)
    if traced_platform() == "tpu":
        return 6 * size, 8 * size  # as planned
    return 2 * size, 12 * size  # as measured


def columns(x, offset, mask, row, geometry: Geometry, rows: int) -> jax.Array:
    """Implement `Sampler.columns` with the reference."""
    offset, mask = (lax.dynamic_slice_in_dim(a, row[0], rows, 1) for a in (offset, mask))
    return reference.columns(x, offset, mask, row, geometry)


def columns_backward(
    x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry: Geometry
) -> tuple:
    """Implement `Sampler.columns_backward` with the reference."""
    rows = dcolumns.shape[1]
    offset, mask = (lax.dynamic_slice_in_dim(a, row[0], rows, 1) for a in (offset, mask))
    dx, *parts = reference.columns_backward(x, offset, mask, row, dcolumns, dx, geometry)
    doffset, dmask = (
        lax.dynamic_update_slice_in_dim(whole, part, row[0], 1)
        for whole, part in zip((doffset, dmask), parts, strict=True)
    )
    return dx, doffset, dmask


SAMPLER = Sampler(columns, columns_backward, _sample_bytes)


def deform_conv_xla(static: Static, x, offset, mask, kernel) -> jax.Array:
    """Convolve x [N, H, W, C] with kernel [kh, kw, C / groups, O], with all derivatives.

    The output is computed in chunks of rows, which are sampled again for each derivative.

    Returns:
        [N, Ho, Wo, O] of x's dtype.
    """
    dtype = offset.dtype
    n, height = offset.shape[:2]
    copies = 8 if traced_platform() == "tpu" else 16  # as planned; as measured
    sample_bytes = copies * max(4, x.dtype.itemsize)
    rows = chunks.rows_per_chunk(static, x, offset, kernel, sample_bytes)
    count, rest = divmod(height, rows)
    # x and kernel are widened outside of the chunks, so that their gradients are summed over the
    # chunks in the wide dtype.
    wide_x, wide_kernel = x.astype(dtype), kernel.astype(dtype)

    @jax.checkpoint
    def convolve_rows(x_and_kernel, start, offset, mask):
        wide_x, wide_kernel = x_and_kernel
        row = jnp.reshape(start, 1).astype(jnp.int32)
        samples = reference.columns(wide_x, offset, mask, row, static.geometry)
        blocks = chunks.kernel_blocks(wide_kernel[None], dtype, static.feature_groups)
        return chunks.multiply(samples[None], blocks, dtype, static)[0].astype(x.dtype)

    def split_rows(a):  # [N, Ho, Wo, ...] -> [count, N, rows, Wo, ...]
        whole = a[:, : count * rows].reshape(n, count, rows, *a.shape[2:])
        return jnp.moveaxis(whole, 1, 0)

    shared = wide_x, wide_kernel
    if count == 1:
        results = [convolve_rows(shared, 0, offset[:, :rows], mask[:, :rows])]
    else:
        starts = jnp.arange(count, dtype=jnp.int32) * rows
        _, y = lax.scan(
            lambda carry, arrays: (carry, convolve_rows(shared, *arrays)),
            None,
            (starts, split_rows(offset), split_rows(mask)),
        )
        results = [jnp.moveaxis(y, 0, 1).reshape(n, count * rows, *y.shape[3:])]
    if rest:
        start = count * rows
        results.append(convolve_rows(shared, start, offset[:, start:], mask[:, start:]))
    return jnp.concatenate(results, 1)
