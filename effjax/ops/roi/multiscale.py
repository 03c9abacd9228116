"""roi_align over the levels of a feature pyramid."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import as_integer, describe
from . import arguments
from .api import bins_of_boxes


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
    implementation: Literal["native", "xla"] | None = None,
) -> jax.Array:
    """Takes the features of each box from that level of a pyramid that fits its size.

    ``level = floor(canonical_level + log2(sqrt(area of the box) / canonical_scale))``

    Level k is the one of spatial scale 2**-k; boxes for which there is none are taken from the
    first or the last. The defaults are those of torchvision's detectors (`MultiScaleRoIAlign`).

    Args:
        features: a sequence of [N, H_l, W_l, C], all of one dtype.
        boxes: [N, R, 4], as in `roi_align`; their areas are those in pixels of the image.
        spatial_scales: that of each level: (1 / 4, 1 / 8, 1 / 16, 1 / 32) for strides of 4 to 32.
        canonical_scale, canonical_level: a box of 224 by 224 pixels belongs to level 4.
        output_size, sampling_ratio, aligned, implementation: as in `roi_align`. Native code
            computes each box at its own level; "xla" goes through all boxes at every level.

    Returns:
        y [N, R, rows, columns, C] of the features' dtype.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `roi_align`.

    Kept for the backward pass: the features and the boxes.

    References:
        Lin et al., Feature Pyramid Networks, 2017 (arXiv:1612.03144).
    """
    levels, scales = _levels(features), _scales(spatial_scales)
    if len(levels) != len(scales):
        raise ValueError(
            f"`spatial_scales` has {len(scales)} numbers for {len(levels)} levels in `features`."
        )
    canonical_scale = arguments.scale_of(canonical_scale, "canonical_scale")
    canonical_level = as_integer("canonical_level", canonical_level, -100)
    boxes = lax.stop_gradient(arguments.as_boxes(boxes, levels[0].shape[0]))
    (boxes,) = arguments.in_one_dtype(levels[0], boxes)
    size = boxes[..., 2:] - boxes[..., :2]
    area = jnp.sqrt(jnp.maximum(size[..., 0] * size[..., 1], 0.0))
    # As in torchvision: a box of exactly 112 pixels belongs to the level that it begins.
    wanted = jnp.floor(canonical_level + jnp.log2(area / canonical_scale) + 1e-6)
    own = [-math.log2(scale) for scale in scales]
    wanted = jnp.clip(wanted, own[0], own[-1])[..., None]
    nowhere, y = jnp.full_like(boxes, jnp.nan), None
    for level, scale, k in zip(levels, scales, own, strict=True):
        here = jnp.where(wanted == k, boxes, nowhere)
        y = bins_of_boxes(
            level, here, y, output_size=output_size, spatial_scale=scale,
            sampling_ratio=sampling_ratio, aligned=aligned, implementation=implementation,
        )  # fmt: skip
    assert y is not None  # there is a level
    return y.reshape(*y.shape[:2], *arguments.bins_of(output_size), y.shape[-1])


def _levels(features: Any) -> list[jax.Array]:
    if not isinstance(features, Sequence) or not features:
        raise TypeError(f"`features` must be a sequence of arrays, not {describe(features)}.")
    levels = [arguments.as_images(f"features[{i}]", x) for i, x in enumerate(features)]
    first = levels[0]
    for i, x in enumerate(levels):
        if (x.shape[0], x.shape[3], x.dtype) != (first.shape[0], first.shape[3], first.dtype):
            raise ValueError(
                f"`features[{i}]` ({x.dtype}{list(x.shape)}) must have the images, channels and "
                f"dtype of `features[0]` ({first.dtype}{list(first.shape)})."
            )
    return levels


def _scales(spatial_scales: Any) -> list[float]:
    if not isinstance(spatial_scales, Sequence):
        raise TypeError(
            f"`spatial_scales` must be a sequence of numbers, not {describe(spatial_scales)}."
        )
    scales = [arguments.scale_of(scale, "spatial_scales") for scale in spatial_scales]
    halved = all(b == a / 2 for a, b in itertools.pairwise(scales))
    if not halved or not all(math.log2(scale).is_integer() for scale in scales):
        raise ValueError(
            f"`spatial_scales` (={spatial_scales!r:.80}) must be powers of two, each half of the "
            "one before, as (1 / 4, 1 / 8)."
        )
    return scales
