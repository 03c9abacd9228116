"""What the linen and the nnx modules over boxes share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.dtypes import at_least_float32
from ..ops.roi import arguments


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


def of_boxes(y: jax.Array) -> jax.Array:
    """[N, R, rows, columns, C] as the input of a fully connected layer, [N, R, C * rows * columns]:
    in PyTorch's order, so that its weights fit.
    """
    return jnp.moveaxis(y, -1, 2).reshape(*y.shape[:2], math.prod(y.shape[2:]))


def as_offset(predicted: jax.Array, output_size: Any) -> jax.Array:
    """[N, R, 2 * rows * columns] as offsets [N, R, rows, columns, 2], at least float32."""
    predicted = at_least_float32(predicted)
    return jnp.moveaxis(predicted.reshape(*predicted.shape[:2], 2, *output_size), 2, -1)


def masked(y: jax.Array, predicted: jax.Array) -> jax.Array:
    """y, each bin times the sigmoid of its number in [N, R, rows * columns]."""
    return y * jax.nn.sigmoid(predicted).astype(y.dtype).reshape(*y.shape[:4], 1)
