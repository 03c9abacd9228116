"""For people who port PyTorch code: the operators in its argument order.

Images are NCHW here, and kernels OIHW, as in maskrcnn-benchmark, torchvision and mmcv.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._deprecated import moved
from .ops.deform_conv import deform_conv2d

Pair = int | Sequence[int]


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
) -> jax.Array:
    """Deformable convolution v1 with the arguments of maskrcnn-benchmark's `deform_conv`.

    Args:
        input: `[N, C, H, W]`.
        offset: `[N, deformable_groups·K·2, Ho, Wo]`, y before x for each tap.
        weight: `[O, C/groups, kh, kw]`.
        stride, padding, dilation, groups, deformable_groups: of the convolution.
        im2col_step: accepted and ignored: memory is bounded by rows, not by images, see
            `effjax.deform_conv2d`.

    Returns:
        `[N, O, Ho, Wo]`.

    Raises:
        ValueError, TypeError: as `effjax.deform_conv2d`.
    """
    return modulated_deform_conv(
        input, offset, None, weight, None, stride, padding, dilation, groups, deformable_groups
    )


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
) -> jax.Array:
    """Deformable convolution v2 with the arguments of maskrcnn-benchmark's
    `modulated_deform_conv`: as `deform_conv`, and `mask` `[N, deformable_groups·K, Ho, Wo]`."""
    operands = dict(input=input, offset=offset, mask=mask, weight=weight)
    for name, value in operands.items():
        if value is not None and jnp.ndim(value) != 4:
            raise ValueError(f"`{name}` must have four axes, not shape {jnp.shape(value)}.")
    x, offset, weights = _nhwc(input), _nhwc(offset), jnp.transpose(weight, (2, 3, 1, 0))
    y = deform_conv2d(
        x, offset, weights, None if mask is None else _nhwc(mask),
        None if bias is None else jnp.asarray(bias), strides=stride,
        padding=padding, kernel_dilation=dilation, feature_group_count=groups,
        offset_groups=deformable_groups,
    )  # fmt: skip
    return y.transpose(0, 3, 1, 2)


def _nhwc(x: ArrayLike) -> jax.Array:
    return jnp.transpose(jnp.asarray(x), (0, 2, 3, 1))


__getattr__ = moved(__name__, convert_deform_conv="effjax.convert")
