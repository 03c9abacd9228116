"""Deformable convolutions of maskrcnn-benchmark, mmcv and torchvision."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .files import as_arrays, check_real
from .tables import from_torch_layout


def convert_deform_conv(
    weights: Mapping[str, Any],
    *,
    offset: str | None = None,
    mask: str | None = None,
) -> dict[str, Any]:
    """Parameters of effjax's deformable convolutions from those of a PyTorch layer.

    Understands the layers of maskrcnn-benchmark (`DeformConv`, `ModulatedDeformConv`, both with
    `Pack`, `DFConv2d`), mmcv (`DeformConv2d`, `ModulatedDeformConv2d`, both with `Pack`) and
    torchvision (`DeformConv2d`). They agree on the order of offset and mask channels, which is
    effjax's too; kernels go from OIHW to HWIO. `from_torch` puts layers and networks into modules
    that are there already; this also takes convolutions of any name, and offsets and masks that are
    apart.

    Args:
        weights: the layer's part of a `state_dict()`, as arrays: `weight`, `bias`,
            `conv_offset.weight`, ….
        offset: the name of the convolution that predicts offsets (torchvision's is the user's own
            and has any name); None looks for `conv_offset`, `conv_offset_mask` and `offset`.
        mask: the name of a convolution of its own that predicts masks (before the sigmoid), None if
            the masks are the last third of the other's channels, or there are none.

    Returns:
        ``{"kernel", "bias", "offset_conv": {"kernel", "bias"}}``, as far as the layer has them:
        the `params` of `effjax.linen.DeformConv`, and the state that `nnx.update` takes for
        `effjax.nnx.DeformConv`. For a `DFConv2d`, those of its `conv`.

    Raises:
        ValueError: for names that are not there, or that are none of these layers'.
        TypeError: for weights that are no arrays of real floating-point numbers.
    """
    for name, value in (("offset", offset), ("mask", mask)):
        if not (value is None or isinstance(value, str)):
            raise TypeError(f"`{name}` (={value!r:.80}) must be the name of a convolution.")
    left = as_arrays(weights)
    for name, array in left.items():
        check_real(name, array)

    def take(*prefixes: str) -> dict[str, np.ndarray]:
        """The parameters of the first of these convolutions that there is."""
        for prefix in prefixes:
            if f"{prefix}weight" in left:
                kernel = left.pop(f"{prefix}weight")
                if kernel.ndim != 4:
                    raise ValueError(f"`{prefix}weight` of shape {kernel.shape} must be OIHW.")
                bias = left.pop(f"{prefix}bias", None)
                found = {"kernel": from_torch_layout("kernel", kernel, ())}
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
