"""Operators with PyTorch's signatures.

They take images as NCHW and kernels as OIHW, as in maskrcnn-benchmark, torchvision and mmcv. They
support reverse mode only; use `effjax.deform_conv2d` and `effjax.roi_align` for other derivatives.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .ops import samplers
from .ops._common.arguments import (
    as_float_array,
    as_integer,
    as_number,
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
from .ops.samplers.roi.api import ps_roi_align as _ps_roi_align

__all__ = [
    "MultiScaleRoIAlign",
    "deform_conv",
    "deform_conv2d",
    "deform_roi_pool",
    "deform_roi_pooling",
    "modulated_deform_conv",
    "nms",
    "ps_roi_align",
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
    return _pool_boxes(pool, x, boxes)


def ps_roi_align(
    input: ArrayLike,
    boxes: ArrayLike | Sequence[ArrayLike],
    output_size: Pair,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
) -> jax.Array:
    """Average position-sensitive features with the signature of torchvision's `ps_roi_align`.

    Bin (i, j) of channel c reads channel ``(c * size + i) * size + j``. The samples are those of
    `roi_align` with ``aligned=True``. Reverse mode only.

    Args:
        input: `[N, C * size**2, H, W]`.
        boxes: as in `roi_align`.
        output_size: size, the rows and columns of bins; a pair must have two equal numbers.
        spatial_scale: as in `effjax.roi_align`.
        sampling_ratio: as in `effjax.roi_align`.

    Returns:
        `[K, C, size, size]`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    size, columns = as_pair("output_size", output_size, 1)
    if size != columns:
        raise ValueError(f"`output_size` (={output_size}) must have as many rows as columns.")
    x = _as_nhwc("input", input)
    check_divides("output_size ** 2", size**2, x.shape[3], "channels of `input`")
    pool = functools.partial(
        _ps_roi_align, output_size=size, spatial_scale=spatial_scale, sampling_ratio=sampling_ratio
    )
    return _pool_boxes(pool, _with_blocks_first(x, size), boxes)


class MultiScaleRoIAlign:
    """Pooling of boxes over a feature pyramid, as torchvision's `MultiScaleRoIAlign`.

    Each box is pooled at the level that fits its size. The scales of the levels are those powers of
    two that are nearest to the ratios of their heights and widths and the largest image's. Use
    `effjax.multiscale_roi_align` for arrays `[N, R, 4]` of boxes and known scales.

    Args:
        featmap_names: the levels to use, from the largest to the smallest.
        output_size: as in `effjax.roi_align`.
        sampling_ratio: as in `effjax.roi_align`.
        canonical_scale: as in `effjax.multiscale_roi_align`.
        canonical_level: as in `effjax.multiscale_roi_align`.
    """

    def __init__(
        self,
        featmap_names: Sequence[str],
        output_size: Pair,
        sampling_ratio: int,
        *,
        canonical_scale: int = 224,
        canonical_level: int = 4,
    ):
        self.featmap_names = list(featmap_names)
        self.options = dict(
            output_size=output_size, sampling_ratio=sampling_ratio,
            canonical_scale=canonical_scale, canonical_level=canonical_level,
        )  # fmt: skip

    def __call__(
        self,
        x: Mapping[str, ArrayLike],
        boxes: Sequence[ArrayLike],
        image_shapes: Sequence[tuple[int, int]],
    ) -> jax.Array:
        """Pool a list of boxes.

        Args:
            x: `[N, C, H, W]` for each level; levels that are not in `featmap_names` are not used.
            boxes: one array `[L, 4]` per image.
            image_shapes: (height, width) of each image before it was padded.

        Returns:
            `[sum of L, C, rows, columns]`.

        Raises:
            KeyError: for a level that is missing.
            TypeError, ValueError: for arguments of a wrong type, dtype or shape, and for levels
                whose scales are not those of a pyramid.
        """
        levels = [_as_nhwc(f"x[{name!r}]", x[name]) for name in self.featmap_names]
        largest = [max(shape[axis] for shape in image_shapes) for axis in range(2)]
        scales = []
        for name, level in zip(self.featmap_names, levels, strict=True):
            ratios = zip(level.shape[1:3], largest, strict=True)
            by_axis = [2.0 ** round(math.log2(size / image)) for size, image in ratios]
            if by_axis[0] != by_axis[1]:
                raise ValueError(
                    f"`x[{name!r}]` of {level.shape[1:3]} pixels must have one scale for an image "
                    f"of {tuple(largest)}, but has {by_axis[0]} and {by_axis[1]}."
                )
            scales.append(by_axis[0])
        pool = functools.partial(
            samplers.multiscale_roi_align, spatial_scales=scales, **self.options
        )
        return _pool_lists(pool, levels, boxes)


def nms(
    boxes: ArrayLike, scores: ArrayLike, iou_threshold: float, max_outputs: int | None = None
) -> jax.Array:
    """Choose boxes that do not overlap, with the signature of torchvision's `nms`.

    From the highest score to the lowest, a box is chosen unless its intersection over union with a
    box chosen before is greater than `iou_threshold`. No array has an entry for each pair of boxes.

    Args:
        boxes: `[N, 4]`, (x1, y1, x2, y2).
        scores: `[N]`. A box with NaN, or with a score of -inf or NaN, is padding: never chosen.
        iou_threshold: 0 to 1.
        max_outputs: length of the result; N by default. The loop ends at this number of boxes.

    Returns:
        Indices of the chosen boxes, int32 `[max_outputs]`, from the highest score to the lowest,
        then -1. Its length is static, because jit needs it; ``indices[indices >= 0]`` outside of
        jit is torchvision's result. Compare boxes of several classes by adding a different large
        offset to those of each class.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
    """
    boxes, scores = as_box_array("boxes", boxes), as_real_array("scores", scores)
    check_shape("boxes", boxes, ("N", 4), "x1, y1, x2, y2")
    check_shape("scores", scores, (boxes.shape[0],), "one for each box")
    threshold = as_number("iou_threshold", iou_threshold, lambda t: 0 <= t <= 1, "from 0 to 1")
    count = boxes.shape[0] if max_outputs is None else as_integer("max_outputs", max_outputs, 1)
    choose = functools.partial(_choose_boxes, threshold=threshold, count=count)
    boxes, scores = lax.stop_gradient((at_least_float32(boxes), at_least_float32(scores)))
    return with_auto_axes(choose, boxes, PartitionSpec())(boxes, scores)


def _choose_boxes(boxes: jax.Array, scores: jax.Array, threshold: float, count: int) -> jax.Array:
    start, stop = boxes[:, :2], boxes[:, 2:]
    area = jnp.prod(stop - start, -1)
    is_padding = jnp.isnan(scores) | jnp.isnan(boxes).any(-1)
    scores = jnp.where(is_padding, -jnp.inf, scores)
    chosen = jnp.full(count, -1, jnp.int32)
    chosen, scores, start, stop, area = match_varying((chosen, scores, start, stop, area))

    def is_unfinished(state):
        n, _, scores = state
        return (n < count) & jnp.any(scores > -jnp.inf)

    def choose(state):
        n, chosen, scores = state
        best = jnp.argmax(scores)  # the first of equal scores, as in a stable sort
        overlap = jnp.minimum(stop, stop[best]) - jnp.maximum(start, start[best])
        intersection = jnp.prod(jnp.maximum(overlap, 0), -1)
        iou = intersection / (area + area[best] - intersection)
        scores = jnp.where(iou > threshold, -jnp.inf, scores).at[best].set(-jnp.inf)
        return n + 1, chosen.at[n].set(best.astype(jnp.int32)), scores

    if not scores.size:
        return chosen
    # For the planner.
    with set_xla_metadata(max_trip_count=min(count, scores.size)):
        return lax.while_loop(is_unfinished, choose, (jnp.int32(0), chosen, scores))[1]


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
    x = _as_nhwc("data", data)
    channels = out_channels * as_integer("group_size", group_size, 1) ** 2
    check_shape("data", data, ("N", channels, "H", "W"), "out_channels * group_size**2 channels")
    x = _with_blocks_first(x, group_size)
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


def _with_blocks_first(x: jax.Array, parts: int) -> jax.Array:
    # Each of parts**2 parts of a box reads its own block of channels. The originals order channels
    # as (channels, blocks), effjax as (blocks, channels).
    blocks = x.reshape(*x.shape[:3], -1, parts**2)
    return jnp.moveaxis(blocks, 3, 4).reshape(x.shape)


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


def _pool_boxes(pool: Callable, x: jax.Array, boxes: Any) -> jax.Array:
    if isinstance(boxes, (list, tuple)):
        return _pool_lists(pool, x, boxes)
    return _pool_indexed(pool, x, "boxes", boxes)


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


def _pool_lists(pool: Callable, x: Any, boxes: Sequence[Any]) -> jax.Array:
    """Pool a list of boxes [L, 4], one array for each image; return [sum of L, C, rows, columns].

    x is an array of images, or a list of levels. The arrays of boxes are padded with NaN to the
    same number of boxes, and the results are cut again.
    """
    images = jax.tree.leaves(x)[0]
    if len(boxes) != images.shape[0]:
        raise ValueError(
            f"`boxes` has {len(boxes)} arrays, but must have one for each of the {images.shape[0]} "
            "images."
        )
    arrays = [as_box_array(f"boxes[{i}]", b) for i, b in enumerate(boxes)]
    for i, b in enumerate(arrays):
        check_shape(f"boxes[{i}]", b, ("L", 4), "x1, y1, x2, y2")
    is_float64 = "float64" in (images.dtype, *(b.dtype for b in arrays))
    arrays = [b.astype(jnp.float64 if is_float64 else jnp.float32) for b in arrays]
    longest = max((b.shape[0] for b in arrays), default=0)
    padding = jnp.full((longest, 4), jnp.nan, jnp.float32)
    padded = [jnp.concatenate([b, padding[b.shape[0] :].astype(b.dtype)]) for b in arrays]
    y = pool(x, jnp.stack(padded) if padded else padding[None][:0])
    empty = jnp.zeros((0, *y.shape[2:]), y.dtype)  # the result of an empty list
    y = jnp.concatenate([empty, *(own[: b.shape[0]] for own, b in zip(y, arrays, strict=True))])
    return y.transpose(0, 3, 1, 2)
