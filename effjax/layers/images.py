"""What networks on images have in common: convolution, pooling, initial values, checks."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ..ops._common.arguments import as_array, as_real_array


def as_images(x: ArrayLike, in_channels: int | None) -> jax.Array:
    """Images `[N, H, W, C]`, with so many channels unless that is None."""
    x = as_real_array("x", x)
    if x.ndim != 4:
        raise ValueError(f"`x` must be of shape [batch, height, width, channels], not {x.shape}.")
    if in_channels is not None and x.shape[-1] != in_channels:
        raise ValueError(
            f"`x` of shape {x.shape} has {x.shape[-1]} channels in its last axis, but the "
            f"model was made with in_channels={in_channels}; channels come last (NHWC)."
        )
    return x


def as_image_mask(mask: Any, x: jax.Array) -> jax.Array | None:
    """Which images count, as [N, 1, 1, 1]."""
    if mask is None:
        return None
    mask = as_array("mask", mask, jnp.bool_)
    if mask.shape not in ((x.shape[0],), (x.shape[0], 1, 1, 1)):
        raise ValueError(
            f"`mask` of shape {mask.shape} must say which images count: of shape "
            f"({x.shape[0]},) or ({x.shape[0]}, 1, 1, 1)."
        )
    return mask.reshape(-1, 1, 1, 1)


def compute_dtype(x: DTypeLike, dtype: DTypeLike | None, param_dtype: DTypeLike) -> jnp.dtype:
    """`dtype` where it is given; else half precision of x, or what x and the parameters make."""
    if dtype is not None:
        return jnp.dtype(dtype)
    if jnp.issubdtype(x, jnp.floating) and jnp.dtype(x).itemsize < 4:
        return jnp.dtype(x)
    return promoted(x, param_dtype)


def promoted(*dtypes: DTypeLike) -> jnp.dtype:
    """The dtype that holds all of these, whatever JAX is set to do by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.result_type(*dtypes))


def he_normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """A kernel HWIO from N(0, 2/(kh·kw·out)): He et al. 2015, as in the DenseNet paper's code."""
    return _drawn(key, shape, dtype, 2 / (shape[0] * shape[1] * shape[3]))


def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """A matrix [in, out] from N(0, 1/in)."""
    return _drawn(key, shape, dtype, 1 / shape[0])


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, variance: float) -> jax.Array:
    # Drawn in lengths that are powers of two: every layer of a DenseNet has a shape of its own, and
    # compiling a generator for each of them would take longer than a first epoch.
    size = math.prod(shape)
    values = _normal(key, 1 << (size - 1).bit_length(), jnp.dtype(dtype), math.sqrt(variance))
    if isinstance(values, Tracer):
        return values[:size].reshape(shape)
    return jnp.asarray(np.asarray(values)[:size].reshape(shape))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype: jnp.dtype, std: float) -> jax.Array:
    return std * jax.random.normal(key, (size,), dtype)


def conv(x: jax.Array, kernel: jax.Array, strides: int = 1, padding: int = 0) -> jax.Array:
    """Convolution of NHWC with HWIO in x's dtype."""
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (strides, strides), [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def max_pool(x: jax.Array) -> jax.Array:
    """3x3 with stride 2 and a border of 1."""
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
    )
