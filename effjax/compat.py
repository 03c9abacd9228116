"""For people who port PyTorch code: the operators in its argument order, and its weights.

Images are NCHW here, and kernels OIHW, as in maskrcnn-benchmark, torchvision and mmcv.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

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


def convert_deform_conv(
    weights: Mapping[str, Any],
    *,
    offset: str | None = None,
    mask: str | None = None,
) -> dict[str, Any]:
    """Parameters of effjax's deformable convolutions from those of a PyTorch layer.

    Understands the layers of maskrcnn-benchmark (`DeformConv`, `ModulatedDeformConv`, both `Pack`s,
    `DFConv2d`), mmcv (`DeformConv2d`, `ModulatedDeformConv2d`, both `Pack`s) and torchvision
    (`DeformConv2d`). They agree on the order of offset and mask channels, which is effjax's too;
    kernels go from OIHW to HWIO.

    Args:
        weights: the layer's part of a `state_dict()`, as arrays: `weight`, `bias`,
            `conv_offset.weight`, ….
        offset: the name of the convolution that predicts offsets (torchvision's is the user's own
            and has any name); None looks for `conv_offset`, `conv_offset_mask` and `offset`.
        mask: the name of a convolution of its own that predicts masks (before the sigmoid), None if
            the masks are the last third of the other's channels, or there are none.

    Returns:
        `{"kernel", "bias", "offset_conv": {"kernel", "bias"}}`, as far as the layer has them: the
        `params` of linen's `DeformConv`, `ModulatedDeformConv` and their `Pack`s, and what
        `nnx.update` takes for nnx's. Of a `DFConv2d`, those of its `conv`.

    Raises:
        ValueError: for names that are not there, or that are none of these layers'.
    """
    left = {name: np.asarray(value) for name, value in weights.items()}

    def take(*prefixes: str) -> dict[str, np.ndarray]:
        """The parameters of the first of these convolutions that there is."""
        for prefix in prefixes:
            if f"{prefix}weight" in left:
                kernel = left.pop(f"{prefix}weight")
                if kernel.ndim != 4:
                    raise ValueError(f"`{prefix}weight` of shape {kernel.shape} must be OIHW.")
                bias = left.pop(f"{prefix}bias", None)
                found = {"kernel": kernel.transpose(2, 3, 1, 0)}
                return found if bias is None else found | {"bias": bias}
        return {}

    found: dict[str, Any] = dict(take("", "conv."))
    if not found:
        raise ValueError(f"`weights` has no `weight`, only {sorted(weights)}.")
    names = ("conv_offset.", "conv_offset_mask.", "offset.") if offset is None else (f"{offset}.",)
    predicted = take(*names)
    masks = take(f"{mask}.") if mask is not None else {}
    if missing := [n for n, part in ((offset, predicted), (mask, masks)) if n and not part]:
        raise ValueError(f"`weights` has no `{missing[0]}.weight`, only {sorted(weights)}.")
    if masks:
        if masks.keys() != predicted.keys():
            raise ValueError(f"`{offset}` and `{mask}` must both have a bias, or neither.")
        predicted = {
            name: np.concatenate([value, masks[name]], -1) for name, value in predicted.items()
        }
    if left:
        raise ValueError(
            f"`weights` has parameters that belong to no known layer: {sorted(left)}. Give the "
            "layer's own part of the state_dict, and name its convolutions by `offset` and `mask`."
        )
    return found | ({"offset_conv": predicted} if predicted else {})


def _nhwc(x: ArrayLike) -> jax.Array:
    return jnp.transpose(jnp.asarray(x), (0, 2, 3, 1))
