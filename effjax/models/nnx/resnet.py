"""Residual networks in torchvision's layout for Flax NNX, as classifiers or backbones."""

import dataclasses
from typing import Any

import chex
import jax
from flax import nnx
from jax.typing import ArrayLike

from ...layers.images import cast_batch, copy_config, he_normal, lecun_normal, norm_options
from ...layers.resnet import (
    BlockArrays,
    BlockSpec,
    ConvSpec,
    NormArrays,
    ResNetConfig,
    apply_block,
    apply_stem,
    has_frozen_norm,
    norm_spec,
    stage_specs,
    stem_spec,
    stop_frozen_gradient,
)
from ...nnx.batch_norm import BatchNorm
from ...nnx.deform_conv import DeformConv
from ...ops._common.arguments import as_integer, with_torch_hints
from ...ops._common.dtypes import accumulation_dtype
from ...ops.batch_norm.sync import BatchStats


@with_torch_hints
@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class ResNet(nnx.Module, ResNetConfig):
    """ResNet of torchvision's layout on images `[N, H, W, C]`: stem, stages, linear head.

    The stem is a 7x7 convolution with stride 2, BN, ReLU and a 3x3 max pool with stride 2. A block
    is conv1x1-BN-ReLU-conv3x3-BN-ReLU-conv1x1-BN (or conv3x3-BN-ReLU-conv3x3-BN), plus the
    shortcut, then ReLU. The first block of every stage except the first has stride 2. Padding is
    half of the kernel size on every side, as in PyTorch and unlike "SAME". The head is the mean
    over the image and a linear layer.

    ReLU and the addition of the shortcut are fused into the norms. With `efficient=True` a block
    keeps for its backward pass its input, the statistics of its norms and the outputs of its inner
    convolutions. It recomputes the norms and the last convolutions of the block and its shortcut
    (1x1 in a bottleneck). Batch statistics are kept, so that the all-reduce runs once. Outputs,
    gradients, running statistics and the state tree are those of `efficient=False`. Reverse mode
    only.

    Args:
        stage_sizes: the number of blocks of each stage.
        bottleneck: blocks of three convolutions (ResNet-50, …) instead of two (-18, -34).
        width: channels of the stem and of the first stage's blocks; doubled in each later stage. A
            bottleneck has four times as many output channels.
        inner_width: channels of the 3x3 convolutions of the first stage's bottlenecks; doubled in
            each later stage. If None, `width`. Wide ResNets and ResNeXts have more.
        feature_group_count: groups of the 3x3 convolutions of bottlenecks (ResNeXt).
        stride_in_1x1: apply a bottleneck's stride in its first convolution, as Caffe's models and
            maskrcnn-benchmark do, instead of in its 3x3 convolution.
        stage_with_dcn: for each stage, True to make `conv2` of its blocks deformable (the 3x3
            convolution of a bottleneck), with its stride; () for no deformable stage.
        modulated: DCN v2 (offsets and masks) instead of v1 (offsets).
        offset_groups: groups of channels that share their offsets.
        num_classes: size of the logits; None for no linear layer.
        small_inputs: use one 3x3 convolution, BN and ReLU as the stem, for small images.
        efficient: recompute in the backward pass instead of keeping all intermediate arrays.
        save: "conv" keeps the outputs of a block's convolutions except the last. "features" keeps
            only the block's input and its statistics, and recomputes all convolutions.
        frozen_stages: -1 for none, 0 for the stem, k for the stem and the first k stages. Their
            norms are frozen, and no gradient flows into or through them. Exclude their parameters
            from the optimizer, whose weight decay would still change them.
        frozen_norm: use the running statistics of all norms in training too, with no gradients for
            scale and bias, as maskrcnn-benchmark's FrozenBatchNorm2d (with `epsilon=0`).
        axis_name, axis_index_groups: the mapped axes over which batch statistics are reduced. If
            vmap maps them, `grad` of `jit` of the model requires `efficient=False`; `jit` of `grad`
            does not.
        momentum, epsilon: of the BatchNorms; PyTorch's momentum 0.1 is 0.9 here.
        dtype: of the computation. If None, x's dtype, promoted with `param_dtype` unless x is half
            precision. Parameters stay `param_dtype`, and statistics are float32 or wider.
        param_dtype: of the parameters.
        unbiased_running_var: use PyTorch's running variance σ²·n/(n − 1).
        in_channels: channels of the images.
        rngs: for the parameters (stream `params`).

    Convolutions are initialized from N(0, 2/(kh·kw·out)), those that predict offsets with 0, norms
    with scale 1 and bias 0, the head from N(0, 1/in) with bias 0.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        He et al. 2016 (arXiv:1512.03385); Zagoruyko & Komodakis 2016 (arXiv:1605.07146); Xie et al.
        2017 (arXiv:1611.05431); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    in_channels: int = 3
    rngs: dataclasses.InitVar[nnx.Rngs]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        # The options are compared by value, modules by identity.
        return self is other

    def __post_init__(self, rngs: nnx.Rngs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__post_init__()
        self.in_channels = as_integer("in_channels", self.in_channels, 1)
        config = copy_config(self, ResNetConfig)
        self.stem_conv = _conv(stem_spec(config, self.in_channels), config, rngs)
        self.stem_norm = BatchNorm(self.width, **norm_options(config), rngs=rngs)
        self.stages = nnx.List(
            nnx.List(ResNetBlock(spec, config, rngs=rngs) for spec in specs)
            for specs in stage_specs(config)
        )
        self.classifier: Any = nnx.data(None)
        if self.num_classes is not None:
            self.classifier = nnx.Linear(
                self.feature_channels[-1], self.num_classes, kernel_init=lecun_normal,
                dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self, x: ArrayLike, *, rngs: Any = None, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, in_channels]`.
            rngs: ignored; accepted because all models here take it.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, or with `num_classes=None` the mean over the image of the last
            stage, computed in `dtype` and returned as float32 (float64 if computed in float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, or `axis_name`
                is not mapped in training.
        """
        h = self._features(x, mask)[-1].mean((1, 2))
        if self.classifier is not None:
            h = self.classifier(h)
            chex.assert_shape(h, (None, self.num_classes))
        return h.astype(accumulation_dtype(h))

    def features(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> tuple[jax.Array, ...]:
        """Return the outputs of all stages in `dtype`: C2 to C5.

        They have 1/4 to 1/32 of the images' size, rounded up (from 1/1 with `small_inputs`), and
        `feature_channels` channels. Arguments and errors are those of a call.
        """
        return self._features(x, mask)

    # `nnx.tabulate` would show the public method instead of the model, so a call does not use it.
    def _features(self, x: ArrayLike, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        h, image_mask = cast_batch(self, x, mask, self.in_channels, smallest=1)
        norm = norm_spec(
            self.stem_norm, self.stem_norm._uses_running_average(), has_frozen_norm(self, 0)
        )
        arrays = BlockArrays((self.stem_conv.kernel[...],), (_norm_arrays(self.stem_norm),))
        h, (batch_stats,) = apply_stem(self, norm, h, arrays, image_mask)
        _update(self.stem_norm, batch_stats)
        h, outputs = stop_frozen_gradient(self, h, 0), []
        for blocks, channels in zip(self.stages, self.feature_channels, strict=True):
            for block in blocks:
                h = block(h, mask=image_mask)
            chex.assert_axis_dimension(h, 3, channels)
            h = stop_frozen_gradient(self, h, len(outputs) + 1)
            outputs.append(h)
        return tuple(outputs)


class ResNetBlock(nnx.Module):
    """Convolutions of a block with their norms, plus the shortcut, then ReLU."""

    def __init__(self, spec: BlockSpec, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.spec, self.config = spec, config
        for k, conv_spec in enumerate(spec.convs, 1):
            # The order of construction determines the initial values.
            setattr(self, f"conv{k}", _conv(conv_spec, config, rngs))
            norm = BatchNorm(conv_spec.features, **norm_options(config), rngs=rngs)
            setattr(self, f"norm{k}", norm)
        self.shortcut: Any = nnx.data(None)
        self.shortcut_norm: Any = nnx.data(None)
        if spec.shortcut is not None:
            self.shortcut = _conv(spec.shortcut, config, rngs)
            self.shortcut_norm = BatchNorm(
                spec.shortcut.features, **norm_options(config, activation=None), rngs=rngs
            )

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        """Return the output of the block."""
        numbers = range(1, len(self.spec.convs) + 1)
        convs = [getattr(self, f"conv{k}") for k in numbers]
        norms: list[BatchNorm] = [getattr(self, f"norm{k}") for k in numbers]
        if self.shortcut is not None:
            convs.append(self.shortcut)
            norms.append(self.shortcut_norm)
        arrays = BlockArrays(tuple(map(_conv_arrays, convs)), tuple(map(_norm_arrays, norms)))
        norm_specs = tuple(
            norm_spec(norm, norm._uses_running_average(), self.spec.frozen) for norm in norms
        )
        y, stats = apply_block(self.config, self.spec, norm_specs, x, arrays, mask)
        for norm, batch_stats in zip(norms, stats, strict=True):
            _update(norm, batch_stats)
        return y


def _conv(spec: ConvSpec, config: ResNetConfig, rngs: nnx.Rngs) -> Any:
    # Holds the parameters; called alone it computes what `layers.resnet` computes with them.
    options: dict[str, Any] = dict(
        padding=spec.padding, feature_group_count=spec.groups, use_bias=False,
        kernel_init=he_normal, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs,
    )  # fmt: skip
    if not spec.deformable:
        return nnx.Conv(spec.channels, spec.features, (spec.size,) * 2, spec.strides, **options)
    return DeformConv(
        spec.channels, spec.features, spec.size, spec.strides,
        offset_groups=config.offset_groups, modulated=config.modulated, predict_offset=True,
        **options,
    )  # fmt: skip


def _conv_arrays(conv: Any) -> Any:
    if not hasattr(conv, "offset_conv"):
        return conv.kernel[...]
    offset_conv = {"kernel": conv.offset_conv.kernel[...], "bias": conv.offset_conv.bias[...]}
    return {"kernel": conv.kernel[...], "offset_conv": offset_conv}


def _norm_arrays(norm: BatchNorm) -> NormArrays:
    variables = (getattr(norm, name) for name in NormArrays._fields)
    return NormArrays(*(None if v is None else v[...] for v in variables))


def _update(norm: BatchNorm, batch_stats: BatchStats | None) -> None:
    if batch_stats is not None:
        norm._update_running_stats(batch_stats)
