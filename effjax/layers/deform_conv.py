"""Deformable convolution layers: code shared by the linen and nnx modules."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.dtypes import at_least_float32


def check_inputs(predict_offset: bool, modulated: bool, offset: Any, mask: Any) -> None:
    """Raise an error if offset and mask do not agree with the options of the layer."""
    if predict_offset and not (offset is None and mask is None):
        raise ValueError("`offset` and `mask` must be None with predict_offset=True.")
    if not predict_offset and offset is None:
        raise ValueError("`offset` must be passed. predict_offset=True predicts it from `x`.")
    if not predict_offset and (mask is not None) != modulated:
        raise ValueError(f"`mask` must be passed with modulated=True only, not {modulated}.")


def predicted_features(kernel_size: Sequence[int], offset_groups: int, modulated: bool) -> int:
    """Return the features of the convolution that predicts two offsets, and a mask, per tap."""
    height, width = kernel_size
    return offset_groups * height * width * (3 if modulated else 2)


def split_predicted(predicted: jax.Array, modulated: bool) -> tuple[jax.Array, jax.Array | None]:
    """Split predicted features into offsets and a mask in (0, 1), at least float32.

    The first two thirds are offsets, the last third are logits of the mask.
    """
    predicted = at_least_float32(predicted)
    if not modulated:
        return predicted, None
    offset, mask = jnp.split(predicted, [predicted.shape[-1] * 2 // 3], axis=-1)
    return offset, jax.nn.sigmoid(mask)
