"""Operators with PyTorch's signatures.

They take images as NCHW and kernels as OIHW, as in maskrcnn-benchmark, torchvision and mmcv. They
support reverse mode only; use `effjax.deform_conv2d` and `effjax.roi_align` for other derivatives.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .ops import samplers
from .ops._common.arguments import (
    as_float_array,
    as_integer,
    as_pair,
    as_real_array,
    check_divides,
    check_shape,
    conv_output_size,
)
from .ops._common.dtypes import at_least_float32
from .ops._common.sharding import match_varying, with_auto_axes, zeros
from .ops.samplers.deform_conv import deform_conv2d as _deform_conv2d
from .ops.samplers.roi.api import as_box_array

__all__ = [
    "deform_conv",
    "deform_conv2d",
    "deform_roi_pool",
    "deform_roi_pooling",
    "modulated_deform_conv",
    "roi_align",
]


def __dir__() -> list[str]:
    return __all__


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
    """Convolve `input` with the signature of torchvision's `deform_conv2d`.

    As there, groups are inferred from shapes: `C / weight.shape[1]` for the convolution and
    `offset.shape[1] / (2 * K)` for the offsets, with K = kh * kw taps. Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        offset: `[N, offset_groups * K * 2, Ho, Wo]`, y before x for each tap.
        weight: `[O, C/groups, kh, kw]`.
        bias: `[O]`, or None.
        stride: one integer, or one for each spatial axis.
        padding: one integer, or one for each spatial axis.
        dilation: one integer, or one for each spatial axis.
        mask: `[N, offset_groups * K, Ho, Wo]`, a factor for each sample, or None for deformable
            convolution v1.

    Returns:
        `[N, O, Ho, Wo]`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    return _convolve(
        input, offset, weight, mask, bias, stride, padding, dilation, groups=None,
        offset_groups=None,
    )  # fmt: skip


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
    """Convolve `input` with the signature of maskrcnn-benchmark's `deform_conv` (version 1).

    Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        offset: `[N, deformable_groups * K * 2, Ho, Wo]`, y before x for each tap.
        weight: `[O, C/groups, kh, kw]`.
        stride: one integer, or one for each spatial axis.
        padding: one integer, or one for each spatial axis.
        dilation: one integer, or one for each spatial axis.
        groups: groups of the convolution.
        deformable_groups: groups of channels, each with its own offsets.
        im2col_step: ignored. The original computes this many images at a time; effjax computes
            chunks of rows, see `chunk_bytes` in `effjax.deform_conv2d`.
        deform_groups: mmcv's name of `deformable_groups`.

    Returns:
        `[N, O, Ho, Wo]`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    return _convolve(
        input, offset, weight, None, None, stride, padding, dilation, groups,
        _merge_deform_groups(deformable_groups, deform_groups),
    )  # fmt: skip


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
    """Convolve `input` with the signature of maskrcnn-benchmark's `modulated_deform_conv`.

    The arguments are those of `deform_conv`, with `mask` `[N, deformable_groups * K, Ho, Wo]` and
    `bias` `[O]`, both of which may be None. The result and the errors are the same too. Reverse
    mode only.
    """
    return _convolve(
        input, offset, weight, mask, bias, stride, padding, dilation, groups,
        _merge_deform_groups(deformable_groups, deform_groups),
    )  # fmt: skip


def _convolve(
    input, offset, weight, mask, bias, stride, padding, dilation, groups, offset_groups
) -> jax.Array:
    """Transpose to NHWC and HWIO, convolve, and transpose back; None infers a number of groups."""
    x, nhwc_offset = _as_nhwc("input", input), _as_nhwc("offset", offset)
    kernel = _transpose("weight", weight, 2, 3, 1, 0)
    nhwc_mask = None if mask is None else _as_nhwc("mask", mask)
    stride, dilation = as_pair("stride", stride, 1), as_pair("dilation", dilation, 1)
    pads = tuple((pad, pad) for pad in as_pair("padding", padding, 0))
    # The operator checks shapes too, but its errors have NHWC and its own names.
    (n, *image, channels), (*size, inputs, outputs) = x.shape, kernel.shape
    if groups is None:
        groups = max(1, channels // max(1, inputs))
    groups = as_integer("groups", groups, 1)
    check_shape("weight", weight, ("O", channels // groups, *size), "[O, C / groups, kh, kw]")
    check_divides("groups", groups, channels, "channels of `input`")
    check_divides("groups", groups, outputs, "outputs of `weight`")
    pixels = conv_output_size(image, size, stride, pads, dilation, "input")
    taps = math.prod(size)
    if offset_groups is None:
        offset_groups = max(nhwc_offset.shape[-1] // (2 * taps), 1)
    offset_groups = as_integer("deformable_groups", offset_groups, 1)
    check_divides("deformable_groups", offset_groups, channels, "channels of `input`")
    points = offset_groups * taps
    meaning = f"Ho, Wo] for K = {taps} taps and G = {offset_groups} offset groups"
    check_shape("offset", offset, (n, points * 2, *pixels), f"[N, G * K * 2, {meaning}")
    if mask is not None:
        check_shape("mask", mask, (n, points, *pixels), f"[N, G * K, {meaning}")
    y = _deform_conv2d(
        x, nhwc_offset, kernel, nhwc_mask, bias, strides=stride, padding=pads,
        kernel_dilation=dilation, feature_group_count=groups, offset_groups=offset_groups,
    )  # fmt: skip
    return y.transpose(0, 3, 1, 2)


def _merge_deform_groups(deformable_groups: int, deform_groups: int | None) -> int:
    if deform_groups is None:
        return deformable_groups
    if deformable_groups not in (1, deform_groups):
        raise ValueError(
            f"`deformable_groups` (={deformable_groups}) and `deform_groups` (={deform_groups}) "
            "are two names of one number; pass one of them."
        )
    return deform_groups


def roi_align(
    input: ArrayLike,
    boxes: ArrayLike | Sequence[ArrayLike],
    output_size: Pair,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> jax.Array:
    """Average features of boxes with the signature of torchvision's `roi_align`.

    Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        boxes: `[K, 5]`, each box preceded by the index of its image, whose fraction is ignored;
            or a list of `[L, 4]`, one array per image.
        output_size: as in `effjax.roi_align`.
        spatial_scale: as in `effjax.roi_align`.
        sampling_ratio: as in `effjax.roi_align`.
        aligned: as in `effjax.roi_align`, where the default is True.

    Returns:
        `[K, C, rows, columns]`; zeros for boxes whose image does not exist.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    x = _as_nhwc("input", input)
    pool = functools.partial(
        samplers.roi_align, output_size=output_size, spatial_scale=spatial_scale,
        sampling_ratio=sampling_ratio, aligned=aligned,
    )  # fmt: skip
    if isinstance(boxes, (list, tuple)):
        return _pool_lists(pool, x, boxes)
    return _pool_indexed(pool, x, "boxes", boxes)


def deform_roi_pool(
    input: ArrayLike,
    rois: ArrayLike,
    offset: ArrayLike | None,
    output_size: Pair,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    gamma: float = 0.1,
) -> jax.Array:
    """Average features of boxes over bins moved by offsets, as mmcv's `deform_roi_pool`.

    The signature is that of mmcv. Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        rois: `[K, 5]`, each box preceded by the index of its image.
        offset: `[K, 2, rows, columns]`, x before y; None, or an empty array, for none.
        output_size: as in `effjax.deform_roi_pool`.
        spatial_scale: as in `effjax.deform_roi_pool`.
        sampling_ratio: as in `effjax.deform_roi_pool`.
        gamma: as in `effjax.deform_roi_pool`.

    Returns:
        `[K, C, rows, columns]`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    pool = functools.partial(
        samplers.deform_roi_pool, output_size=output_size, spatial_scale=spatial_scale,
        sampling_ratio=sampling_ratio, gamma=gamma,
    )  # fmt: skip
    x = _as_nhwc("input", input)
    size = as_pair("output_size", output_size, 1)
    return _pool_indexed(pool, x, "rois", rois, offset, (2, *size))


def deform_roi_pooling(
    data: ArrayLike,
    rois: ArrayLike,
    offset: ArrayLike | None,
    spatial_scale: float,
    out_size: int,
    out_channels: int,
    no_trans: bool,
    group_size: int = 1,
    part_size: int | None = None,
    sample_per_part: int = 4,
    trans_std: float = 0.0,
) -> jax.Array:
    """Average position-sensitive features of boxes.

    This has the signature of maskrcnn-benchmark's `deform_roi_pooling`. Reverse mode only.

    Args:
        data: `[N, out_channels * group_size**2, H, W]`.
        rois: `[K, 5]`, each box preceded by the index of its image.
        offset: `[K, 2 * G, part_size, part_size]`, x before y for each of G groups of the
            out_channels; ignored with `no_trans`.
        spatial_scale: as in `effjax.deform_psroi_pool`.
        out_size: rows and columns of bins.
        out_channels: channels of the result.
        no_trans: if True, do not move bins.
        group_size: as in `effjax.deform_psroi_pool`.
        part_size: as in `effjax.deform_psroi_pool`.
        sample_per_part: as in `effjax.deform_psroi_pool`.
        trans_std: as in `effjax.deform_psroi_pool`.

    Returns:
        `[K, out_channels, out_size, out_size]`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    # A box is divided into group_size**2 parts, and each part reads its own block of channels.
    # The original orders channels as (out_channels, blocks), effjax as (blocks, out_channels).
    x = _as_nhwc("data", data)
    channels = out_channels * as_integer("group_size", group_size, 1) ** 2
    check_shape("data", data, ("N", channels, "H", "W"), "out_channels * group_size**2 channels")
    blocks = x.reshape(*x.shape[:3], out_channels, group_size**2)
    x = jnp.moveaxis(blocks, 3, 4).reshape(x.shape)
    pool = functools.partial(
        samplers.deform_psroi_pool, output_size=out_size,
        spatial_scale=spatial_scale, group_size=group_size, part_size=part_size,
        sample_per_part=sample_per_part, trans_std=trans_std,
    )  # fmt: skip
    offset = None if no_trans else offset
    part_size = out_size if part_size is None else part_size
    return _pool_indexed(pool, x, "rois", rois, offset, ("2 * G", part_size, part_size))


def _as_nhwc(name: str, value: Any) -> jax.Array:
    return _transpose(name, value, 0, 2, 3, 1)


def _transpose(name: str, value: Any, *axes: int) -> jax.Array:
    x = as_float_array(name, value)
    if x.ndim != 4:
        raise ValueError(f"`{name}` of shape {x.shape} must have four axes.")
    return x.transpose(axes)


def _split_rois(name: str, value: Any) -> tuple[jax.Array, jax.Array]:
    """Return the indices of the images, integers [K], and the boxes [K, 4] of rois [K, 5]."""
    rois = as_real_array(name, value)
    check_shape(name, rois, ("K", 5), "index of the image, x1, y1, x2, y2")
    index = rois[:, 0]
    if not jnp.issubdtype(index.dtype, jnp.integer):
        # Compared as floats, the numbers 256 and 257 of images would be equal in bfloat16. The
        # originals truncate the index to an integer. NaN and numbers that do not fit are no image.
        index = at_least_float32(index)
        index = jnp.where(jnp.abs(index) < 2.0**31, index, -1).astype(jnp.int32)
    boxes = as_box_array(name, rois[:, 1:])
    return index, lax.stop_gradient(boxes)  # boxes get no gradient, as in the originals


def _pool_indexed(
    pool: Callable, x: jax.Array, name: str, rois: Any, offset: Any = None, shape: tuple = ()
) -> jax.Array:
    """Pool rois [K, 5] of images x [N, H, W, C]; return [K, C, rows, columns].

    `offset`, if not None or empty, is [K, *shape], and [1, K, rows, columns, 2 * G] for `pool`.
    """
    arrays = _split_rois(name, rois)
    if offset is not None and getattr(offset, "size", 1):
        arrays += (_as_nhwc("offset", offset)[None],)
        check_shape("offset", offset, (rois.shape[0], *shape))
    pool_images = functools.partial(_pool_image_by_image, pool)
    # On a mesh with Explicit axes the result is replicated: the boxes of one device's images may be
    # anywhere among the K boxes.
    return with_auto_axes(pool_images, x, PartitionSpec())(x, *arrays)


def _pool_image_by_image(
    pool: Callable, x: jax.Array, indices: jax.Array, boxes: jax.Array, *offset: jax.Array
) -> jax.Array:
    # The operators pool the same number of boxes from each image. So this loop passes all K boxes
    # with each image and replaces those of other images by NaN: such boxes have no samples, cost
    # almost nothing, and add zero to the sum over the images.
    x, indices, boxes, offset = match_varying((x, indices, boxes[None], offset))

    def step(y, image):
        n, x = image
        own_boxes = jnp.where((indices == n)[None, :, None], boxes, jnp.full_like(boxes, jnp.nan))
        return y + pool(x[None], own_boxes, *offset)[0], None

    shape = jax.eval_shape(pool, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), boxes, *offset)
    images = jnp.arange(x.shape[0], dtype=jnp.int32), x
    y, _ = lax.scan(step, zeros(shape.shape[1:], x.dtype, x), images)
    return y.transpose(0, 3, 1, 2)


def _pool_lists(pool: Callable, x: jax.Array, boxes: Sequence[Any]) -> jax.Array:
    """Pool a list of boxes [L, 4], one array for each image; return [sum of L, C, rows, columns].

    The arrays are padded with NaN to the same number of boxes, and the results are cut again.
    """
    if len(boxes) != x.shape[0]:
        raise ValueError(
            f"`boxes` has {len(boxes)} arrays, but must have one for each of the {x.shape[0]} "
            "images of `input`."
        )
    arrays = [as_box_array(f"boxes[{i}]", b) for i, b in enumerate(boxes)]
    for i, b in enumerate(arrays):
        check_shape(f"boxes[{i}]", b, ("L", 4), "x1, y1, x2, y2")
    is_float64 = "float64" in (x.dtype, *(b.dtype for b in arrays))
    arrays = [b.astype(jnp.float64 if is_float64 else jnp.float32) for b in arrays]
    longest = max((b.shape[0] for b in arrays), default=0)
    padding = jnp.full((longest, 4), jnp.nan, jnp.float32)
    padded = [jnp.concatenate([b, padding[b.shape[0] :].astype(b.dtype)]) for b in arrays]
    y = pool(x, jnp.stack(padded) if padded else padding[None][:0])
    empty = jnp.zeros((0, *y.shape[2:]), y.dtype)  # the result of an empty list
    y = jnp.concatenate([empty, *(own[: b.shape[0]] for own, b in zip(y, arrays, strict=True))])
    return y.transpose(0, 3, 1, 2)
