"""XLA alone: as a sampler, and as an operator open to forward mode and gradients of gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import chunks, reference
from .chunks import Sampler, Static
from .reference import Geometry


def _sample_bytes(dtype: Any) -> tuple[int, int]:
    size = max(4, dtype.itemsize)
    return 2 * size, 12 * size  # as measured


def columns(x, offset, mask, row, geometry: Geometry, rows: int) -> jax.Array:
    """`Sampler.columns`, by the reference."""
    offset, mask = (lax.dynamic_slice_in_dim(a, row[0], rows, 1) for a in (offset, mask))
    return reference.columns(x, offset, mask, row, geometry)


def columns_backward(
    x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry: Geometry
) -> tuple:
    """`Sampler.columns_backward`, by the reference."""
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
    """x [N, H, W, C], kernel [kh, kw, C / groups, O] -> [N, Ho, Wo, O] of x's dtype.

    Worked through in slices of output rows that are sampled again for each derivative.
    """
    accumulate = offset.dtype
    n, height = offset.shape[:2]
    sample_bytes = 16 * max(4, x.dtype.itemsize)  # as measured
    rows = chunks.rows_of_chunk(static, x, offset, kernel, sample_bytes)
    count, rest = divmod(height, rows)
    # Nothing is rounded to x's dtype in between: its gradient would be rounded in each chunk.
    wide_x, wide_kernel = x.astype(accumulate), kernel.astype(accumulate)

    @jax.checkpoint
    def chunk(x_and_kernel, start, offset, mask):
        wide_x, wide_kernel = x_and_kernel
        row = jnp.reshape(start, 1).astype(jnp.int32)
        part = reference.columns(wide_x, offset, mask, row, static.geometry)
        blocks = chunks.kernel_blocks(wide_kernel[None], accumulate, static.feature_groups)
        return chunks.multiply(part[None], blocks, accumulate, static)[0].astype(x.dtype)

    def slices(a):  # [N, Ho, Wo, ...] -> [count, N, rows, Wo, ...]
        whole = a[:, : count * rows].reshape(n, count, rows, *a.shape[2:])
        return jnp.moveaxis(whole, 1, 0)

    shared = wide_x, wide_kernel
    if count == 1:
        parts = [chunk(shared, 0, offset[:, :rows], mask[:, :rows])]
    else:
        _, y = lax.scan(
            lambda carry, at: (carry, chunk(shared, *at)),
            None,
            (jnp.arange(count, dtype=jnp.int32) * rows, slices(offset), slices(mask)),
        )
        parts = [jnp.moveaxis(y, 0, 1).reshape(n, count * rows, *y.shape[3:])]
    if rest:
        start = count * rows
        parts.append(chunk(shared, start, offset[:, start:], mask[:, start:]))
    return jnp.concatenate(parts, 1)
