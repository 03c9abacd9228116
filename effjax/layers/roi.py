"""What the linen and the nnx modules over boxes share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.roi import arguments
from .arguments import as_real_input


def pool_options(
    output_size: int | Sequence[int], spatial_scale: Any, sampling_ratio: Any, gamma: Any,
    implementation: Any,
) -> dict[str, Any]:  # fmt: skip
    """Those of `effjax.deform_roi_pool`, checked."""
    arguments.check_implementation(implementation)
    return dict(
        output_size=arguments.bins_of(output_size),
        spatial_scale=arguments.scale_of(spatial_scale),
        sampling_ratio=arguments.ratio_of(sampling_ratio),
        gamma=arguments.factor_of("gamma", gamma), implementation=implementation,
    )  # fmt: skip


def checked_features(x: Any, channels: int | None = None) -> jax.Array:
    """`x`, images with this many channels."""
    x = as_real_input("x", x)
    if x.ndim != 4 or channels not in (None, x.shape[-1]):
        wanted = f"[N, H, W, {'C' if channels is None else channels}]"
        raise ValueError(f"`x` of shape {x.shape} must be {wanted}.")
    return x


def of_boxes(y: jax.Array) -> jax.Array:
    """[N, R, rows, columns, C] as the input of a fully connected layer, [N, R, features]."""
    return y.reshape(*y.shape[:2], math.prod(y.shape[2:]))


def as_offset(predicted: jax.Array, output_size: Any) -> jax.Array:
    """[N, R, rows * columns * 2] as offsets, at least float32."""
    predicted = predicted.astype(jnp.promote_types(predicted.dtype, jnp.float32))
    return predicted.reshape(*predicted.shape[:2], *output_size, 2)


def masked(y: jax.Array, predicted: jax.Array) -> jax.Array:
    """y, each bin times the sigmoid of its number in [N, R, rows * columns]."""
    return y * jax.nn.sigmoid(predicted).astype(y.dtype).reshape(*y.shape[:4], 1)
