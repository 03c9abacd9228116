"""BN → ReLU → 1x1 convolution with known statistics, a few image rows at a time.

With known statistics all pixels are independent, so the normalized features and their gradient
never exist at full size. Chunks are of rows, because jit shards the batch and slices of a sharded
axis would be gathered. The loops also protect the recomputation: XLA cannot merge it with the
forward pass. It removes a loop of one iteration, however.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import as_integer
from .._common.platform import known_sizes
from .._common.sharding import zeros
from ..batch_norm.statistics import normalize

# The same on every backend, so that a plan made on one machine describes the program of another.
CHUNK_BYTES = 8 * 2**20


class Bottleneck(NamedTuple):
    """Operands of one bottleneck, which reads the first c channels of a buffer."""

    buffer: jax.Array  # [N, H, W, >= c]
    mean: jax.Array  # [1, 1, 1, c]
    inv: jax.Array  # [1, 1, 1, c]
    scale: jax.Array  # [c]
    bias: jax.Array  # [c]
    kernel: jax.Array  # [1, 1, c, b]


def rows_per_chunk(chunk_size: int | None, shape: tuple[int, ...]) -> int:
    """Return the number of image rows of a chunk, for a buffer of shape [N, H, W, C]."""
    height = shape[1]
    if chunk_size is not None:
        return min(as_integer("chunk_size", chunk_size, 1), height)
    num_chunks = round(4 * math.prod(known_sizes(*shape)) / CHUNK_BYTES)
    return -(-height // max(1, min(height, num_chunks)))


def bottleneck_forward(op: Bottleneck, size: int, precision: Any) -> jax.Array:
    """Return the convolution's output, [N, H, W, b]."""
    buffer, kernel = op.buffer, op.kernel[0, 0].astype(op.buffer.dtype)
    count = _count_chunks(buffer, size)

    def body(j, out):
        start = _start(j, size, buffer)
        _, _, z = _activations(op, buffer, start, size)
        h = lax.dot_general(z, kernel, (((3,), (0,)), ((), ())), precision=precision)
        return lax.dynamic_update_slice(out, h, (0, start, 0, 0))

    # Without the barrier, XLA creates the zeros of all layers at the start and keeps them alive.
    out, buffer = lax.optimization_barrier(
        (zeros((*buffer.shape[:3], kernel.shape[1]), buffer.dtype, buffer), buffer)
    )
    return lax.fori_loop(0, count, body, out)


def bottleneck_backward(
    op: Bottleneck, dout: jax.Array, grad: jax.Array, size: int, precision: Any
) -> tuple:
    """Add ``inv * scale * dz`` to the first c channels of `grad`, in place.

    dz is the gradient before the ReLU. `project` turns `grad` into the gradient of the buffer once
    all readers of its channels have been added.

    Returns:
        `grad`, and ``(dscale [c], dbias [c], dkernel [1, 1, c, b])`` of this device in float32 or
        wider.
    """
    buffer, dtype = op.buffer, op.inv.dtype
    kernel = op.kernel[0, 0].astype(buffer.dtype)
    slope = op.inv * op.scale.astype(dtype)
    count = _count_chunks(buffer, size)
    overlap = count * size != buffer.shape[1]

    def body(j, carry):
        grad, dscale, dbias, dkernel = carry
        start = _start(j, size, buffer)
        x, y, z = _activations(op, buffer, start, size)
        dh = lax.dynamic_slice_in_dim(dout, start, size, 1)
        if overlap:  # the last chunk is moved up to fit; rows of the previous one count as zeros
            is_new = start + jnp.arange(size) >= j * size
            dh = jnp.where(is_new[:, None, None], dh, 0)
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
        previous = lax.dynamic_slice(grad, (0, start, 0, 0), x.shape)
        grad = lax.dynamic_update_slice(
            grad, previous + (dz * slope).astype(grad.dtype), (0, start, 0, 0)
        )
        dscale += jnp.sum(dz * ((x.astype(dtype) - op.mean) * op.inv), (0, 1, 2))
        return grad, dscale, dbias + jnp.sum(dz, (0, 1, 2)), dkernel

    sums = tuple(
        zeros(shape, dtype, dout) for shape in (op.scale.shape, op.bias.shape, kernel.shape)
    )
    grad, dscale, dbias, dkernel = lax.fori_loop(0, count, body, (grad, *sums))
    return grad, (dscale, dbias, dkernel[None, None])


def _activations(op: Bottleneck, buffer: jax.Array, start, size: int) -> tuple:
    """Return the raw features of one chunk, their normalized values, and the rectified ones."""
    n, _, w, _ = buffer.shape
    x = lax.dynamic_slice(buffer, (0, start, 0, 0), (n, size, w, op.mean.shape[-1]))
    y = normalize(x, op.mean, op.inv, op.scale, op.bias)
    return x, y, jax.nn.relu(y).astype(x.dtype)


def _count_chunks(buffer: jax.Array, size: int) -> int:
    return -(-buffer.shape[1] // max(size, 1))


def _start(j, size: int, buffer: jax.Array):
    return jnp.minimum(j * size, buffer.shape[1] - size)
