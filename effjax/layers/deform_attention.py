"""What the linen and the nnx deformable attention and DCNv3 share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops._common.arguments import (
    as_array,
    as_flag,
    as_integer,
    as_mask,
    as_number,
    as_real_array,
    check_choice,
)
from ..ops._common.dtypes import at_least_float32
from ..ops.deform_attention import dcn_aggregate, ms_deform_attn
from ..ops.deform_attention.arguments import as_shapes, check_pixels
from .deform_conv import check_dtypes


def check_attention(
    features: Any, num_levels: Any, num_heads: Any, num_points: Any, dtype: Any, param_dtype: Any,
    implementation: Any,
) -> None:  # fmt: skip
    """The options of MSDeformAttn."""
    for name, value in (("num_levels", num_levels), ("num_points", num_points)):
        as_integer(name, value, 1)
    _check_division(features, "num_heads", num_heads)
    check_dtypes(dtype, param_dtype)
    check_choice("implementation", implementation, None, "native", "xla")


def check_dcnv3(
    features: Any, kernel_size: Any, dw_kernel_size: Any, kernel_dilation: Any, offset_groups: Any,
    offset_scale: Any, center_feature_scale: Any, remove_center: Any, dtype: Any, param_dtype: Any,
    implementation: Any,
) -> None:  # fmt: skip
    """The options of DCNv3."""
    sizes = dict(kernel_size=kernel_size)
    sizes |= {} if dw_kernel_size is None else dict(dw_kernel_size=dw_kernel_size)
    for name, size in sizes.items():
        if as_integer(name, size, 1) % 2 == 0:
            raise ValueError(f"`{name}` (={size}) must be odd: the output has the input's size.")
    as_integer("kernel_dilation", kernel_dilation, 1)
    _check_division(features, "offset_groups", offset_groups)
    as_number("offset_scale", offset_scale, math.isfinite, "finite")
    as_flag("center_feature_scale", center_feature_scale)
    if as_flag("remove_center", remove_center) and kernel_size == 1:
        raise ValueError("`remove_center` leaves no point of kernel_size=1.")
    check_dtypes(dtype, param_dtype)
    check_choice("implementation", implementation, None, "native", "xla")


def _check_division(features: Any, name: str, parts: Any) -> None:
    if as_integer("features", features, 1) % as_integer(name, parts, 1):
        raise ValueError(f"`features` (={features}) must be a multiple of `{name}` (={parts}).")


def directions(num_heads: int, num_levels: int, num_points: int):
    """The initial bias of offsets: each head looks another way, point p at p + 1 pixels."""

    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        angles = np.arange(num_heads) * (2 * math.pi / num_heads)
        way = np.stack([np.cos(angles), np.sin(angles)], -1)
        way /= np.abs(way).max(-1, keepdims=True)
        far = np.arange(1, num_points + 1)[:, None]
        bias = np.broadcast_to(way[:, None, None] * far, (num_heads, num_levels, num_points, 2))
        return jnp.asarray(bias.reshape(shape), dtype)

    return init


def checked_sequences(
    query: Any, value: Any, spatial_shapes: Any, features: int, num_levels: int
) -> tuple[jax.Array, jax.Array, tuple[tuple[int, int], ...]]:
    """query [N, Q, features], value [N, S, features], and (H, W) of each level."""
    query, value = as_real_array("query", query), as_real_array("value", value)
    for name, a in (("query", query), ("value", value)):
        if a.ndim != 3 or a.shape[-1] != features or a.shape[0] != query.shape[0]:
            raise ValueError(
                f"`{name}` of shape {a.shape} must be [N, length, {features}], N the same in "
                f"`query` {query.shape} and `value` {value.shape}."
            )
    shapes = as_shapes(spatial_shapes)
    if len(shapes) != num_levels:
        raise ValueError(f"`spatial_shapes` has {len(shapes)} levels, but num_levels={num_levels}.")
    check_pixels(value.shape[1], shapes)
    return query, value, shapes


def attend(
    value: jax.Array, offsets: jax.Array, logits: jax.Array, reference_points: Any,
    padding_mask: Any, shapes: tuple[tuple[int, int], ...], num_heads: int, implementation: Any,
) -> jax.Array:  # fmt: skip
    """What lies between MSDeformAttn's linear layers.

    Args:
        value: [N, S, C], projected.
        offsets: [N, Q, M * L * P * 2], in pixels, or shares of half a reference box over P.
        logits: [N, Q, M * L * P], of which a softmax over L * P is taken.

    Returns:
        [N, Q, C].
    """
    n, queries, _ = offsets.shape
    if padding_mask is not None:
        padding_mask = as_mask("padding_mask", padding_mask, "value", value.shape[:2])
        value = jnp.where(padding_mask[..., None], 0, value)
    heads, levels = (n, queries, num_heads), len(shapes)
    count = offsets.shape[-1] // (2 * num_heads * levels)
    offsets = at_least_float32(offsets).reshape(*heads, levels, count, 2)
    weights = jax.nn.softmax(at_least_float32(logits).reshape(*heads, levels * count))
    return ms_deform_attn(
        value.reshape(n, value.shape[1], num_heads, value.shape[-1] // num_heads),
        shapes,
        locations(reference_points, offsets, shapes),
        weights.reshape(offsets.shape[:-1]),
        implementation=implementation,
    )


def locations(
    reference_points: Any, offsets: jax.Array, shapes: tuple[tuple[int, int], ...]
) -> jax.Array:
    """[N, Q, M, L, P, 2], shares of levels, around points [N, Q, L, 2] or boxes [N, Q, L, 4]."""
    points = as_array("reference_points", reference_points)
    n, queries, _, levels, count, _ = offsets.shape
    if points.shape not in ((n, queries, levels, 2), (n, queries, levels, 4)):
        raise ValueError(
            f"`reference_points` of shape {points.shape} must be {(n, queries, levels, 2)}, (x, y) "
            f"in [0, 1] of each level, or {(n, queries, levels, 4)}, (x, y, width, height)."
        )
    points = points.astype(offsets.dtype)[:, :, None, :, None, :]
    if points.shape[-1] == 2:
        sizes = jnp.asarray([(w, h) for h, w in shapes], offsets.dtype)
        unit = 1 / sizes[:, None].reshape(1, 1, 1, levels, 1, 2)
    else:
        unit = points[..., 2:] * (0.5 / count)
    return points[..., :2] + offsets * unit


def aggregate(
    x: jax.Array, offset: jax.Array, logits: jax.Array, offset_groups: int, **options: Any
) -> jax.Array:
    """DCNv3's aggregation with a softmax over the points of each group."""
    points = logits.shape[-1] // offset_groups
    mask = at_least_float32(logits).reshape(*logits.shape[:3], offset_groups, points)
    mask, offset = jax.nn.softmax(mask).reshape(logits.shape), at_least_float32(offset)
    return dcn_aggregate(x, offset, mask, offset_groups=offset_groups, **options)


def center_scaled(
    y: jax.Array, x: jax.Array, features: jax.Array, weight: jax.Array, bias: jax.Array
) -> jax.Array:
    """Each group of y and of x, weighed against each other by a sigmoid of `features`."""
    logits = jnp.einsum("nhwc,gc->nhwg", features, weight)
    scale = jax.nn.sigmoid(logits + bias.reshape(1, 1, 1, -1))
    scale = jnp.repeat(scale, y.shape[-1] // weight.shape[0], axis=-1)
    return y * (1 - scale) + x * scale
