"""Forward and backward pass on the devices' own images, a few output rows at a time.

The columns of some rows are sampled, multiplied with the kernel and forgotten. The slices are of
rows, not of images: jit shards the batch, and slices of a sharded axis would be gathered.

All arrays have a leading axis D of examples that ``jax.vmap`` adds (1 without it). The kernel has
either one entry there, or one for each example.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.partitioning import merge_example_axis
from .._common.platform import traced_platform
from .._common.sharding import zeros
from .reference import Geometry


class Sampler(NamedTuple):
    """As `reference.columns` and its gradient, but for some rows of whole arrays."""

    # (x, offset, mask, row, geometry=, rows=) -> the columns of the rows [row, row + rows)
    columns: Callable
    # (x, offset, mask, row, dcolumns, dx, doffset, dmask, geometry=) -> the last three with what
    # dcolumns' rows add to dx, and are of doffset and dmask
    columns_backward: Callable
    # dtype -> the workspace for each number of the columns, in either pass
    sample_bytes: Callable[[Any], tuple[int, int]]
    # that of the backward pass besides, for each tap of each group of channels
    tap_bytes: int = 0
    # the sampler that adds to dx in one order; None: this one does
    in_order: "Sampler | None" = None
    # the forward pass in one go, (static, x, offset, mask, kernel) -> y; None: of columns
    whole: Callable | None = None


class Static(NamedTuple):
    """All that is no array."""

    geometry: Geometry
    feature_groups: int
    sampler: Sampler
    precision: Any
    workspace_bytes: int  # of a slice


def forward(static: Static, x, offset, mask, kernel) -> jax.Array:
    """The convolution: y [D, N, Ho, Wo, O] of x's dtype."""
    if static.sampler.whole:
        return static.sampler.whole(static, x, offset, mask, kernel)
    sample_bytes, _ = static.sampler.sample_bytes(x.dtype)
    images = x.shape[:2]
    x, offset, mask = map(merge_example_axis, (x, offset, mask))
    wide = kernel_blocks(kernel, x.dtype, static.feature_groups)
    columns = functools.partial(static.sampler.columns, geometry=static.geometry)

    def body(start, rows, carry):
        (y,) = carry
        part = columns(x, offset, mask, _row(start), rows=rows)
        part = multiply(part.reshape(*images, *part.shape[1:]), wide, offset.dtype, static)
        part = part.astype(y.dtype)
        return (lax.dynamic_update_slice_in_dim(y, part, start, 2),)

    y = zeros((*images, *offset.shape[1:3], kernel.shape[-1]), x.dtype, x)
    rows = rows_of_chunk(static, x, offset, kernel, sample_bytes)
    return over_rows(body, (y,), offset.shape[1], rows)[0]


def backward(static: Static, x, offset, mask, kernel, dy) -> tuple:
    """(dx, doffset, dmask) like x, offset and mask; dkernel [D, kh, kw, C / groups, O].

    dx is added up in offset's dtype (float32 or wider), and dkernel comes back in it.
    """
    _, sample_bytes = static.sampler.sample_bytes(x.dtype)
    images = x.shape[:2]
    x, offset, mask = map(merge_example_axis, (x, offset, mask))
    wide = kernel_blocks(kernel, x.dtype, static.feature_groups)
    columns, columns_backward = (
        functools.partial(run, geometry=static.geometry)
        for run in (static.sampler.columns, static.sampler.columns_backward)
    )

    def body(start, rows, carry):
        dx, doffset, dmask, dkernel = carry
        here = x, offset, mask, _row(start)
        part = columns(*here, rows=rows)
        dpart = lax.dynamic_slice_in_dim(dy, start, rows, 2)
        dkernel += multiply_backward_kernel(
            part.reshape(*images, *part.shape[1:]), dpart, wide, offset.dtype, static
        )
        dcolumns = multiply_backward_columns(dpart, wide, offset.dtype, static)
        dcolumns = dcolumns.reshape(part.shape)
        return *columns_backward(*here, dcolumns, dx, doffset, dmask), dkernel

    taps, channels, groups, outputs = wide.shape[1:]
    transposed = (images[0], groups, outputs, taps, channels)
    shapes = (x.shape, offset.shape, mask.shape, transposed)
    carry = tuple(zeros(shape, offset.dtype, x) for shape in shapes)
    rows = rows_of_chunk(static, x, offset, kernel, sample_bytes, static.sampler.tap_bytes)
    *to_split, dkernel = over_rows(body, carry, offset.shape[1], rows)
    dx, doffset, dmask = (a.reshape(*images, *a.shape[1:]) for a in to_split)
    dkernel = dkernel.transpose(0, 3, 4, 1, 2).reshape(images[0], *kernel.shape[1:])
    return dx.astype(x.dtype), doffset, dmask, dkernel


def rows_of_chunk(static: Static, x, offset, kernel, sample_bytes: int, tap_bytes: int = 0) -> int:
    """The output rows of a slice, at least one; under the limit with those of a last, smaller
    slice, which may have a workspace of its own. Few slices; none smaller, if one more avoids it.
    """
    n, height, width, _ = offset.shape
    taps, groups, channels = static.geometry.taps, static.geometry.offset_groups, x.shape[-1]
    sums = 4 * taps * groups * math.ceil(channels / groups / 64)  # of blocks of channels
    pixel = taps * (channels * sample_bytes + groups * tap_bytes)
    pixel += (kernel.shape[-1] + sums) * offset.dtype.itemsize
    most = static.workspace_bytes // max(n * width * pixel, 1)
    most = max(1, min(height, most))
    fitting = (rows for rows in range(1, most + 1) if rows + height % rows <= most)
    return min(fitting, key=lambda rows: math.ceil(height / rows) + (height % rows > 0))


def over_rows(body: Callable, carry: tuple, height: int, rows: int) -> tuple:
    """``carry = body(start, rows, carry)`` for all rows; the last chunk may have fewer."""
    count, rest = divmod(height, rows)
    if count > 1:
        carry = lax.fori_loop(0, count, lambda j, carry: body(j * rows, rows, carry), carry)
    else:
        carry = body(jnp.int32(0), rows, carry)
    if rest:  # not before the others are done: XLA can give it their workspace
        start, carry = lax.optimization_barrier((jnp.int32(count * rows), carry))
        carry = body(start, rest, carry)
    return carry


def kernel_blocks(kernel: jax.Array, dtype: Any, groups: int) -> jax.Array:
    """[E, kh, kw, C / groups, O] -> [E, K, C / groups, groups, O / groups]

    Without groups, taps and channels are one axis: [E, 1, K * C, 1, O], a plain matrix product.
    """
    e, kh, kw, c, o = kernel.shape
    taps, channels = (1, kh * kw * c) if groups == 1 else (kh * kw, c)
    return kernel.astype(dtype).reshape(e, taps, channels, groups, o // groups)


def multiply(columns: jax.Array, kernel: jax.Array, dtype: Any, static: Static) -> jax.Array:
    """columns [D, N, R, Wo, K * C] times kernel_blocks -> [D, N, R, Wo, O]"""
    y = _einsum("dpkgc,dkcgo->dpgo", _of_columns(columns, kernel), kernel, dtype, static)
    return y.reshape(*columns.shape[:4], math.prod(kernel.shape[3:]))


def multiply_backward_columns(
    dy: jax.Array, kernel: jax.Array, dtype: Any, static: Static
) -> jax.Array:
    columns = _einsum("dpgo,dkcgo->dpkgc", _of_outputs(dy, kernel), kernel, dtype, static)
    return columns.reshape(*dy.shape[:4], math.prod(kernel.shape[1:4]))


def multiply_backward_kernel(
    columns: jax.Array, dy: jax.Array, kernel: jax.Array, dtype: Any, static: Static
) -> jax.Array:
    """The gradient of kernel_blocks for each example, [D, groups, O / groups, K, C / groups]:
    transposed, because a CPU is half as fast again with the long axis of the columns innermost.
    """
    columns, dy = _of_columns(columns, kernel), _of_outputs(dy, kernel)
    examples, parts = dy.shape[0], _parts(columns, math.prod(kernel.shape[1:]) * dtype.itemsize)
    columns, dy = (a.reshape(examples * parts, -1, *a.shape[2:]) for a in (columns, dy))
    dkernel = _einsum("dpgo,dpkgc->dgokc", dy, columns, dtype, static)
    dkernel = dkernel.reshape(examples, parts, *dy.shape[2:], columns.shape[2], columns.shape[4])
    return jnp.sum(dkernel, 1) if parts > 1 else dkernel[:, 0]


def _parts(columns: jax.Array, result_bytes: int) -> int:
    """Into how many products the sum over the pixels of [D, P, K, groups, C] is divided.

    On a GPU XLA divides one of many pixels and few results itself, and where no power of two
    divides the pixels it copies the columns to add some. Parts of a multiple of eight it takes as
    they are; they have 128 pixels at least, and their results at most half the columns' bytes.
    """
    pixels = columns.shape[1]
    if traced_platform() != "cuda" or pixels % 128 == 0:
        return 1
    bytes_of_columns = columns[0].size * columns.dtype.itemsize
    most = min(32, pixels // 128, bytes_of_columns // (2 * result_bytes))
    return max((s for s in range(4, most + 1) if pixels % (8 * s) == 0), default=1)


def _einsum(formula: str, a: jax.Array, b: jax.Array, dtype: Any, static: Static) -> jax.Array:
    """Without axes of one entry, for which XLA on a CPU would transpose the columns."""
    single = set()
    names, result = formula.split("->")
    a_names, b_names = names.split(",")
    if b.shape[0] == 1 != a.shape[0]:  # one kernel for all examples
        b, b_names = b[0], b_names[1:]
    for names, array in ((a_names, a), (b_names, b)):
        single |= {n for n, size in zip(names, array.shape, strict=True) if size == 1}
    a, b = (
        array.reshape([s for n, s in zip(names, array.shape, strict=True) if n not in single])
        for names, array in ((a_names, a), (b_names, b))
    )
    formula = "".join(n for n in f"{a_names},{b_names}->{result}" if n not in single)
    return jnp.einsum(formula, a, b, precision=static.precision, preferred_element_type=dtype)


def _of_columns(columns: jax.Array, kernel: jax.Array) -> jax.Array:
    """[D, N * R * Wo, K, groups, C / groups], K and C as kernel_blocks has them."""
    _, taps, channels, groups, _ = kernel.shape
    pixels = math.prod(columns.shape[1:4])
    return columns.reshape(columns.shape[0], pixels, taps, groups, channels)


def _of_outputs(dy: jax.Array, kernel: jax.Array) -> jax.Array:
    return dy.reshape(dy.shape[0], math.prod(dy.shape[1:4]), *kernel.shape[3:])


def _row(start) -> jax.Array:
    return jnp.reshape(start, 1).astype(jnp.int32)
