"""A residual network with deformable convolutions in its last stages, for Flax NNX."""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ...layers.batch_norm import check_momentum
from ...nnx.batch_norm import BatchNorm
from ...nnx.deform_conv import DeformConv
from ...ops._common.arguments import as_flag, as_integer, as_number, as_real_array

he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")


class DeformResNet(nnx.Module):
    """ResNet of basic blocks on images `[N, H, W, C]`, with deformable 3x3 convolutions.

    A stem (3x3), stages of basic blocks (two 3x3 convolutions and a shortcut), each after the first
    with stride 2, the mean over the image, a linear layer. In the stages that `deformable` names,
    every 3x3 convolution of stride 1 is deformable: the papers place them in the last stages, where
    a tap sees most of an object. Reverse mode only.

    Args:
        stage_sizes: blocks of each stage.
        widths: channels of each stage.
        deformable: the stages with deformable convolutions, counted from 0; negative from the end.
            () is the plain network, with the same parameters but for the offsets'.
        modulated: DCN v2 (offsets and masks) rather than v1 (offsets).
        offset_groups: groups of channels with offsets of their own.
        num_classes: size of the logits.
        axis_name: the mapped axes over which batch statistics are taken.
        momentum, epsilon: of the BatchNorms.
        dtype: of the computation. None: x's, promoted with `param_dtype`.
        param_dtype: of the parameters.
        in_channels: channels of the images.
        rngs: for the parameters (stream `params`).

    Raises:
        ValueError: for an option outside its range, or images of another shape.
        TypeError: for what is no number, sequence or dtype, and for images that are not real
            numbers.

    References:
        He et al. 2016 (arXiv:1512.03385); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    def __init__(
        self,
        *,
        stage_sizes: Sequence[int] = (1, 1, 1),
        widths: Sequence[int] = (16, 32, 64),
        deformable: Sequence[int] = (-2, -1),
        modulated: bool = True,
        offset_groups: int = 1,
        num_classes: int = 10,
        axis_name: Any = None,
        momentum: float | None = 0.9,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        in_channels: int = 3,
        rngs: nnx.Rngs,
    ):
        stage_sizes, widths = _stages(stage_sizes, widths)
        deformed = _deformed(deformable, len(widths))
        for name, number in dict(
            offset_groups=offset_groups, num_classes=num_classes, in_channels=in_channels
        ).items():
            as_integer(name, number, 1)
        check_momentum(momentum)
        as_number("epsilon", epsilon, lambda e: e > 0, "positive")
        as_flag("modulated", modulated)
        norm: dict[str, Any] = dict(momentum=momentum, epsilon=epsilon, axis_name=axis_name)
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.in_channels = in_channels
        self.stem_conv = _conv(in_channels, widths[0], 3, 1, dtypes, rngs)
        self.stem_norm = BatchNorm(widths[0], activation="relu", **norm, **dtypes, rngs=rngs)
        blocks, channels = [], widths[0]
        for stage, (size, width) in enumerate(zip(stage_sizes, widths, strict=True)):
            pack = functools.partial(DeformConv, modulated=modulated, predict_offset=True)
            for i in range(size):
                strides = 2 if i == 0 and stage > 0 else 1
                blocks.append(
                    ResidualBlock(
                        channels, width, strides, pack if stage in deformed else None,
                        offset_groups, norm, dtypes, rngs=rngs,
                    )
                )  # fmt: skip
                channels = width
        self.blocks = nnx.List(blocks)
        self.classifier = nnx.Linear(channels, num_classes, **dtypes, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: Any = None) -> jax.Array:
        """Logits `[N, num_classes]` of `x` `[N, H, W, in_channels]`, at least float32.

        `rngs` is taken and not needed, as by all models here.
        """
        x = as_real_array("x", x)
        if x.ndim != 4 or x.shape[-1] != self.in_channels:
            raise ValueError(
                f"`x` must be of shape [batch, height, width, {self.in_channels}], not {x.shape}."
            )
        x = self.stem_norm(self.stem_conv(x))
        for block in self.blocks:
            x = block(x)
        logits = self.classifier(x.mean((1, 2)))
        chex.assert_shape(logits, (None, self.classifier.out_features))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class ResidualBlock(nnx.Module):
    """conv3x3-BN-ReLU-conv3x3-BN, plus the shortcut, ReLU; `pack` is the deformable convolution."""

    def __init__(
        self, channels: int, features: int, strides: int, pack: Any, offset_groups: int,
        norm: dict[str, Any], dtypes: dict[str, Any], *, rngs: nnx.Rngs,
    ):  # fmt: skip
        def conv(channels: int, strides: int) -> nnx.Module:
            if pack is None or strides > 1:
                return _conv(channels, features, 3, strides, dtypes, rngs)
            return pack(
                channels, features, 3, use_bias=False, offset_groups=offset_groups,
                kernel_init=he_normal, **dtypes, rngs=rngs,
            )  # fmt: skip

        self.conv1, self.conv2 = conv(channels, strides), conv(features, 1)
        self.norm1 = BatchNorm(features, activation="relu", **norm, **dtypes, rngs=rngs)
        self.norm2 = BatchNorm(features, activation="relu", **norm, **dtypes, rngs=rngs)
        self.shortcut: Any = nnx.data(None)
        if strides > 1 or channels != features:
            self.shortcut = _conv(channels, features, 1, strides, dtypes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = self.conv2(self.norm1(self.conv1(x)))
        chex.assert_equal_shape([x, shortcut])
        return self.norm2(x, residual=shortcut)


def _stages(stage_sizes: Any, widths: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks and channels of each stage, checked."""
    named = {"stage_sizes": stage_sizes, "widths": widths}
    sizes, channels = (_integers(name, values) for name, values in named.items())
    if len(sizes) != len(channels) or not sizes or min(*sizes, *channels) < 1:
        raise ValueError(
            f"`stage_sizes` (={sizes}) and `widths` (={channels}) must give a positive number for "
            "each of the same stages."
        )
    return sizes, channels


def _deformed(deformable: Any, count: int) -> set[int]:
    """The numbers of the deformable stages, from 0 on."""
    stages = _integers("deformable", deformable)
    if any(not -count <= stage < count for stage in stages):
        raise ValueError(f"`deformable` (={stages}) names stages, of which there are {count}.")
    return {stage % count for stage in stages}


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(as_integer(name, value, -(2**31)) for value in values)
    except TypeError:
        raise TypeError(f"`{name}` (={values!r:.80}) must be a sequence of integers.") from None


def _conv(
    channels: int, features: int, size: int, strides: int, dtypes: dict[str, Any], rngs: nnx.Rngs
) -> nnx.Conv:
    return nnx.Conv(
        channels, features, (size, size), (strides, strides), use_bias=False,
        kernel_init=he_normal, **dtypes, rngs=rngs,
    )  # fmt: skip
