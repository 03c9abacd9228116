"""Deformable attention and DCNv3 layers: code shared by the linen and nnx modules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops._common.arguments import as_array, as_mask
from ..ops._common.dtypes import at_least_float32
from ..ops.samplers.deform_attention import dcn_aggregate, ms_deform_attn
from ..ops.samplers.deform_attention.api import as_spatial_shapes


def offset_bias_init(num_heads: int, num_levels: int, num_points: int):
    """Return the initializer of the offsets' bias.

    Each head has its own direction. Its point p is at p + 1 pixels in that direction.
    """

    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        angles = np.arange(num_heads) * (2 * math.pi / num_heads)
        directions = np.stack([np.cos(angles), np.sin(angles)], -1)
        directions /= np.abs(directions).max(-1, keepdims=True)
        bias = directions[:, None, None] * np.arange(1, num_points + 1)[:, None]
        bias = np.broadcast_to(bias, (num_heads, num_levels, num_points, 2))
        return jnp.asarray(bias.reshape(shape), dtype)

    return init


def check_shapes(spatial_shapes: Any, num_levels: int) -> tuple[tuple[int, int], ...]:
    """Return (H, W) of each level."""
    shapes = as_spatial_shapes(spatial_shapes)
    if len(shapes) != num_levels:  # the offsets would be split differently
        raise ValueError(
            f"`spatial_shapes` must have num_levels (={num_levels}) entries, not {len(shapes)}."
        )
    return shapes


def attend(
    value: jax.Array, offsets: jax.Array, logits: jax.Array, reference_points: Any,
    padding_mask: Any, shapes: tuple[tuple[int, int], ...], num_heads: int, **options: Any,
) -> jax.Array:  # fmt: skip
    """Apply the attention of MSDeformAttn to the outputs of its linear layers.

    Args:
        value: [N, S, C], projected.
        offsets: [N, Q, M * L * P * 2], in pixels; for reference boxes in units of half their size
            divided by P.
        logits: [N, Q, M * L * P]; the weights are their softmax over L * P.
        reference_points: [N, Q, L, 2] or [N, Q, L, 4].
        padding_mask: [N, S], or None.
        shapes: (H, W) of each level.
        num_heads: M.
        **options: implementation and deterministic, of the operator.

    Returns:
        [N, Q, C].
    """
    n = offsets.shape[0]
    if padding_mask is not None:
        padding_mask = as_mask("padding_mask", padding_mask, "value", value.shape[:2])
        value = jnp.where(padding_mask[..., None], 0, value)
    return ms_deform_attn(
        value.reshape(n, value.shape[1], num_heads, value.shape[-1] // num_heads),
        shapes,
        *sample(offsets, logits, reference_points, shapes, num_heads),
        **options,
    )


def sample(
    offsets: jax.Array, logits: jax.Array, reference_points: Any,
    shapes: tuple[tuple[int, int], ...], num_heads: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the locations [N, Q, M, L, P, 2] and the weights [N, Q, M, L, P] of `attend`."""
    heads, levels = (*offsets.shape[:2], num_heads), len(shapes)
    count = offsets.shape[-1] // (2 * num_heads * levels)
    offsets = at_least_float32(offsets).reshape(*heads, levels, count, 2)
    weights = jax.nn.softmax(at_least_float32(logits).reshape(*heads, levels * count))
    return _locations(reference_points, offsets, shapes), weights.reshape(offsets.shape[:-1])


def _locations(
    reference_points: Any, offsets: jax.Array, shapes: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Return normalized locations [N, Q, M, L, P, 2] around reference points or boxes."""
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
    """Apply DCNv3's aggregation with a softmax over the points of each group."""
    points = logits.shape[-1] // offset_groups
    mask = at_least_float32(logits).reshape(*logits.shape[:3], offset_groups, points)
    mask = jax.nn.softmax(mask).reshape(logits.shape)
    return dcn_aggregate(x, at_least_float32(offset), mask, offset_groups=offset_groups, **options)


def blend_center(
    y: jax.Array, x: jax.Array, features: jax.Array, weight: jax.Array, bias: jax.Array
) -> jax.Array:
    """Blend y and x with a weight for each group, the sigmoid of a projection of `features`."""
    logits = jnp.einsum("nhwc,gc->nhwg", features, weight)
    scale = jax.nn.sigmoid(logits + bias.reshape(1, 1, 1, -1))
    scale = jnp.repeat(scale, y.shape[-1] // weight.shape[0], axis=-1)
    return y * (1 - scale) + x * scale
