"""Layers that pool boxes: code shared by the linen and nnx modules."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.dtypes import at_least_float32


def flatten_bins(y: jax.Array) -> jax.Array:
    """Reshape [N, R, rows, columns, C] to [N, R, C * rows * columns], as PyTorch's weights."""
    return jnp.moveaxis(y, -1, 2).reshape(*y.shape[:2], math.prod(y.shape[2:]))


def as_offset(predicted: jax.Array, output_size: Any) -> jax.Array:
    """Reshape [N, R, 2 * rows * columns] to [N, R, rows, columns, 2], at least float32."""
    predicted = at_least_float32(predicted)
    return jnp.moveaxis(predicted.reshape(*predicted.shape[:2], 2, *output_size), 2, -1)


def apply_mask(y: jax.Array, logits: jax.Array) -> jax.Array:
    """Multiply each bin of y with the sigmoid of its logit in [N, R, rows * columns]."""
    return y * jax.nn.sigmoid(logits).astype(y.dtype).reshape(*y.shape[:4], 1)
