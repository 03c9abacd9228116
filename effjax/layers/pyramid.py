"""Options of a feature pyramid and its top-down path, shared by the linen and nnx modules."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..ops._common.arguments import as_integer, as_real_array, check_choice
from .images import check_dtypes, compute_dtype, conv, promote_dtypes
from .resnet import ConvSpec

Extra = Literal["pool", "conv"]
Source = Literal["input", "output"]
# P6 of Faster R-CNN; P6 and P7 of RetinaNet.
USUAL_LEVELS = {None: 0, "pool": 1, "conv": 2}


@dataclasses.dataclass(unsafe_hash=True)
class FeaturePyramidConfig:
    """Options of a feature pyramid; `effjax.models.FeaturePyramid` documents them."""

    out_channels: int = 256
    extra_levels: int | None = None
    extra: Extra | None = None
    extra_from: Source = "input"
    extra_relu: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        self.out_channels = as_integer("out_channels", self.out_channels, 1)
        check_choice("extra", self.extra, None, "pool", "conv")
        if self.extra_levels is None:
            self.extra_levels = USUAL_LEVELS[self.extra]
        self.extra_levels = as_integer("extra_levels", self.extra_levels, 0)
        if self.extra is None and self.extra_levels:
            self.extra = "pool"
        elif self.extra is not None and not self.extra_levels:
            raise ValueError(
                f"`extra_levels` (=0) must be at least 1 with extra={self.extra!r}. Leave out "
                "`extra` for no level."
            )
        check_choice("extra_from", self.extra_from, "input", "output")
        check_dtypes(self.dtype, self.param_dtype)

    @property
    def num_extra_levels(self) -> int:
        """The number of levels above those of the backbone."""
        return self.extra_levels or 0


def pyramid_convs(
    config: FeaturePyramidConfig, in_channels: Sequence[int]
) -> tuple[list[ConvSpec], list[ConvSpec]]:
    """Return the lateral and the output convolutions."""
    out = config.out_channels
    laterals = [ConvSpec(c, out, 1, 1) for c in in_channels]
    outputs = [ConvSpec(out, out, 3, 1) for _ in in_channels]
    if config.extra == "conv":
        first = in_channels[-1] if config.extra_from == "input" else out
        extras = [first, *[out] * config.num_extra_levels][: config.num_extra_levels]
        outputs += [ConvSpec(c, out, 3, 2) for c in extras]
    return laterals, outputs


def prepare_features(
    config: FeaturePyramidConfig, features: Any, in_channels: tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """Check the feature maps of a backbone; return them in the dtype of the computation."""
    levels = tuple(as_real_array(f"features[{i}]", level) for i, level in enumerate(features))
    shapes = [level.shape for level in levels]
    expected = in_channels or tuple(shape[-1] for shape in shapes)
    if tuple(shape[-1] for shape in shapes) != expected or any(
        len(shape) != 4 or shape[0] != shapes[0][0] or 0 in shape[1:] for shape in shapes
    ):
        raise ValueError(
            f"`features` of shapes {shapes} must be [N, H, W, C] for C in {expected}, with the "
            "same N and at least one pixel."
        )
    for fine, coarse in itertools.pairwise(shapes):
        halves = tuple(-(-side // 2) for side in fine[1:3])
        if coarse[1:3] not in (halves, fine[1:3]):
            raise ValueError(
                f"`features` of shapes {shapes} must each have the height and width of the level "
                "before, or half of them, rounded up."
            )
    dtype = promote_dtypes(*(x.dtype for x in levels))
    dtype = compute_dtype(dtype, config.dtype, config.param_dtype)
    return tuple(level.astype(dtype) for level in levels)


def apply_pyramid(
    config: FeaturePyramidConfig, levels: Sequence[jax.Array], laterals: Sequence[Any], outputs: Any
) -> tuple[jax.Array, ...]:
    """Return the levels of the pyramid; `laterals` and `outputs` are pairs (kernel, bias)."""
    merged: list[jax.Array] = []
    for level, lateral in zip(reversed(levels), reversed(laterals), strict=True):
        level = _apply_conv(level, lateral)
        merged.insert(0, level + _upsample(merged[0], level.shape[1:3]) if merged else level)
    pyramid = [_apply_conv(level, output) for level, output in zip(merged, outputs, strict=False)]
    if config.extra == "pool":
        for _ in range(config.num_extra_levels):
            pyramid.append(pyramid[-1][:, ::2, ::2])  # a max pool of size 1 and stride 2
    x = levels[-1] if config.extra_from == "input" else pyramid[-1]
    for i, output in enumerate(outputs[len(levels) :]):
        x = _apply_conv(jax.nn.relu(x) if i and config.extra_relu else x, output, strides=2)
        pyramid.append(x)
    return tuple(pyramid)


def _apply_conv(
    x: jax.Array, parameters: tuple[jax.Array, jax.Array], strides: int = 1
) -> jax.Array:
    kernel, bias = parameters
    y = conv(x, kernel, strides, kernel.shape[0] // 2)
    return y + bias.astype(x.dtype).reshape(1, 1, 1, -1)


def _upsample(x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Double the size by nearest neighbors; crop the last row or column of an odd size."""
    if x.shape[1:3] == sides:
        return x
    height, width = sides
    n, h, w, c = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (n, h, 2, w, 2, c))
    return doubled.reshape(n, 2 * h, 2 * w, c)[:, :height, :width]
