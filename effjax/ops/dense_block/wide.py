"""BN → ReLU → 1x1 convolution of a wide buffer with known statistics, a few rows at a time.

With the statistics known every pixel is independent, so nothing as wide as the buffer exists but
the buffer itself and its gradient. The slices are of rows: jit shards the batch, and slices of a
sharded axis would be gathered. Loops are not merged with one another by the compiler, so the
recompute in a backward pass stays one, on every backend.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.sharding import zeros
from ..batch_norm.statistics import normalize

# The same on every backend, so that a program planned for one from another is what runs there.
SLICE_BYTES = 8 * 2**20


class Wide(NamedTuple):
    """The first c channels of a buffer, how they are normalized, and the kernel they meet."""

    buffer: jax.Array  # [N, H, W, >= c]
    mean: jax.Array  # [1, 1, 1, c]
    inv: jax.Array  # [1, 1, 1, c]
    scale: jax.Array  # [c]
    bias: jax.Array  # [c]
    kernel: jax.Array  # [1, 1, c, b]


def default_chunks(shape: tuple[int, ...]) -> int:
    """How many slices of rows a buffer [N, H, W, C] is worked through in."""
    return max(1, min(shape[1], round(4 * math.prod(shape) / SLICE_BYTES)))


def wide_conv(wide: Wide, num_chunks: int, precision) -> jax.Array:
    """The convolution's output, [N, H, W, b]."""
    buffer, kernel = wide.buffer, wide.kernel[0, 0].astype(wide.buffer.dtype)
    size, count = _slices(buffer.shape[1], num_chunks)

    def body(j, out):
        start = _start(j, size, buffer)
        _, _, z = _activations(wide, buffer, start, size)
        h = lax.dot_general(z, kernel, (((3,), (0,)), ((), ())), precision=precision)
        return lax.dynamic_update_slice(out, h, (0, start, 0, 0))

    # Tied to its input by the barrier: XLA would otherwise make the zeros of every layer at the
    # start and keep them all.
    out, buffer = lax.optimization_barrier(
        (zeros((*buffer.shape[:3], kernel.shape[1]), buffer.dtype, buffer), buffer)
    )
    return lax.fori_loop(0, count, body, out)


def wide_conv_backward(
    wide: Wide, dout: jax.Array, grad: jax.Array, num_chunks: int, precision
) -> tuple:
    """Adds ``inv * scale * dz`` to the first c channels of `grad`, in place.

    Here dz is the gradient before the ReLU. Returns grad and the sums over this device ``(dscale
    [c], dbias [c], dkernel [1, 1, c, b])`` in float32 or wider. `project` turns grad into the
    gradient of the buffer, once the sums of all its readers are known.
    """
    buffer, dtype = wide.buffer, wide.inv.dtype
    kernel = wide.kernel[0, 0].astype(buffer.dtype)
    slope = wide.inv * wide.scale.astype(dtype)
    size, count = _slices(buffer.shape[1], num_chunks)
    overlap = count * size != buffer.shape[1]

    def body(j, carry):
        grad, dscale, dbias, dkernel = carry
        start = _start(j, size, buffer)
        x, y, z = _activations(wide, buffer, start, size)
        dh = lax.dynamic_slice_in_dim(dout, start, size, 1)
        if overlap:  # the last slice begins where it fits: rows already done count for nothing
            new = start + jnp.arange(size) >= j * size
            dh = jnp.where(new[:, None, None], dh, 0)
        dkernel += lax.dot_general(
            z,
            dh,
            (((0, 1, 2), (0, 1, 2)), ((), ())),
            precision=precision,
            preferred_element_type=dtype,
        )
        dz = lax.dot_general(
            dh, kernel, (((3,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype
        )
        dz = jnp.where(y > 0, dz, 0)
        old = lax.dynamic_slice(grad, (0, start, 0, 0), x.shape)
        grad = lax.dynamic_update_slice(
            grad, old + (dz * slope).astype(grad.dtype), (0, start, 0, 0)
        )
        dscale += jnp.sum(dz * ((x.astype(dtype) - wide.mean) * wide.inv), (0, 1, 2))
        return grad, dscale, dbias + jnp.sum(dz, (0, 1, 2)), dkernel

    sums = tuple(
        zeros(shape, dtype, dout) for shape in (wide.scale.shape, wide.bias.shape, kernel.shape)
    )
    grad, dscale, dbias, dkernel = lax.fori_loop(0, count, body, (grad, *sums))
    return grad, (dscale, dbias, dkernel[None, None])


def _activations(wide: Wide, buffer: jax.Array, start, size: int) -> tuple:
    """Of one slice: the raw features, their normalized value and what the convolution reads."""
    n, _, w, _ = buffer.shape
    x = lax.dynamic_slice(buffer, (0, start, 0, 0), (n, size, w, wide.mean.shape[-1]))
    y = normalize(x, wide.mean, wide.inv, wide.scale, wide.bias)
    return x, y, jax.nn.relu(y).astype(x.dtype)


def _slices(height: int, num_chunks: int) -> tuple[int, int]:
    """Rows in a slice and how many slices cover the height."""
    size = -(-height // num_chunks)
    return size, -(-height // max(size, 1))


def _start(j, size: int, buffer: jax.Array):
    return jnp.minimum(j * size, buffer.shape[1] - size)
