"""What the linen and the nnx FeaturePyramid share: options and the path from the top down."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..ops._common.arguments import (
    as_dtype,
    as_flag,
    as_integer,
    as_real_array,
    check_choice,
    describe,
)
from .images import compute_dtype, conv, promoted
from .resnet import ConvPlan

Extra = Literal["pool", "conv"]
Source = Literal["input", "output"]


@dataclasses.dataclass(frozen=True)
class PyramidOptions:
    """The options of a pyramid, checked; `effjax.models.FeaturePyramid` documents them."""

    out_channels: int = 256
    extra_levels: int = 0
    extra: Extra = "pool"
    extra_from: Source = "input"
    extra_relu: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        as_integer("out_channels", self.out_channels, 1)
        as_integer("extra_levels", self.extra_levels, 0)
        check_choice("extra", self.extra, "pool", "conv")
        check_choice("extra_from", self.extra_from, "input", "output")
        as_flag("extra_relu", self.extra_relu)
        if self.dtype is not None:
            as_dtype("dtype", self.dtype)
        as_dtype("param_dtype", self.param_dtype)

    def convs(self, channels: Sequence[int]) -> tuple[list[ConvPlan], list[ConvPlan]]:
        """The lateral convolutions, and those that make what comes out."""
        out = self.out_channels
        laterals = [ConvPlan(c, out, 1, 1) for c in channels]
        outputs = [ConvPlan(out, out, 3, 1) for _ in channels]
        if self.extra == "conv":
            first = channels[-1] if self.extra_from == "input" else out
            extras = [first, *[out] * self.extra_levels][: self.extra_levels]
            outputs += [ConvPlan(c, out, 3, 2) for c in extras]
        return laterals, outputs

    def prepare(
        self, features: Any, channels: tuple[int, ...] | None = None
    ) -> tuple[jax.Array, ...]:
        """The levels, checked, in the dtype of the computation."""
        if not isinstance(features, Sequence) or not features:
            raise TypeError(
                "`features` must be a tuple of feature maps, the finest first, not "
                f"{describe(features)}."
            )
        levels = tuple(as_real_array(f"features[{i}]", level) for i, level in enumerate(features))
        if channels is not None and len(levels) != len(channels):
            raise ValueError(
                f"`features` has {len(levels)} levels, but `in_channels` (={channels}) is of "
                f"{len(channels)}."
            )
        for i, level in enumerate(levels):
            wanted = "C" if channels is None else channels[i]
            if level.ndim != 4 or wanted not in ("C", level.shape[-1]):
                raise ValueError(
                    f"`features[{i}]` of shape {level.shape} must be [N, H, W, {wanted}]."
                )
            if level.shape[0] != levels[0].shape[0] or 0 in level.shape[1:]:
                raise ValueError(
                    f"`features[{i}]` of shape {level.shape} must have pixels of the "
                    f"{levels[0].shape[0]} images of features[0]."
                )
        for i, (fine, coarse) in enumerate(zip(levels, levels[1:], strict=False)):
            halves = tuple(-(-side // 2) for side in fine.shape[1:3])
            if coarse.shape[1:3] not in (halves, fine.shape[1:3]):
                raise ValueError(
                    f"`features[{i + 1}]` of shape {coarse.shape} must have half the height and "
                    f"width of the level before, {fine.shape}, rounded up, or the same."
                )
        dtype = compute_dtype(promoted(*(x.dtype for x in levels)), self.dtype, self.param_dtype)
        return tuple(level.astype(dtype) for level in levels)


def pyramid(
    options: PyramidOptions, levels: Sequence[jax.Array], laterals: Sequence[Any], outputs: Any
) -> tuple[jax.Array, ...]:
    """The levels that come out, of those that came in and of (kernel, bias) of each convolution."""
    merged: list[jax.Array] = []
    for level, lateral in zip(reversed(levels), reversed(laterals), strict=True):
        level = _convolve(level, lateral)
        merged.insert(0, level + _enlarged(merged[0], level.shape[1:3]) if merged else level)
    found = [_convolve(level, own) for level, own in zip(merged, outputs, strict=False)]
    if options.extra == "pool":
        for _ in range(options.extra_levels):
            found.append(found[-1][:, ::2, ::2])  # a max pool of size 1 and stride 2
    x = levels[-1] if options.extra_from == "input" else found[-1]
    for i, of_extra in enumerate(outputs[len(levels) :]):
        x = _convolve(jax.nn.relu(x) if i and options.extra_relu else x, of_extra, strides=2)
        found.append(x)
    return tuple(found)


def _convolve(x: jax.Array, parameters: tuple[jax.Array, jax.Array], strides: int = 1) -> jax.Array:
    kernel, bias = parameters
    y = conv(x, kernel, strides, kernel.shape[0] // 2)
    return y + bias.astype(x.dtype).reshape(1, 1, 1, -1)


def _enlarged(x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Nearest neighbors; of an odd number of pixels the last has no second copy."""
    if x.shape[1:3] == sides:
        return x
    height, width = sides
    n, h, w, c = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (n, h, 2, w, 2, c))
    return doubled.reshape(n, 2 * h, 2 * w, c)[:, :height, :width]


def as_channels(in_channels: Any) -> tuple[int, ...]:
    """Channels of each level."""
    try:
        channels = tuple(as_integer("in_channels", c, 1) for c in in_channels)
    except TypeError:
        raise TypeError(
            "`in_channels` must be the channels of each level, like (256, 512, 1024, 2048), not "
            f"{describe(in_channels)}."
        ) from None
    if not channels:
        raise ValueError("`in_channels` is empty: give the channels of each level.")
    return channels
