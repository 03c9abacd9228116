"""Features of boxes: roi_align, and its variants whose bins are moved by offsets."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
from jax import lax

from .._common.arguments import as_flag, as_integer
from . import arguments, bins
from .bins import Bins
from .pooling import pool
from .reference import Pooling

Implementation = Literal["native", "xla"] | None


def roi_align(
    x: jax.Array,
    boxes: jax.Array,
    *,
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = True,
    implementation: Implementation = None,
) -> jax.Array:
    """Takes the features of boxes from an image: means over a grid of bins in each box.

    ``y[n, r, i, j] = mean over the samples s of bin (i, j) of box r of x[n, s]``

    Between pixels x is interpolated bilinearly. A sample is zero unless -1 <= y <= H and
    -1 <= x <= W; within, it is moved to the outermost pixels where it is beyond them. The samples
    are those of torchvision's `roi_align`.

    Args:
        x: [N, H, W, C]; float32, float64, bfloat16 or float16.
        boxes: [N, R, 4], (x1, y1, x2, y2) in pixels of the image that x was made from, R for each
            image. A box with a NaN or an infinity has no samples: it gives zeros and costs next to
            nothing, so boxes can be filled up with NaN to one number an image. Positions are
            computed in float32, or float64 where x or boxes is. There is no gradient of boxes.
        output_size: (rows, columns) of bins, or one number for both.
        spatial_scale: pixels of x for each pixel of the boxes: 1 / 16 at stride 16.
        sampling_ratio: samples along each axis of a bin; 0 (or -1) for one a pixel of x, as many
            as the bin's size rounded up, where a box whose corners are in the wrong order has none.
        aligned: moves boxes by half a pixel, since the middle of the first pixel is at 0.5. False
            for the older convention, in which boxes are at least one pixel of x large.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (everywhere),
            None for native on a CPU where there is any, else XLA: the CUDA kernels must be asked
            for until they have run on a GPU. Forward mode and second derivatives need "xla" and a
            `sampling_ratio`; the others have the gradient.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
        RuntimeError: "native" where there is none, with the reason.
        NotImplementedError: forward mode or second derivatives, but for "xla" with a
            `sampling_ratio`.

    Kept for the backward pass: x and the boxes. No array has an axis of samples.

    References:
        He et al., Mask R-CNN, 2017 (arXiv:1703.06870).
    """
    y = bins_of_boxes(
        x, boxes, output_size=output_size, spatial_scale=spatial_scale,
        sampling_ratio=sampling_ratio, aligned=aligned, implementation=implementation,
    )  # fmt: skip
    return y.reshape(*y.shape[:2], *arguments.bins_of(output_size), y.shape[-1])


def bins_of_boxes(
    x: jax.Array,
    boxes: jax.Array,
    so_far: jax.Array | None = None,
    *,
    output_size: int | Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    implementation: Implementation,
) -> jax.Array:
    """`roi_align` with the bins on one axis, [N, R, P, C], added to `so_far` if that is given."""
    arguments.check_implementation(implementation)
    x, boxes, of_boxes = _with_boxes(x, boxes, output_size, spatial_scale, sampling_ratio)
    (boxes,) = arguments.in_one_dtype(x, boxes)
    make = _aligned(*of_boxes, as_flag("aligned", aligned))
    pooling = Pooling(of_boxes[0], 1, 1.0, False, of_boxes[2], False)
    return pool(x, make, (boxes,), pooling, implementation, so_far)


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
) -> jax.Array:
    """Takes the features of boxes as `roi_align` does, with every bin moved by an offset.

    ``y[n, r, i, j] = mean over the samples s of bin (i, j) of box r of
    x[n, s + gamma * offset[n, r, i, j] * (width of r, height of r)]``

    This is mmcv's `deform_roi_pool`: boxes are aligned, and offsets are parts of the box.

    Args:
        x, boxes, output_size, spatial_scale, sampling_ratio, implementation: as in `roi_align`.
        offset: [N, R, rows, columns, 2], (x, y) of each bin; None for none. A bin whose offset is
            not finite is zero.
        gamma: a factor for all offsets.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `roi_align`.

    There are gradients of x and offset. Where a sample is moved to the outermost pixels its
    position has none (mmcv gives a value there), and at a whole pixel it has that to the right, or
    below.

    Kept for the backward pass: x, the boxes and offset.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """
    arguments.check_implementation(implementation)
    gamma = arguments.factor_of("gamma", gamma)
    x, boxes, of_boxes = _with_boxes(x, boxes, output_size, spatial_scale, sampling_ratio)
    arrays, size = (boxes,), of_boxes[0]
    if offset is not None:
        wanted = (*boxes.shape[:2], *size, 2)
        arrays += (arguments.as_offset(offset, wanted, "[N, R, rows, columns, 2]"),)
    make = _deformed(*of_boxes, gamma)
    pooling = Pooling(size, 1, 1.0, False, of_boxes[2], offset is not None)
    y = pool(x, make, arguments.in_one_dtype(x, *arrays), pooling, implementation)
    return y.reshape(*y.shape[:2], *size, y.shape[-1])


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
) -> jax.Array:
    """Pools boxes by position: each bin has channels of its own, and may be moved by an offset.

    ``y[n, r, i, j, c] = mean over the samples s of bin (i, j) of box r of
    x[n, s + trans_std * offset[n, r, part of (i, j)] * (width of r, height of r), block, c]``

    This is maskrcnn-benchmark's deformable position-sensitive pooling: boxes are rounded to whole
    pixels, and the mean is of those samples that are at most half a pixel outside of x.

    Args:
        x: [N, H, W, group_size**2 * C]: a block of C channels for each of group_size by group_size
            parts of a box, row by row; bin (i, j) reads block ``(i * group_size // rows) *
            group_size + j * group_size // columns``.
        boxes, output_size, spatial_scale, implementation: as in `roi_align`.
        offset: [N, R, part_size, part_size, 2 * G], (x, y) for each of G groups of the C channels;
            None for none.
        group_size: 1 for no blocks.
        part_size: how finely offsets divide a box; by default one for each row of bins.
        sample_per_part: samples along each axis of a bin.
        trans_std: a factor for all offsets.

    Returns:
        y [N, R, rows, columns, C] of x's dtype.

    Raises:
        TypeError, ValueError, RuntimeError: as `roi_align`.
        NotImplementedError: forward mode or second derivatives without "xla".

    There are gradients of x and offset, at the borders as in `deform_roi_pool`.

    Kept for the backward pass: x, the boxes and offset.

    References:
        Dai et al., R-FCN, 2016 (arXiv:1605.06409); Dai et al., Deformable Convolutional Networks,
        2017 (arXiv:1703.06211).
    """
    arguments.check_implementation(implementation)
    samples = arguments.samples_of("sample_per_part", sample_per_part, 1)
    group_size = as_integer("group_size", group_size, 1)
    trans_std = arguments.factor_of("trans_std", trans_std)
    x, boxes, (size, scale, _) = _with_boxes(x, boxes, output_size, spatial_scale, 0)
    part_size = size[0] if part_size is None else as_integer("part_size", part_size, 1)
    if x.shape[-1] % group_size**2:
        raise ValueError(
            f"`group_size` (={group_size}): its square (={group_size**2}) must divide the "
            f"{x.shape[-1]} channels of `x`."
        )
    channels, arrays = x.shape[-1] // group_size**2, (boxes,)
    if offset is not None:
        wanted = (*boxes.shape[:2], part_size, part_size, -1)
        offset = arguments.as_offset(offset, wanted, "[N, R, part_size, part_size, 2 * G]")
        if channels % (offset.shape[-1] // 2):
            raise ValueError(
                f"The {channels} channels of a block of `x` must be divisible by the "
                f"{offset.shape[-1] // 2} groups of `offset` of shape {offset.shape}."
            )
        arrays += (offset,)
    make = _by_position(size, scale, samples, part_size, trans_std)
    pooling = Pooling(size, group_size, 0.5, True, samples, offset is not None)
    y = pool(x, make, arguments.in_one_dtype(x, *arrays), pooling, implementation)
    return y.reshape(*y.shape[:2], *size, y.shape[-1])


def _with_boxes(x, boxes, output_size, spatial_scale, sampling_ratio) -> tuple:
    """x, the boxes, and (output_size, spatial_scale, sampling_ratio)."""
    x = arguments.as_images("x", x)
    boxes = lax.stop_gradient(arguments.as_boxes(boxes, x.shape[0]))
    of_boxes = (
        arguments.bins_of(output_size),
        arguments.scale_of(spatial_scale),
        arguments.ratio_of(sampling_ratio),
    )
    return x, boxes, of_boxes


# Functions that make bins; one object for equal options, because jit compares them.


@functools.cache
def _aligned(size: tuple[int, int], scale: float, ratio: int, aligned: bool):
    return lambda boxes: bins.of_roi_align(boxes, size, scale, ratio, aligned)


@functools.cache
def _deformed(size: tuple[int, int], scale: float, ratio: int, gamma: float):
    def make(boxes: jax.Array, offset: jax.Array | None = None) -> Bins:
        found = bins.of_roi_align(boxes, size, scale, ratio, True)
        if offset is None:
            return found
        offset = offset.reshape(*found.first.shape)
        return found._replace(first=bins.moved(found, offset, gamma))

    return make


@functools.cache
def _by_position(
    size: tuple[int, int], scale: float, samples: int, part_size: int, trans_std: float
):
    def make(boxes: jax.Array, offset: jax.Array | None = None) -> Bins:
        found = bins.of_deform_psroi_pool(boxes, size, scale, samples)
        if offset is None:
            return found
        of_bins = bins.parts(offset, size, part_size)
        return found._replace(first=bins.moved(found, of_bins, trans_std))

    return make
