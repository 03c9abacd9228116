"""Frozen matrices in 4 or 8 bits: NF4 and int8, with a scale for each block of a row."""

import functools
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Format = Literal["nf4", "int8"]
FORMATS: tuple[Format, ...] = ("nf4", "int8")
BLOCK = 64  # values of a row that share a scale
INT8_MAX = 127


def _nf4_values() -> np.ndarray:
    # NF4 is the code of QLoRA (Dettmers et al., 2023, arXiv:2305.14314, section 3). Weights are
    # about normal, so codes at quantiles of N(0, 1) are used about equally often. The largest
    # magnitude of a block becomes ±1, and 0 must be exact. So there are 8 positive quantiles, 7
    # negative ones and 0, at equal steps of probability from 1/2 to p. The outermost quantile of 16
    # equal parts would be infinite: p leaves out half a part of 16 on one side and of 15 on the
    # other, on average.
    p = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    positive, negative = (
        [quantile(p + (0.5 - p) * i / count) for i in range(count)] for count in (8, 7)
    )
    return np.array([-q for q in negative] + [0.0] + positive[::-1]) / positive[0]


NF4 = _nf4_values()  # [16], float64, ascending
_NF4_BOUNDS = (NF4[1:] + NF4[:-1]) / 2  # the nearest code is the number of bounds below a value


class Quantized(NamedTuple):
    """A quantized matrix [..., out, in], of B blocks in each row, the last one padded by zeros.

    codes: uint8 [..., out, B * 32] of NF4, where the low bits are the first half of a block, and
        the high bits the second one; or int8 [..., out, B * 64].
    scales: [..., out, B], the largest magnitude of each block. In the dtype of the matrix it is
        exact, so scales need no more than that.
    """

    codes: Any
    scales: Any


def quantize(matrix: jax.Array, form: Format) -> Quantized:
    """Round each value of a matrix [..., out, in] to the nearest value of its block's code.

    A value is the scale times ``NF4[code]``, or times ``code / 127``. A block with NaN or infinity
    becomes NaN.
    """
    *lead, size = matrix.shape
    padded = jnp.pad(matrix, [(0, 0)] * len(lead) + [(0, -size % BLOCK)])
    blocks = padded.reshape(*lead, -1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), -1)
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    blocks, largest = blocks.astype(wide), scales.astype(wide)[..., None]
    if form == "int8":
        codes = jnp.round(blocks / jnp.where(largest == 0, 1, largest) * INT8_MAX)
        return Quantized(codes.astype(jnp.int8).reshape(padded.shape), scales)
    # Products are rounded alike on all devices, which quotients are not.
    codes = sum((blocks > bound * largest).astype(jnp.uint8) for bound in _NF4_BOUNDS.tolist())
    low, high = jnp.split(jnp.asarray(codes), 2, -1)
    return Quantized((low | high << 4).reshape(*lead, -1), scales)


def dequantize(matrix: Quantized, size: int, dtype: Any) -> jax.Array:
    """Return a matrix [..., out, size], computed in float32 or wider and rounded once."""
    codes, scales = matrix
    wide = jnp.promote_types(dtype, jnp.float32)
    factors = scales.astype(wide)[..., None]
    if codes.dtype == jnp.int8:
        values = codes.reshape(*scales.shape, BLOCK).astype(wide)
        factors /= INT8_MAX
    else:
        codes = codes.reshape(*scales.shape, BLOCK // 2)
        values = _look_up(jnp.concatenate([codes & 15, codes >> 4], -1), wide)
    values = (values * factors).astype(dtype)
    return values.reshape(*scales.shape[:-1], -1)[..., :size]


def _look_up(codes: jax.Array, dtype: Any) -> jax.Array:
    """Return the values of NF4 codes."""
    # Each bit halves the candidates. XLA fuses these selections with what uses them, while a gather
    # is slow on TPUs.
    values: list[Any] = [jnp.asarray(value, dtype) for value in NF4]
    for bit in range(4):
        is_set = (codes >> bit & 1).astype(bool)
        values = [jnp.where(is_set, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def quantized_linear(x: jax.Array, matrix: Quantized) -> jax.Array:
    """Return ``x @ W.T`` for x [..., in] and a quantized matrix W [out, in], in the dtype of x.

    W is a constant: it has no gradient. It exists in the dtype of x during each product only. The
    backward pass dequantizes it again, and keeps neither W nor x.
    """
    return _linear(x.shape[-1], x, matrix)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(size: int, x: jax.Array, matrix: Quantized) -> jax.Array:
    return _multiply(size, x, matrix, 1)


def _linear_forward(size, x, matrix):
    return _linear(size, x, matrix), matrix


def _linear_backward(size, matrix, dy):
    return _multiply(size, dy, matrix, 0), None


_linear.defvjp(_linear_forward, _linear_backward)


def _multiply(size: int, x: jax.Array, matrix: Quantized, axis: int) -> jax.Array:
    """Contract the last axis of x with an axis of the matrix."""
    # Without the barrier, XLA would dequantize all matrices of a layer in one kernel, before the
    # first product; and the backward pass would use, so keep, those of the recomputed forward pass.
    x, matrix = lax.optimization_barrier((x, matrix))
    weight = dequantize(matrix, size, x.dtype)
    return lax.dot_general(x, weight, (((x.ndim - 1,), (axis,)), ((), ())))
