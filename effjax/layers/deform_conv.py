"""What the linen and the nnx deformable convolutions share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._convolution import pair


def kernel_shape(
    kernel_size: int | Sequence[int], in_features: int, out_features: int, groups: int
) -> tuple[int, int, int, int]:
    """The shape HWIO of a kernel, checked."""
    height, width = pair("kernel_size", kernel_size, 1)
    for name, value in (("in_features", in_features), ("out_features", out_features)):
        if value < 1 or groups < 1 or value % groups:
            raise ValueError(
                f"`{name}` (={value}) must be a multiple of `feature_group_count` (={groups})."
            )
    return height, width, in_features // groups, out_features


def predicted_features(
    kernel_size: int | Sequence[int], offset_groups: int, modulated: bool
) -> int:
    """Channels of the convolution that predicts offsets, two a tap, and masks, one a tap."""
    height, width = pair("kernel_size", kernel_size, 1)
    if offset_groups < 1:
        raise ValueError(f"`offset_groups` (={offset_groups}) must be at least 1.")
    return offset_groups * height * width * (3 if modulated else 2)


def split_predicted(predicted: jax.Array, modulated: bool) -> tuple[jax.Array, jax.Array | None]:
    """Offsets, and the mask in (0, 1), at least float32: the first two thirds and the last."""
    predicted = predicted.astype(jnp.promote_types(predicted.dtype, jnp.float32))
    if not modulated:
        return predicted, None
    offset, mask = jnp.split(predicted, [predicted.shape[-1] * 2 // 3], axis=-1)
    return offset, jax.nn.sigmoid(mask)


def symmetric_padding(
    kernel_size: int | Sequence[int], kernel_dilation: int | Sequence[int]
) -> Any:
    """PyTorch's dilation·(k − 1)/2 at every side."""
    sizes = pair("kernel_size", kernel_size, 1)
    dilations = pair("kernel_dilation", kernel_dilation, 1)
    return tuple((d * (k - 1) // 2,) * 2 for k, d in zip(sizes, dilations, strict=True))
