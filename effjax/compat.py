"""Operators with PyTorch's signatures, and the original's names of layers.

Images are NCHW and kernels OIHW, as in maskrcnn-benchmark, torchvision and mmcv. The operators
support reverse mode only; use `effjax.deform_conv2d` and `effjax.roi_align` for other derivatives.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.nnx
import jax
from jax.typing import ArrayLike

from . import nnx
from .ops._common.arguments import as_float_array, as_integer, as_pair, conv_output_size
from .ops.deform_conv import deform_conv2d as _nhwc_deform_conv2d
from .ops.roi.nchw import deform_roi_pool as deform_roi_pool
from .ops.roi.nchw import deform_roi_pooling as deform_roi_pooling
from .ops.roi.nchw import roi_align as roi_align

__all__ = [
    "DFConv2d",
    "DeformConv",
    "DeformConvPack",
    "ModulatedDeformConv",
    "ModulatedDeformConvPack",
    "deform_conv",
    "deform_conv2d",
    "deform_roi_pool",
    "deform_roi_pooling",
    "modulated_deform_conv",
    "roi_align",
]

Pair = int | Sequence[int]


def deform_conv2d(
    input: ArrayLike,
    offset: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Deformable convolution with the arguments of torchvision's `deform_conv2d`.

    As there, the shapes say the groups: those of the convolution are `C / weight.shape[1]`, those
    of the offsets `offset.shape[1] / (2·K)`, for K = kh·kw taps. Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        offset: `[N, offset_groups·K·2, Ho, Wo]`, y before x for each tap.
        weight: `[O, C/groups, kh, kw]`.
        bias: `[O]`, or None.
        stride, padding, dilation: one number, or one for each of the two axes.
        mask: `[N, offset_groups·K, Ho, Wo]`, or None for the first version of the paper.

    Returns:
        `[N, O, Ho, Wo]`.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
    """
    arrays = _as_arrays(input, offset, weight, mask, bias)
    channels, of_offsets = arrays[0].shape[1], arrays[1].shape[1]
    _, per_group, *size = arrays[2].shape
    groups = max(1, channels // max(1, per_group))
    offset_groups = max(1, of_offsets // max(1, 2 * math.prod(size)))
    return _convolve(arrays, stride, padding, dilation, groups, offset_groups)


def deform_conv(
    input: ArrayLike,
    offset: ArrayLike,
    weight: ArrayLike,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    im2col_step: int | None = None,
    *,
    deform_groups: int | None = None,
) -> jax.Array:
    """Deformable convolution v1 with the arguments of maskrcnn-benchmark's `deform_conv`.

    Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        offset: `[N, deformable_groups·K·2, Ho, Wo]`, y before x for each tap.
        weight: `[O, C/groups, kh, kw]`.
        stride, padding, dilation, groups, deformable_groups: of the convolution.
        im2col_step: accepted and ignored: memory is bounded by rows, not by images, see
            `effjax.deform_conv2d`.
        deform_groups: mmcv's name of `deformable_groups`.

    Returns:
        `[N, O, Ho, Wo]`.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
    """
    if im2col_step is not None:
        as_integer("im2col_step", im2col_step, 1)
    arrays = _as_arrays(input, offset, weight, None, None)
    offset_groups = _one_spelling(deformable_groups, deform_groups)
    return _convolve(arrays, stride, padding, dilation, groups, offset_groups)


def modulated_deform_conv(
    input: ArrayLike,
    offset: ArrayLike,
    mask: ArrayLike | None,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    *,
    deform_groups: int | None = None,
) -> jax.Array:
    """Deformable convolution v2 with the arguments of maskrcnn-benchmark's
    `modulated_deform_conv`: as `deform_conv`, and `mask` `[N, deformable_groups·K, Ho, Wo]`.

    Reverse mode only.
    """
    arrays = _as_arrays(input, offset, weight, mask, bias)
    offset_groups = _one_spelling(deformable_groups, deform_groups)
    return _convolve(arrays, stride, padding, dilation, groups, offset_groups)


# The layers of maskrcnn-benchmark and mmcv. Unlike the functions above, they have the arguments of
# `effjax.nnx.DeformConv`, and images are NHWC.
DeformConv = functools.partial(nnx.DeformConv, modulated=False, predict_offset=False)
ModulatedDeformConv = functools.partial(nnx.DeformConv, modulated=True, predict_offset=False)
DeformConvPack = functools.partial(nnx.DeformConv, modulated=False, predict_offset=True)
ModulatedDeformConvPack = functools.partial(nnx.DeformConv, modulated=True, predict_offset=True)


class DFConv2d(flax.nnx.Module):
    """Deformable layer of maskrcnn-benchmark's detectors, which predicts its offsets.

    `conv` is an `effjax.nnx.DeformConv` with padding ``kernel_dilation * (kernel_size - 1) / 2`` on
    every side, so that odd kernels keep the size of the image, and without a bias by default.

    Args:
        in_features, out_features, kernel_size, strides, modulated, kernel_dilation, use_bias,
            **options: as in `effjax.nnx.DeformConv`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Pair = 3,
        strides: Pair = 1,
        *,
        modulated: bool = True,
        kernel_dilation: Pair = 1,
        use_bias: bool = False,
        **options: Any,
    ):
        size = as_pair("kernel_size", kernel_size, 1)
        dilation = as_pair("kernel_dilation", kernel_dilation, 1)
        padding = tuple(d * (k - 1) // 2 for k, d in zip(size, dilation, strict=True))
        self.conv = nnx.DeformConv(
            in_features, out_features, size, strides, padding=padding, kernel_dilation=dilation,
            modulated=modulated, predict_offset=True, use_bias=use_bias, **options,
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve `x` `[N, H, W, in_features]`."""
        return self.conv(x)


def _as_arrays(input, offset, weight, mask, bias) -> tuple[Any, ...]:
    arrays = dict(input=input, offset=offset, weight=weight, mask=mask, bias=bias)
    for name, value in arrays.items():
        if value is None and name in ("mask", "bias"):
            continue
        arrays[name] = value = as_float_array(name, value)
        if value.ndim != 4 and name != "bias":
            raise ValueError(f"`{name}` must have four axes, not shape {value.shape}.")
    return tuple(arrays.values())


def _one_spelling(deformable_groups: Any, deform_groups: Any) -> int:
    groups = as_integer("deformable_groups", deformable_groups, 1)
    if deform_groups is None:
        return groups
    if groups not in (1, as_integer("deform_groups", deform_groups, 1)):
        raise ValueError(
            f"`deformable_groups` (={groups}) and `deform_groups` (={deform_groups}) are two names "
            "of one number; give one of them."
        )
    return deform_groups


def _convolve(
    arrays: Sequence[Any], stride: Any, padding: Any, dilation: Any, groups: Any, offset_groups: int
) -> jax.Array:
    """Of what `_as_arrays` returns."""
    input, offset, weight, mask, bias = arrays
    strides, pads = as_pair("stride", stride, 1), as_pair("padding", padding, 0)
    dilations, groups = as_pair("dilation", dilation, 1), as_integer("groups", groups, 1)
    both_sides = tuple((pad, pad) for pad in pads)
    size = conv_output_size(input.shape[2:], weight.shape[2:], strides, both_sides, dilations)
    _check_shapes(arrays, size, groups, offset_groups)
    nhwc = lambda a: a.transpose(0, 2, 3, 1)  # noqa: E731
    y = _nhwc_deform_conv2d(
        nhwc(input), nhwc(offset), weight.transpose(2, 3, 1, 0),
        None if mask is None else nhwc(mask), bias, strides=strides, padding=both_sides,
        kernel_dilation=dilations, feature_group_count=groups, offset_groups=offset_groups,
    )  # fmt: skip
    return y.transpose(0, 3, 1, 2)


def _check_shapes(arrays: Sequence[Any], size: Any, groups: int, offset_groups: int) -> None:
    """By PyTorch's names and in its order of axes."""
    input, offset, weight, mask, bias = arrays
    (images, channels), (outputs, per_group, *taps) = input.shape[:2], weight.shape
    if 0 in input.shape[1:] or 0 in weight.shape:
        raise ValueError(f"`input` {input.shape} or `weight` {weight.shape} is empty.")
    if per_group * groups != channels or outputs % groups:
        raise ValueError(
            f"`weight` of shape {weight.shape} must be [O, C / groups, kh, kw], O a multiple of "
            f"groups, for the {channels} channels of `input` {input.shape} and groups={groups}."
        )
    if channels % offset_groups:
        raise ValueError(
            f"The {channels} channels of `input` must be divisible by the groups of `offset` "
            f"(={offset_groups})."
        )
    if min(size) < 1:
        raise ValueError(
            f"The output would be empty, {size}: `input` of shape {input.shape} is smaller than "
            f"`weight` of shape {weight.shape}, with this padding and dilation."
        )
    each = offset_groups * math.prod(taps)
    want = dict(offset=(images, 2 * each, *size), mask=(images, each, *size), bias=(outputs,))
    for (name, shape), value in zip(want.items(), (offset, mask, bias), strict=True):
        if value is not None and value.shape != shape:
            raise ValueError(f"`{name}` of shape {value.shape} must be {shape}; images are NCHW.")
