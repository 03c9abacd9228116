"""What the linen and the nnx deformable convolutions share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops._common.arguments import (
    as_array,
    as_callable,
    as_dtype,
    as_flag,
    as_integer,
    as_padding,
    as_pair,
    as_real_array,
)
from ..ops._common.dtypes import at_least_float32
from ..ops.deform_conv.arguments import check_options


def kernel_shape(
    kernel_size: int | Sequence[int], groups: int, *, features: dict[str, int]
) -> tuple[int, int, int, int]:
    """The shape HWIO of a kernel, checked; `features` are those of x and of y by their names."""
    height, width = as_pair("kernel_size", kernel_size, 1)
    as_integer("feature_group_count", groups, 1)
    for name, value in features.items():
        if as_integer(name, value, 1) % groups:
            raise ValueError(
                f"`{name}` (={value}) must be a multiple of `feature_group_count` (={groups})."
            )
    of_x, of_y = features.values()
    return height, width, of_x // groups, of_y


def convolution_options(
    *, strides: Any, padding: Any, kernel_dilation: Any, feature_group_count: int,
    offset_groups: int, precision: Any, implementation: Any, deterministic: bool,
) -> dict[str, Any]:  # fmt: skip
    """Those of `effjax.deform_conv2d`, checked."""
    groups = as_integer("feature_group_count", feature_group_count, 1)
    check_options(implementation, deterministic, precision, groups)
    return dict(
        strides=as_pair("strides", strides, 1), padding=as_padding(padding),
        kernel_dilation=as_pair("kernel_dilation", kernel_dilation, 1),
        feature_group_count=groups,
        offset_groups=as_integer("offset_groups", offset_groups, 1),
        precision=precision, implementation=implementation, deterministic=deterministic,
    )  # fmt: skip


def check_parameters(
    use_bias: Any, dtype: Any, param_dtype: Any, kernel_init: Any, bias_init: Any
) -> None:
    """How a layer makes its parameters, and what it computes in."""
    as_flag("use_bias", use_bias)
    check_dtypes(dtype, param_dtype)
    as_callable("kernel_init", kernel_init)
    as_callable("bias_init", bias_init)


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    as_dtype("param_dtype", param_dtype)
    if dtype is not None:
        as_dtype("dtype", dtype)


def checked_images(x: Any, channels: int | None = None) -> jax.Array:
    """`x`, images with this many channels."""
    x = as_real_array("x", x)
    if x.ndim != 4 or channels not in (None, x.shape[-1]):
        wanted = f"[N, H, W, {'C' if channels is None else channels}]"
        raise ValueError(f"`x` of shape {x.shape} must be {wanted}.")
    return x


def real_operands(x: Any, kernel: Any, bias: Any, channels: int) -> tuple[Any, Any, Any]:
    """The three before they are cast to one dtype: none loses an imaginary part there."""
    bias = None if bias is None else as_array("bias", bias)
    return checked_images(x, channels), as_array("kernel", kernel), bias


def predicted_features(
    kernel_size: int | Sequence[int], offset_groups: int, modulated: bool
) -> int:
    """Channels of the convolution that predicts offsets, two a tap, and masks, one a tap."""
    height, width = as_pair("kernel_size", kernel_size, 1)
    taps = as_integer("offset_groups", offset_groups, 1) * height * width
    return taps * (3 if modulated else 2)


def split_predicted(predicted: jax.Array, modulated: bool) -> tuple[jax.Array, jax.Array | None]:
    """Offsets, and the mask in (0, 1), at least float32: the first two thirds and the last."""
    predicted = at_least_float32(predicted)
    if not modulated:
        return predicted, None
    offset, mask = jnp.split(predicted, [predicted.shape[-1] * 2 // 3], axis=-1)
    return offset, jax.nn.sigmoid(mask)


def symmetric_padding(
    kernel_size: int | Sequence[int], kernel_dilation: int | Sequence[int]
) -> Any:
    """PyTorch's dilation·(k − 1)/2 at every side."""
    sizes = as_pair("kernel_size", kernel_size, 1)
    dilations = as_pair("kernel_dilation", kernel_dilation, 1)
    return tuple((d * (k - 1) // 2,) * 2 for k, d in zip(sizes, dilations, strict=True))
