"""RoI pooling: roi_align, deformable RoI pooling, and RoIAlign over feature pyramids."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..._common.arguments import (
    as_float_array,
    as_integer,
    as_number,
    as_pair,
    as_real_array,
    check_divides,
    check_shape,
    check_size,
    with_torch_hints,
)
from ..._common.platform import follow_arrays
from . import bins
from .pooling import pool
from .reference import Pooling

Implementation = Literal["native", "xla"] | None


@with_torch_hints
@follow_arrays
def roi_align(
    x: jax.Array,
    boxes: jax.Array,
    *,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = True,
    implementation: Implementation = None,
    deterministic: bool = False,
) -> jax.Array:
    """Average the features of each box over a grid of bins.

    ``y[n, r, i, j] = mean over the samples s of bin (i, j) of box r of x[n, s]``

    Between pixels x is interpolated bilinearly. A sample is zero unless -1 <= y <= H and
    -1 <= x <= W; between the outermost pixels and these bounds it has the value of the nearest
    pixel. The samples are those of torchvision's `roi_align`.

    Args:
        x: [N, H, W, C]; float32, float64, bfloat16 or float16.
        boxes: [N, R, 4], (x1, y1, x2, y2) in pixels of the image from which x was computed, R boxes
            per image, floating point or integer. A box with NaN or infinity has no samples: its
            result is zero, at almost no cost. Pad with NaN to the same number of boxes per image.
            Positions are computed in float32, or in float64 if x or boxes is float64. Boxes get no
            gradient.
        output_size: (rows, columns) of bins, or one integer for both.
        spatial_scale: pixels of x per pixel of the boxes: 1 / 16 at stride 16.
        sampling_ratio: samples along each axis of a bin. 0 (or -1) for one per pixel of x, the size
            of the bin rounded up, which is none for a box with swapped corners.
        aligned: shift boxes by half a pixel, since the center of the first pixel is at 0.5. False
            is the older convention, with boxes of at least one pixel of x.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (all
            platforms), None for native on a CPU if available, on a GPU if `effjax doctor --gpu`
            validated it there (see `effjax.native.set_default`), and XLA otherwise. Forward-mode
            and second derivatives need "xla" and a positive `sampling_ratio`.
        deterministic: on a GPU, sum the gradient of x in a fixed order. On a CPU it always is;
            "xla" on a GPU follows XLA's own ``--xla_gpu_deterministic_ops``.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
        RuntimeError: "native" is not available; the message has the reason.
        NotImplementedError: forward-mode or second derivatives, except with "xla" and a positive
            `sampling_ratio`.

    Kept for the backward pass: x and the boxes. No array has an axis of samples.

    References:
        He et al., Mask R-CNN, 2017 (arXiv:1703.06870).
    """
    size = as_pair("output_size", output_size, 1)
    y = _pool_aligned(
        "roi_align", _as_images("x", x), boxes, size=size, spatial_scale=spatial_scale,
        sampling_ratio=sampling_ratio, aligned=aligned, implementation=implementation,
        deterministic=deterministic,
    )  # fmt: skip
    return _split_bins(y, size)


@with_torch_hints
@follow_arrays
def multiscale_roi_align(
    features: Sequence[jax.Array],
    boxes: jax.Array,
    *,
    output_size: int | Sequence[int],
    spatial_scales: Sequence[float],
    sampling_ratio: int = 2,
    aligned: bool = False,
    canonical_scale: float = 224.0,
    canonical_level: int = 4,
    implementation: Implementation = None,
    deterministic: bool = False,
) -> jax.Array:
    """Apply `roi_align` to each box at the level of a feature pyramid that fits its size.

    ``level = floor(canonical_level + log2(sqrt(area of the box) / canonical_scale))``

    Level k has spatial scale 2**-k. Boxes below the first or above the last level use that level. A
    box with one pair of swapped borders, whose area is negative, has no level: its result is zero.
    The defaults are those of torchvision's detectors (`MultiScaleRoIAlign`).

    Args:
        features: [N, H_l, W_l, C] for each level, all of one dtype.
        boxes: [N, R, 4], as in `roi_align`; areas are in pixels of the image.
        output_size: as in `roi_align`.
        spatial_scales: of each level: (1 / 4, 1 / 8, 1 / 16, 1 / 32) for strides of 4 to 32.
        sampling_ratio: as in `roi_align`.
        aligned: as in `roi_align`.
        canonical_scale: side of a square box at level `canonical_level`, in pixels of the image.
        canonical_level: level of boxes of size `canonical_scale`.
        implementation: as in `roi_align`. Native code computes each box at its own level; "xla"
            goes through all boxes at every level.
        deterministic: as in `roi_align`.

    Returns:
        y [N, R, rows, columns, C] of the features' dtype.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `roi_align`.

    Kept for the backward pass: the features and the boxes.

    References:
        Lin et al., Feature Pyramid Networks, 2017 (arXiv:1612.03144).
    """
    levels, scales = _as_levels(features, spatial_scales)
    size = as_pair("output_size", output_size, 1)
    canonical_scale = _as_scale("canonical_scale", canonical_scale)
    canonical_level = as_integer("canonical_level", canonical_level, -100)
    boxes = lax.stop_gradient(_as_boxes(boxes, levels[0].shape[0]))
    (boxes,) = _promote(levels[0], boxes)
    extent = boxes[..., 2:] - boxes[..., :2]
    area = extent[..., 0] * extent[..., 1]
    side = jnp.where(area < 0, jnp.nan, jnp.sqrt(jnp.maximum(area, 0.0)))
    # The small constant is torchvision's: boxes at the boundary belong to the higher level.
    level_of_box = jnp.floor(canonical_level + jnp.log2(side / canonical_scale) + 1e-6)
    numbers = [-math.log2(scale) for scale in scales]
    level_of_box = jnp.clip(level_of_box, numbers[0], numbers[-1])[..., None]
    # At each level, the boxes of other levels are NaN and add zero. The native kernels add to the
    # result of the other levels in place.
    nowhere, y = jnp.full_like(boxes, jnp.nan), None
    for level, scale, number in zip(levels, scales, numbers, strict=True):
        y = _pool_aligned(
            "multiscale_roi_align", level, jnp.where(level_of_box == number, boxes, nowhere), y,
            size=size, spatial_scale=scale, sampling_ratio=sampling_ratio, aligned=aligned,
            implementation=implementation, deterministic=deterministic,
        )  # fmt: skip
    assert y is not None  # there is at least one level
    return _split_bins(y, size)


def ps_roi_align(
    x: jax.Array,
    boxes: jax.Array,
    *,
    output_size: int,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
) -> jax.Array:
    """Apply `roi_align` such that bin (i, j) reads block ``i * output_size + j`` of the channels.

    x is [N, H, W, output_size**2 * C], and the result [N, R, output_size, output_size, C].
    """
    size = output_size, output_size
    y = _pool_aligned(
        "ps_roi_align", x, boxes, parts=output_size, size=size, spatial_scale=spatial_scale,
        sampling_ratio=sampling_ratio, aligned=True, implementation=None, deterministic=False,
    )  # fmt: skip
    return _split_bins(y, size)


def _pool_aligned(
    operator: str,
    x: jax.Array,
    boxes: Any,
    initial: jax.Array | None = None,
    *,
    size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    implementation: Implementation,
    deterministic: bool,
    parts: int = 1,
) -> jax.Array:
    """Return roi_align with the bins on one axis, [N, R, P, C], added to `initial`."""
    boxes = lax.stop_gradient(_as_boxes(boxes, x.shape[0]))
    (boxes,) = _promote(x, boxes)
    scale, ratio = _as_scale("spatial_scale", spatial_scale), _as_ratio(sampling_ratio)
    options = size, scale, ratio, bool(aligned)
    pooling = Pooling(
        size, parts=parts, margin=1.0, average_inside_only=False, samples=ratio,
        has_position_gradients=False,
    )  # fmt: skip
    return pool(
        operator, x, bins.roi_align_bins, options, (boxes,), pooling, implementation, deterministic,
        initial,
    )  # fmt: skip


@with_torch_hints
@follow_arrays
def deform_roi_pool(
    x: jax.Array,
    boxes: jax.Array,
    offset: jax.Array | None = None,
    *,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    gamma: float = 0.1,
    implementation: Implementation = None,
    deterministic: bool = False,
) -> jax.Array:
    """Average the features of each box over bins that are shifted by offsets.

    ``y[n, r, i, j] = mean over the samples s of bin (i, j) of box r of
    x[n, s + gamma * offset[n, r, i, j] * (width of r, height of r)]``

    This is mmcv's `deform_roi_pool`: boxes are aligned, and offsets are fractions of the box.

    Args:
        x: as in `roi_align`.
        boxes: as in `roi_align`.
        offset: [N, R, rows, columns, 2], (x, y) of each bin; None for zeros. A bin with an infinite
            or NaN offset is zero.
        output_size: as in `roi_align`.
        spatial_scale: as in `roi_align`.
        sampling_ratio: as in `roi_align`.
        gamma: factor of all offsets.
        implementation: as in `roi_align`.
        deterministic: as in `roi_align`.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `roi_align`.

    x and offset get gradients. A sample that is clamped to the outermost pixels has no gradient
    with respect to its position (mmcv's is nonzero). At integer positions the derivative is the
    right-sided one.

    Kept for the backward pass: x, the boxes and offset.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """
    x, size = _as_images("x", x), as_pair("output_size", output_size, 1)
    scale, ratio = _as_scale("spatial_scale", spatial_scale), _as_ratio(sampling_ratio)
    gamma = _as_factor("gamma", gamma)
    boxes = lax.stop_gradient(_as_boxes(boxes, x.shape[0]))
    arrays = (boxes,)
    if offset is not None:
        offset = as_float_array("offset", offset)
        check_shape("offset", offset, (*boxes.shape[:2], *size, 2), "[N, R, rows, columns, 2]")
        arrays += (offset,)
    options = size, scale, ratio, gamma
    pooling = Pooling(
        size, parts=1, margin=1.0, average_inside_only=False, samples=ratio,
        has_position_gradients=offset is not None,
    )  # fmt: skip
    y = pool(
        "deform_roi_pool", x, bins.deformed_bins, options, _promote(x, *arrays), pooling,
        implementation, deterministic,
    )  # fmt: skip
    return _split_bins(y, size)


@with_torch_hints
@follow_arrays
def deform_psroi_pool(
    x: jax.Array,
    boxes: jax.Array,
    offset: jax.Array | None = None,
    *,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    group_size: int = 1,
    part_size: int | None = None,
    sample_per_part: int = 4,
    trans_std: float = 0.0,
    implementation: Implementation = None,
    deterministic: bool = False,
) -> jax.Array:
    """Average position-sensitive features of each box over bins that offsets may shift.

    ``y[n, r, i, j, c] = mean over the samples s of bin (i, j) of box r of
    x[n, s + trans_std * offset[n, r, part of (i, j)] * (width of r, height of r), block, c]``

    This is maskrcnn-benchmark's deformable position-sensitive pooling: boxes are rounded to whole
    pixels, and the mean is over the samples at most half a pixel outside of x.

    Args:
        x: [N, H, W, group_size**2 * C], a block of C channels for each of group_size by group_size
            parts of a box, row by row; bin (i, j) reads block ``(i * group_size // rows) *
            group_size + j * group_size // columns``.
        boxes: as in `roi_align`.
        offset: [N, R, part_size, part_size, 2 * G], (x, y) for each of G groups of the C channels;
            None for zeros.
        output_size: as in `roi_align`.
        spatial_scale: as in `roi_align`.
        group_size: 1 for a single block.
        part_size: parts of a box per axis with their own offsets; by default the rows of bins.
        sample_per_part: samples along each axis of a bin.
        trans_std: factor of all offsets.
        implementation: as in `roi_align`.
        deterministic: as in `roi_align`.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError, RuntimeError: as `roi_align`.
        NotImplementedError: forward-mode or second derivatives without "xla".

    x and offset get gradients, as in `deform_roi_pool`.

    Kept for the backward pass: x, the boxes and offset.

    References:
        Dai et al., R-FCN, 2016 (arXiv:1605.06409); Dai et al., Deformable Convolutional Networks,
        2017 (arXiv:1703.06211).
    """
    x, size = _as_images("x", x), as_pair("output_size", output_size, 1)
    scale, trans_std = _as_scale("spatial_scale", spatial_scale), _as_factor("trans_std", trans_std)
    samples = as_integer("sample_per_part", sample_per_part, 1)
    group_size = as_integer("group_size", group_size, 1)
    part_size = size[0] if part_size is None else as_integer("part_size", part_size, 1)
    check_divides("group_size ** 2", group_size**2, x.shape[-1], "channels of `x`")
    boxes = lax.stop_gradient(_as_boxes(boxes, x.shape[0]))
    arrays = (boxes,)
    if offset is not None:
        offset = as_float_array("offset", offset)
        groups = max(offset.shape[-1] // 2, 1)
        check_shape(
            "offset", offset, (*boxes.shape[:2], part_size, part_size, 2 * groups),
            "[N, R, part_size, part_size, 2 * G]",
        )  # fmt: skip
        channels = x.shape[-1] // group_size**2
        check_divides("offset.shape[-1] // 2", groups, channels, "channels of a block of `x`")
        arrays += (offset,)
    options = size, scale, samples, part_size, trans_std
    pooling = Pooling(
        size, parts=group_size, margin=0.5, average_inside_only=True, samples=samples,
        has_position_gradients=offset is not None,
    )  # fmt: skip
    y = pool(
        "deform_psroi_pool", x, bins.psroi_bins, options, _promote(x, *arrays), pooling,
        implementation, deterministic,
    )  # fmt: skip
    return _split_bins(y, size)


def _split_bins(y: jax.Array, size: tuple[int, int]) -> jax.Array:
    # [N, R, P, C] -> [N, R, rows, columns, C]
    return y.reshape(*y.shape[:2], *size, y.shape[-1])


def _promote(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """Return the others in float32, or in float64 if any array is float64."""
    dtypes = {str(a.dtype) for a in (x, *others)}
    dtype = jnp.dtype("float64" if "float64" in dtypes else "float32")
    return tuple(a.astype(dtype) for a in others)


def _as_images(name: str, value: Any) -> jax.Array:
    x = as_float_array(name, value)
    check_shape(name, x, "NHWC")
    check_size(name, math.prod(x.shape[1:]), "values per image")
    return x


def as_box_array(name: str, value: Any) -> jax.Array:
    """Return boxes as a floating-point array. Integers become float32."""
    boxes = as_real_array(name, value)
    if jnp.issubdtype(boxes.dtype, jnp.integer):
        return boxes.astype(jnp.float32)
    return as_float_array(name, boxes)


def _as_boxes(value: Any, images: int) -> jax.Array:
    boxes = as_box_array("boxes", value)
    check_shape(
        "boxes", boxes, (images, "R", 4), "(x1, y1, x2, y2) of R boxes per image of `x`. For boxes "
        "with the indices of their images see effjax.compat",
    )  # fmt: skip
    return boxes


def _as_levels(features: Any, spatial_scales: Any) -> tuple[list[jax.Array], list[float]]:
    levels = [_as_images(f"features[{i}]", x) for i, x in enumerate(features)]
    scales = [_as_scale("spatial_scales", scale) for scale in spatial_scales]
    if len({(x.shape[::3], x.dtype) for x in levels}) != 1 or len(levels) != len(scales):
        raise ValueError(
            "The arrays of `features` must agree in images, channels and dtype, and have one of "
            f"`spatial_scales` each, but are {[f'{x.dtype}{x.shape}' for x in levels]} with "
            f"spatial_scales={spatial_scales!r:.80}."
        )
    is_halved = all(b == a / 2 for a, b in itertools.pairwise(scales))
    if not is_halved or not math.log2(scales[0]).is_integer():
        raise ValueError(
            f"`spatial_scales` (={spatial_scales!r:.80}) must be powers of two, each half of the "
            "one before, such as (1 / 4, 1 / 8)."
        )
    return levels, scales


def _as_scale(name: str, value: Any) -> float:
    return as_number(name, value, lambda s: 0 < s < 1e30, "positive and below 1e30")


def _as_factor(name: str, value: Any) -> float:
    return as_number(name, value, lambda s: abs(s) < 1e30, "between -1e30 and 1e30")


def _as_ratio(sampling_ratio: Any) -> int:
    return max(as_integer("sampling_ratio", sampling_ratio, -1), 0)
