"""The operators on boxes in PyTorch's argument orders and layouts, for `effjax.compat`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .._common.arguments import as_flag, as_float_array, as_integer
from .._common.sharding import auto_shard, match_varying, zeros
from . import api, arguments

Pair = int | Sequence[int]


def roi_align(
    input: ArrayLike,
    boxes: ArrayLike | Sequence[ArrayLike],
    output_size: Pair,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> jax.Array:
    """The features of boxes, with the arguments of torchvision's `roi_align`. Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        boxes: `[K, 5]`, the number of its image before each box; or a list of `[L, 4]`, an array
            for each image.
        output_size, spatial_scale, sampling_ratio, aligned: as in `effjax.roi_align`, where boxes
            are aligned by default.

    Returns:
        `[K, C, rows, columns]`; zeros for the box of an image that there is not.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
    """
    x = _nhwc(input)
    options: dict[str, Any] = dict(
        output_size=output_size, spatial_scale=spatial_scale, sampling_ratio=sampling_ratio,
        aligned=as_flag("aligned", aligned),
    )  # fmt: skip
    run = lambda x, boxes: api.roi_align(x, boxes, **options)  # noqa: E731
    if isinstance(boxes, (list, tuple)):
        return _of_list(run, x, boxes)
    return _of_numbered(run, x, _numbered("boxes", boxes), ())


def deform_roi_pool(
    input: ArrayLike,
    rois: ArrayLike,
    offset: ArrayLike | None,
    output_size: Pair,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    gamma: float = 0.1,
) -> jax.Array:
    """Boxes whose bins are moved, with the arguments of mmcv's `deform_roi_pool`.

    Reverse mode only.

    Args:
        input: `[N, C, H, W]`.
        rois: `[K, 5]`, the number of its image before each box.
        offset: `[K, 2, rows, columns]`, x before y; None, or an empty array, for none.
        output_size, spatial_scale, sampling_ratio, gamma: as in `effjax.deform_roi_pool`.

    Returns:
        `[K, C, rows, columns]`.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
    """
    options: dict[str, Any] = dict(
        output_size=output_size, spatial_scale=spatial_scale, sampling_ratio=sampling_ratio,
        gamma=gamma,
    )  # fmt: skip

    def run(x, boxes, *offset):
        return api.deform_roi_pool(x, boxes, *offset, **options)

    rois = _numbered("rois", rois)
    return _of_numbered(run, _nhwc(input), rois, _offsets(offset, rois))


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
    """Position-sensitive pooling with the arguments of maskrcnn-benchmark's `deform_roi_pooling`.

    Reverse mode only.

    Args:
        data: `[N, out_channels·group_size², H, W]`.
        rois: `[K, 5]`, the number of its image before each box.
        offset: `[K, 2·G, part_size, part_size]`, x before y; ignored with `no_trans`.
        spatial_scale, group_size, part_size, sample_per_part, trans_std: as in
            `effjax.deform_psroi_pool`.
        out_size: rows and columns of bins.

    Returns:
        `[K, out_channels, out_size, out_size]`.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
    """
    x, parts = _nhwc(data, "data"), as_integer("group_size", group_size, 1)
    channels = as_integer("out_channels", out_channels, 1)
    if x.shape[-1] != channels * parts**2:
        raise ValueError(
            f"`out_channels` (={channels}) times the square of `group_size` (={parts}) must be the "
            f"{x.shape[-1]} channels of `data`."
        )
    # From (channel, row, column) to blocks of channels.
    x = jnp.moveaxis(x.reshape(*x.shape[:3], channels, parts**2), 3, 4).reshape(x.shape)
    options: dict[str, Any] = dict(
        output_size=as_integer("out_size", out_size, 1), spatial_scale=spatial_scale,
        group_size=parts, part_size=part_size, sample_per_part=sample_per_part,
        trans_std=trans_std,
    )  # fmt: skip

    def run(x, boxes, *offset):
        return api.deform_psroi_pool(x, boxes, *offset, **options)

    rois = _numbered("rois", rois)
    offset = None if as_flag("no_trans", no_trans) else offset
    return _of_numbered(run, x, rois, _offsets(offset, rois))


def _nhwc(value: Any, name: str = "input") -> jax.Array:
    return arguments.as_images(name, value, "[N, C, H, W]").transpose(0, 2, 3, 1)


def _numbered(name: str, value: Any) -> jax.Array:
    boxes = as_float_array(name, value)
    if boxes.ndim != 2 or boxes.shape[1] != 5:
        raise ValueError(
            f"`{name}` of shape {boxes.shape} must be [K, 5]: the number of its image, x1, y1, x2, "
            "y2."
        )
    return lax.stop_gradient(boxes)


def _offsets(value: Any, boxes: jax.Array) -> tuple:
    """[K, 2 * G, rows, columns] as () or ([1, K, rows, columns, 2 * G],)"""
    if value is None or getattr(value, "size", 1) == 0:
        return ()
    offset = as_float_array("offset", value)
    if offset.ndim != 4 or offset.shape[0] != boxes.shape[0]:
        raise ValueError(
            f"`offset` of shape {offset.shape} must be [K, 2 * G, rows, columns], for the "
            f"{boxes.shape[0]} boxes of `rois`."
        )
    return (offset.transpose(0, 2, 3, 1)[None],)


def _of_numbered(run: Callable, x: jax.Array, boxes: jax.Array, offset: tuple) -> jax.Array:
    """[K, C, rows, columns] of numbered boxes, on every device."""
    of_images = functools.partial(_image_by_image, run)
    return auto_shard(of_images, x, PartitionSpec())(x, boxes, *offset)


def _image_by_image(run: Callable, x: jax.Array, boxes: jax.Array, *offset: jax.Array) -> jax.Array:
    """Each image with its own boxes: the others have no samples there."""
    x, boxes, offset = match_varying((x, boxes, offset))
    numbers, boxes = boxes[:, 0], boxes[None, :, 1:]

    def step(y, image):
        n, x = image
        own = (numbers == n.astype(numbers.dtype))[None, :, None]
        own = jnp.where(own, boxes, jnp.full_like(boxes, jnp.nan))
        return y + run(x[None], own, *offset)[0], None

    shape = jax.eval_shape(run, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), boxes, *offset)
    images = jnp.arange(x.shape[0], dtype=jnp.int32), x
    y, _ = lax.scan(step, zeros(shape.shape[1:], x.dtype, x), images)
    return y.transpose(0, 3, 1, 2)


def _of_list(run: Callable, x: jax.Array, boxes: Sequence[Any]) -> jax.Array:
    """[K, C, rows, columns] of boxes for each image, filled up to one number an image."""
    if len(boxes) != x.shape[0]:
        raise ValueError(f"`boxes` has {len(boxes)} arrays for the {x.shape[0]} images of `input`.")
    found = [as_float_array(f"boxes[{i}]", b) for i, b in enumerate(boxes)]
    for i, b in enumerate(found):
        if b.ndim != 2 or b.shape[1] != 4:
            raise ValueError(f"`boxes[{i}]` of shape {b.shape} must be [L, 4]: x1, y1, x2, y2.")
    found = arguments.in_one_dtype(x, *found)
    most = max((b.shape[0] for b in found), default=0)
    nowhere = jnp.full((most, 4), jnp.nan, jnp.float32)
    full = [jnp.concatenate([b, nowhere[b.shape[0] :].astype(b.dtype)]) for b in found]
    y = run(x, jnp.stack(full) if full else nowhere[None][:0])
    none = jnp.zeros((0, *y.shape[2:]), y.dtype)
    y = jnp.concatenate([none, *(own[: b.shape[0]] for own, b in zip(y, found, strict=True))])
    return y.transpose(0, 3, 1, 2)
