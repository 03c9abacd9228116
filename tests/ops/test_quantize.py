"""Quantized matrices: codes, errors and products against float64 definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.memory import plan
from effjax.ops.quantize import BLOCK, FORMATS, NF4, dequantize, quantize, quantized_linear
from tests.programs import needs_gpu_compiler

# As published with QLoRA, to compare with what is derived.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
SIZES = 2 * BLOCK, BLOCK + 3  # whole blocks, and a last one with padding


def draw(size=SIZES[1], dtype=np.float32, outputs=5):
    """Return a matrix with a row of zeros."""
    matrix = np.random.default_rng(0).normal(size=(outputs, size))
    matrix[1] = 0
    return jnp.asarray(matrix, dtype)


def test_derived_codes():
    np.testing.assert_allclose(NF4, PUBLISHED, rtol=0, atol=2e-7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
def test_each_value_is_the_nearest_one(form, size):
    matrix = draw(size)
    got = dequantize(quantize(matrix, form), size, jnp.float32)
    wide = np.asarray(matrix, np.float64)
    for first in range(0, size, BLOCK):
        part = wide[:, first : first + BLOCK]
        scale = np.abs(part).max(1)[:, None, None]
        values = scale * (NF4 if form == "nf4" else np.arange(-127, 128) / 127)
        error = np.abs(part[..., None] - values).min(-1)
        difference = np.abs(got[:, first : first + BLOCK] - part)
        np.testing.assert_allclose(difference, error, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMATS)
def test_arrays(form):
    codes, scales = jax.eval_shape(
        functools.partial(quantize, form=form), jax.ShapeDtypeStruct((3, 8, 70), jnp.bfloat16)
    )
    assert codes.dtype == (jnp.uint8 if form == "nf4" else jnp.int8)
    assert codes.shape == (3, 8, 64 if form == "nf4" else 128)
    assert (scales.shape, scales.dtype) == ((3, 8, 2), jnp.bfloat16)


def test_values_of_the_code_do_not_change(x64):
    values = NF4[np.random.default_rng(0).permutation(np.arange(BLOCK) % 16)] * 3
    got = dequantize(quantize(jnp.asarray(values)[None], "nf4"), BLOCK, jnp.float64)
    np.testing.assert_allclose(got[0], values, rtol=1e-15)


@pytest.mark.parametrize("form", FORMATS)
def test_a_block_with_nan_becomes_nan(form):
    matrix = draw(2 * BLOCK).at[0, 0].set(jnp.nan).at[2, BLOCK].set(jnp.inf)
    got = dequantize(quantize(matrix, form), 2 * BLOCK, jnp.float32)
    is_nan = np.isnan(np.asarray(got))
    assert is_nan[0, :BLOCK].all() and is_nan[2, BLOCK:].any()
    assert is_nan.sum() <= 2 * BLOCK


@pytest.mark.parametrize("form", FORMATS)
def test_products(form):
    matrix, x = quantize(draw(), form), jax.random.normal(jax.random.key(0), (2, 3, SIZES[1]))
    weight = np.asarray(dequantize(matrix, SIZES[1], jnp.float32), np.float64)
    y, pull_back = jax.vjp(quantized_linear, x, matrix)
    dy = np.cos(np.arange(y.size)).reshape(y.shape)
    dx, constant = pull_back(jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ weight, rtol=1e-5, atol=1e-5)
    assert not constant.scales.any()


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_one_matrix_is_dequantized_at_a_time():
    size, count, tokens = 1024, 8, 64

    @jax.checkpoint
    def layer(x, matrices):
        for matrix in matrices:
            x = jnp.sin(quantized_linear(x, matrix))
        return x

    matrix = jax.eval_shape(
        functools.partial(quantize, form="nf4"), jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    )
    x = jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)
    planned = plan(jax.grad(lambda *a: layer(*a).sum()), x, [matrix] * count)
    dequantized = [b for b in planned.peak_buffers if b.bytes == 2 * size**2 and "bf16" in b.shape]
    assert len(dequantized) <= 1
    packed = [b for b in planned.peak_buffers if b.shape == f"u8[{size},{size // 2}]"]
    assert len(packed) == count
