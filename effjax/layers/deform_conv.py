"""Deformable convolution layers: code shared by the linen and nnx modules."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.arguments import as_integer
from ..ops._common.dtypes import at_least_float32


def check_inputs(predict_offset: bool, modulated: bool, offset: Any, mask: Any) -> None:
    """Raise ValueError unless offset and mask are passed exactly if the layer needs them."""
    given = (offset is not None, mask is not None)
    if given != (not predict_offset, modulated and not predict_offset):
        names = "neither `offset` nor `mask`"
        if not predict_offset:
            names = "`offset` and `mask`" if modulated else "`offset` and no `mask`"
        remedy = "" if predict_offset else " A layer with predict_offset=True computes them."
        raise ValueError(
            f"Pass {names} to a layer with predict_offset={predict_offset} and "
            f"modulated={modulated}.{remedy}"
        )


def count_predicted_channels(
    kernel_size: Sequence[int], offset_groups: int, modulated: bool
) -> int:
    """Return the number of channels that predict (y, x), and a mask if `modulated`, per tap."""
    height, width = kernel_size
    offset_groups = as_integer("offset_groups", offset_groups, 1)
    return offset_groups * height * width * (3 if modulated else 2)


def split_predicted(predicted: jax.Array, modulated: bool) -> tuple[jax.Array, jax.Array | None]:
    """Split predicted channels into offsets and a mask.

    Args:
        predicted: [N, Ho, Wo, G * K * 3] for G offset groups and K taps, offsets before the logits
            of the mask; [N, Ho, Wo, G * K * 2], the offsets, if not `modulated`.
        modulated: Whether there is a mask.

    Returns:
        offset [N, Ho, Wo, G * K * 2], in pixels, and mask [N, Ho, Wo, G * K] in (0, 1), or None.
        Both are at least float32.
    """
    predicted = at_least_float32(predicted)
    if not modulated:
        return predicted, None
    offset, mask = jnp.split(predicted, [predicted.shape[-1] * 2 // 3], axis=-1)
    return offset, jax.nn.sigmoid(mask)
