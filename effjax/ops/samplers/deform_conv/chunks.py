"""Forward and backward pass on each device's images, a few output rows at a time.

The columns of a few rows are sampled, multiplied with the kernel and discarded. The chunks are of
rows and not of images, because jit shards the batch axis: slices of a sharded axis would be
gathered.

All arrays have a leading axis D of examples that ``jax.vmap`` adds (1 without it). The kernel has
one entry there, or one for each example.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._common.platform import array_bytes, known_sizes, traced_platform
from ..._common.sharding import zeros
from ..core import merge_example_axis
from .reference import Geometry


class Sampler(NamedTuple):
    """Implementation of `reference.columns` and its gradient for a chunk of rows."""

    # (x, offset, mask, row, geometry=, rows=) -> the columns of the rows [row, row + rows)
    columns: Callable
    # (x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry=) -> dx, doffset, dmask.
    # Adds the contribution of these rows to dx, and writes these rows of doffset and dmask.
    columns_backward: Callable
    # dtype -> workspace bytes for each number of the columns, forward and backward
    sample_bytes: Callable[[Any], tuple[int, int]]
    # further bytes in the backward pass, for each tap of each group of channels
    tap_bytes: int = 0


class Static(NamedTuple):
    """Static configuration of a deformable convolution (everything that is not an array)."""

    geometry: Geometry
    feature_groups: int
    sampler: Sampler
    precision: Any
    chunk_bytes: int  # of one chunk


def forward(static: Static, x, offset, mask, kernel) -> jax.Array:
    """Return the convolution y [D, N, Ho, Wo, O], of x's dtype."""
    sample_bytes, _ = static.sampler.sample_bytes(x.dtype)
    images = x.shape[:2]
    x, offset, mask = map(merge_example_axis, (x, offset, mask))
    blocks = kernel_blocks(kernel, x.dtype, static.feature_groups)
    columns = functools.partial(static.sampler.columns, geometry=static.geometry)

    def body(start, rows, carry):
        (y,) = carry
        samples = columns(x, offset, mask, _as_row(start), rows=rows)
        samples = samples.reshape(*images, *samples.shape[1:])
        y_rows = multiply(samples, blocks, offset.dtype, static).astype(y.dtype)
        return (lax.dynamic_update_slice_in_dim(y, y_rows, start, 2),)

    y = zeros((*images, *offset.shape[1:3], kernel.shape[-1]), x.dtype, x)
    rows = rows_per_chunk(static, x, offset, kernel, sample_bytes)
    return _loop_over_rows(body, (y,), offset.shape[1], rows)[0]


def backward(static: Static, x, offset, mask, kernel, dy) -> tuple:
    """Return dx, doffset, dmask like x, offset, mask, and dkernel [D, kh, kw, C / groups, O].

    dx and dkernel are summed in offset's dtype (float32 or float64). dkernel is returned in it.
    """
    _, sample_bytes = static.sampler.sample_bytes(x.dtype)
    images = x.shape[:2]
    x, offset, mask = map(merge_example_axis, (x, offset, mask))
    blocks = kernel_blocks(kernel, x.dtype, static.feature_groups)
    columns, columns_backward = (
        functools.partial(run, geometry=static.geometry)
        for run in (static.sampler.columns, static.sampler.columns_backward)
    )

    def body(start, rows, carry):
        dx, doffset, dmask, dkernel = carry
        inputs = x, offset, mask, _as_row(start)
        samples = columns(*inputs, rows=rows)
        dy_rows = lax.dynamic_slice_in_dim(dy, start, rows, 2)
        dkernel += multiply_backward_kernel(
            samples.reshape(*images, *samples.shape[1:]), dy_rows, blocks, offset.dtype, static
        )
        dcolumns = multiply_backward_columns(dy_rows, blocks, offset.dtype, static)
        dcolumns = dcolumns.reshape(samples.shape)
        return *columns_backward(*inputs, dcolumns, dx, doffset, dmask), dkernel

    taps, channels, groups, outputs = blocks.shape[1:]
    transposed = (images[0], groups, outputs, taps, channels)
    shapes = (x.shape, offset.shape, mask.shape, transposed)
    carry = tuple(zeros(shape, offset.dtype, x) for shape in shapes)
    rows = rows_per_chunk(static, x, offset, kernel, sample_bytes, static.sampler.tap_bytes)
    *image_gradients, dkernel = _loop_over_rows(body, carry, offset.shape[1], rows)
    dx, doffset, dmask = (a.reshape(*images, *a.shape[1:]) for a in image_gradients)
    dkernel = dkernel.transpose(0, 3, 4, 1, 2).reshape(images[0], *kernel.shape[1:])
    return dx.astype(x.dtype), doffset, dmask, dkernel


def rows_per_chunk(static: Static, x, offset, kernel, sample_bytes: int, tap_bytes: int = 0) -> int:
    """Return the number of output rows of a chunk, at least one."""
    # A smaller last chunk may have a workspace in addition to that of the others: both together
    # stay below the limit. Of all such sizes, choose the one with the fewest chunks.
    n, height, width = known_sizes(*offset.shape[:3])
    taps, groups, channels = static.geometry.taps, static.geometry.offset_groups, x.shape[-1]
    # The native kernels sum the channels of a group in blocks of 64.
    sums = 4 * taps * groups * math.ceil(channels / groups / 64)
    pixel = taps * groups * tap_bytes + (kernel.shape[-1] + sums) * offset.dtype.itemsize
    last = (taps, channels) if groups == 1 else (taps, groups, channels // groups)
    # The numbers of the columns of a row, with the padding of a TPU.
    numbers = array_bytes((n, width, *last), offset.dtype) // offset.dtype.itemsize
    row_bytes = numbers * sample_bytes + n * width * pixel
    most = static.chunk_bytes // max(row_bytes, 1)
    most = max(1, min(height, most))
    fitting = (rows for rows in range(1, most + 1) if rows + height % rows <= most)
    return min(fitting, key=lambda rows: math.ceil(height / rows) + (height % rows > 0))


def _loop_over_rows(body: Callable, carry: tuple, height: int, rows: int) -> tuple:
    """Run ``carry = body(start, rows, carry)`` on all chunks; the last one may be smaller."""
    count, rest = divmod(height, rows)
    if count > 1:
        carry = lax.fori_loop(0, count, lambda j, carry: body(j * rows, rows, carry), carry)
    else:
        carry = body(jnp.int32(0), rows, carry)
    if rest:
        # The barrier runs the last chunk after the others, so that it can reuse their workspace.
        start, carry = lax.optimization_barrier((jnp.int32(count * rows), carry))
        carry = body(start, rest, carry)
    return carry


def kernel_blocks(kernel: jax.Array, dtype: Any, groups: int) -> jax.Array:
    """Reshape [E, kh, kw, C / groups, O] to [E, K, C / groups, groups, O / groups]."""
    # Without groups, taps and channels are one axis of a plain matrix product: [E, 1, K * C, 1, O].
    e, kh, kw, c, o = kernel.shape
    taps, channels = (1, kh * kw * c) if groups == 1 else (kh * kw, c)
    return kernel.astype(dtype).reshape(e, taps, channels, groups, o // groups)


def multiply(columns: jax.Array, kernel: jax.Array, dtype: Any, static: Static) -> jax.Array:
    """Multiply columns [D, N, R, Wo, K * C] with the kernel's blocks; return [D, N, R, Wo, O]."""
    y = _einsum("dpkgc,dkcgo->dpgo", _split_columns(columns, kernel), kernel, dtype, static)
    return y.reshape(*columns.shape[:4], math.prod(kernel.shape[3:]))


def multiply_backward_columns(
    dy: jax.Array, kernel: jax.Array, dtype: Any, static: Static
) -> jax.Array:
    """Return the gradient of the columns."""
    columns = _einsum("dpgo,dkcgo->dpkgc", _split_outputs(dy, kernel), kernel, dtype, static)
    return columns.reshape(*dy.shape[:4], math.prod(kernel.shape[1:4]))


def multiply_backward_kernel(
    columns: jax.Array, dy: jax.Array, kernel: jax.Array, dtype: Any, static: Static
) -> jax.Array:
    """Return the gradient of the kernel's blocks, [D, groups, O / groups, K, C / groups]."""
    # It is transposed because a CPU is 1.5 times as fast with the long axis of the columns
    # innermost.
    columns, dy = _split_columns(columns, kernel), _split_outputs(dy, kernel)
    examples = dy.shape[0]
    splits = _num_splits(columns, math.prod(kernel.shape[1:]) * dtype.itemsize)
    split_shape = examples * splits, columns.shape[1] // splits
    columns, dy = (a.reshape(*split_shape, *a.shape[2:]) for a in (columns, dy))
    dkernel = _einsum("dpgo,dpkgc->dgokc", dy, columns, dtype, static)
    dkernel = dkernel.reshape(examples, splits, *dy.shape[2:], columns.shape[2], columns.shape[4])
    return jnp.sum(dkernel, 1) if splits > 1 else dkernel[:, 0]


def _num_splits(columns: jax.Array, result_bytes: int) -> int:
    """Return the number of products into which the sum over the pixels is split on a GPU."""
    # XLA splits a product of many pixels and few results itself (split-K). If no power of two
    # divides the number of pixels, it first copies the columns to pad them. Splits of a multiple of
    # eight pixels need no padding. They have at least 128 pixels, and their results take at most
    # half the bytes of the columns.
    pixels = columns.shape[1]
    if traced_platform() != "cuda" or not isinstance(pixels, int) or pixels % 128 == 0:
        return 1
    columns_bytes = math.prod(columns.shape[1:]) * columns.dtype.itemsize
    most = min(32, pixels // 128, columns_bytes // (2 * result_bytes))
    return max((s for s in range(4, most + 1) if pixels % (8 * s) == 0), default=1)


def _einsum(formula: str, a: jax.Array, b: jax.Array, dtype: Any, static: Static) -> jax.Array:
    # Axes of size one are removed: with them, XLA on a CPU transposes the columns.
    single = set()
    names, result = formula.split("->")
    a_names, b_names = names.split(",")
    if b.shape[0] == 1 != a.shape[0]:  # all examples share one kernel
        b, b_names = b[0], b_names[1:]
    for names, array in ((a_names, a), (b_names, b)):
        single |= {n for n, size in zip(names, array.shape, strict=True) if size == 1}
    a, b = (
        array.reshape([s for n, s in zip(names, array.shape, strict=True) if n not in single])
        for names, array in ((a_names, a), (b_names, b))
    )
    formula = "".join(n for n in f"{a_names},{b_names}->{result}" if n not in single)
    return jnp.einsum(formula, a, b, precision=static.precision, preferred_element_type=dtype)


def _split_columns(columns: jax.Array, kernel: jax.Array) -> jax.Array:
    # [D, N * R * Wo, K, groups, C / groups], with K and C of kernel_blocks
    _, taps, channels, groups, _ = kernel.shape
    pixels = math.prod(columns.shape[1:4])
    return columns.reshape(columns.shape[0], pixels, taps, groups, channels)


def _split_outputs(dy: jax.Array, kernel: jax.Array) -> jax.Array:
    return dy.reshape(dy.shape[0], math.prod(dy.shape[1:4]), *kernel.shape[3:])


def _as_row(start) -> jax.Array:
    return jnp.reshape(start, 1).astype(jnp.int32)
