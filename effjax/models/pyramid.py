"""Feature pyramid for Flax NNX."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.typing import DTypeLike

from ..layers.images import check_dtypes, compute_dtype, promote_dtypes
from ..nnx.conv import cast_parameters
from ..ops._common.arguments import as_integer, as_real_array, check_choice
from ..ops._common.sharding import explicit_spec, reshape
from .images import as_sizes

glorot_uniform = nnx.initializers.glorot_uniform()
Extra = Literal["pool", "conv"]
Source = Literal["input", "output"]
# P6 of Faster R-CNN; P6 and P7 of RetinaNet.
USUAL_LEVELS = {None: 0, "pool": 1, "conv": 2}


@dataclasses.dataclass(unsafe_hash=True)
class FeaturePyramidConfig:
    """Options of a feature pyramid; `FeaturePyramid` documents them."""

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


class FeaturePyramid(nnx.Module):
    """Feature pyramid network: combines the levels of a backbone from coarse to fine.

    `M_i = lateral_i(C_i) + upsample(M_{i+1})`, `P_i = output_i(M_i)`. The lateral convolutions are
    1x1, the output convolutions 3x3 with padding 1, all with a bias; upsampling takes the nearest
    neighbor. Each level has half the height and width of the one before, rounded up.

    Args:
        in_channels: of each level, the finest first: a backbone's `feature_channels`.
        out_channels: of all levels of the pyramid.
        extra_levels: the number of additional levels, each half the size of the one before. If
            None, 1 for "pool", 2 for "conv", and 0 without `extra`.
        extra: "pool" takes every second pixel of the level before (P6 of Faster R-CNN). "conv" is a
            3x3 convolution with stride 2 and padding 1, with its own entry in `outputs` (P6 and P7
            of RetinaNet). If None, "pool" if `extra_levels` is positive.
        extra_from: input of the first of these convolutions: the last input level ("input") or the
            last output level ("output"). Each further one reads the level before.
        extra_relu: apply ReLU before each further convolution, as maskrcnn-benchmark and
            torchvision do.
        dtype: of the computation. If None, that of the features, promoted with `param_dtype` unless
            they are half precision.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`).

    Parameters: `laterals` and `outputs`, each a list of convolutions. Kernels are initialized with
    Glorot's uniform rule, biases with 0.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        out_channels: int = 256,
        *,
        extra_levels: int | None = None,
        extra: Extra | None = None,
        extra_from: Source = "input",
        extra_relu: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config = FeaturePyramidConfig(
            out_channels, extra_levels, extra, extra_from, extra_relu, dtype, param_dtype
        )
        self.in_channels = as_sizes("in_channels", in_channels)
        conv = functools.partial(
            nnx.Conv, kernel_init=glorot_uniform, param_dtype=param_dtype,
            promote_dtype=cast_parameters, rngs=rngs,
        )  # fmt: skip
        out = config.out_channels
        laterals = [conv(channels, out, (1, 1)) for channels in self.in_channels]
        outputs = [conv(out, out, (3, 3), padding=1) for _ in self.in_channels]
        if config.extra == "conv":
            channels = self.in_channels[-1] if config.extra_from == "input" else out
            for _ in range(config.num_extra_levels):
                outputs.append(conv(channels, out, (3, 3), 2, padding=1))
                channels = out
        self.laterals, self.outputs = nnx.List(laterals), nnx.List(outputs)

    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, in_channels[i]]`, the finest first.

        Raises:
            TypeError, ValueError: if their number, shapes or dtypes are wrong.
        """
        config = self.config
        levels = prepare_features(config, features, self.in_channels)
        merged: list[jax.Array] = []
        for level, lateral in zip(reversed(levels), reversed(self.laterals), strict=True):
            level = lateral(level)
            merged.insert(0, level + upsample(merged[0], level.shape[1:3]) if merged else level)
        pyramid = [output(level) for level, output in zip(merged, self.outputs, strict=False)]
        if config.extra == "pool":
            for _ in range(config.num_extra_levels):
                pyramid.append(pyramid[-1][:, ::2, ::2])  # a max pool of size 1 and stride 2
        x = levels[-1] if config.extra_from == "input" else pyramid[-1]
        for i, output in enumerate(self.outputs[len(levels) :]):
            x = output(jax.nn.relu(x) if i and config.extra_relu else x)
            pyramid.append(x)
        return tuple(pyramid)


def prepare_features(
    config: FeaturePyramidConfig, features: Any, in_channels: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """Check the feature maps of a backbone; return them in the dtype of the computation."""
    levels = tuple(as_real_array(f"features[{i}]", level) for i, level in enumerate(features))
    shapes = [level.shape for level in levels]
    if tuple(shape[-1] for shape in shapes) != in_channels or any(
        len(shape) != 4 or shape[0] != shapes[0][0] or 0 in shape[1:] for shape in shapes
    ):
        raise ValueError(
            f"`features` of shapes {shapes} must be [N, H, W, C] for C in {in_channels}, with the "
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


def upsample(x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Double the size by nearest neighbors; crop the last row or column of an odd size."""
    if x.shape[1:3] == sides:
        return x
    height, width = sides
    n, h, w, c = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (n, h, 2, w, 2, c))
    doubled = reshape(doubled, (n, 2 * h, 2 * w, c), explicit_spec(x))
    return doubled[:, :height, :width]
