"""Residual networks in torchvision's layout for Flax NNX, and the published networks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from ..layers.batch_norm import normalize_inference
from ..layers.images import ImageLayerConfig, he_normal, lecun_normal, norm_options
from ..nnx.batch_norm import BatchNorm
from ..nnx.conv import cast_parameters, make_conv
from ..nnx.deform_conv import DeformConv
from ..ops._common.arguments import as_integer, check_divides, with_torch_hints
from ..ops._common.dtypes import accumulation_dtype
from ..ops.batch_norm.sync import STATISTICS
from .images import (
    ImageNetwork,
    ImageNetworkConfig,
    as_sizes,
    cast_batch,
    make_constructor,
    max_pool,
)

EXPANSION = 4  # ratio of a bottleneck's output channels to its inner channels
# Checkpoint name of the outputs of all convolutions except a block's last and its shortcut.
CONV_OUTPUT = "effjax.resnet.conv"


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ResNetConfig(ImageNetworkConfig):
    """Options of a ResNet; `ResNet` documents them."""

    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    inner_width: int | None = None
    feature_group_count: int = 1
    stride_in_1x1: bool = False
    deep_stem: bool = False
    pool_shortcut: bool = False
    stage_with_dcn: Sequence[bool] = ()
    modulated: bool = True
    offset_groups: int = 1
    num_classes: int | None = 1000
    frozen_stages: int = -1
    frozen_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stage_sizes = as_sizes("stage_sizes", self.stage_sizes)
        self.stage_with_dcn = tuple(map(bool, self.stage_with_dcn))
        if len(self.stage_with_dcn) not in (0, len(self.stage_sizes)):
            raise ValueError(
                f"`stage_with_dcn` (={self.stage_with_dcn}) must be () or have one value for each "
                f"of the {len(self.stage_sizes)} stages."
            )
        for name in ("width", "feature_group_count", "offset_groups"):
            setattr(self, name, as_integer(name, getattr(self, name), 1))
        if self.inner_width is not None:
            self.inner_width = as_integer("inner_width", self.inner_width, 1)
        if not self.bottleneck and (self.inner_width is not None or self.feature_group_count > 1):
            raise ValueError(
                f"`inner_width` (={self.inner_width}) and `feature_group_count` "
                f"(={self.feature_group_count}) need bottleneck=True."
            )
        if self.deep_stem and (self.small_inputs or self.width % 2):
            raise ValueError(
                f"`deep_stem` needs small_inputs=False (={self.small_inputs}) and an even `width` "
                f"(={self.width})."
            )
        check_divides(
            "feature_group_count", self.feature_group_count, self.inner_width or self.width,
            "channels of the first stage's 3x3 convolutions",
        )  # fmt: skip
        if self.num_classes is not None:
            self.num_classes = as_integer("num_classes", self.num_classes, 1)
        self.frozen_stages = as_integer("frozen_stages", self.frozen_stages, -1)
        if self.frozen_stages > len(self.stage_sizes):
            raise ValueError(
                f"`frozen_stages` (={self.frozen_stages}) must be at most the number of stages "
                f"(={len(self.stage_sizes)})."
            )

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        channels = self.width * (EXPANSION if self.bottleneck else 1)
        return tuple(channels << stage for stage in range(len(self.stage_sizes)))


@with_torch_hints
@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class ResNet(ImageNetwork, ResNetConfig):
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
        deep_stem: three 3x3 convolutions with BN and ReLU instead of the 7x7 convolution of the
            stem, the first with stride 2 and the first two with half the channels.
        pool_shortcut: average 2x2 pixels in the shortcuts of blocks with stride 2, before a
            convolution without stride. The first block of every stage then has a convolution in its
            shortcut. With `deep_stem`, this is the ResNet-vd of RT-DETR (He et al. 2019).
        stage_with_dcn: for each stage, True to make `conv2` of its blocks deformable (the 3x3
            convolution of a bottleneck), with its stride; () for no deformable stage.
        modulated: DCN v2 (offsets and masks) instead of v1 (offsets).
        offset_groups: groups of channels that share their offsets.
        num_classes: size of the logits; None for no linear layer.
        small_inputs: use one 3x3 convolution, BN and ReLU as the stem, for small images.
        efficient: recompute in the backward pass instead of keeping all intermediate arrays.
        save: "conv" keeps the outputs of a block's convolutions except the last and the shortcut.
            "features" keeps only the block's input and its statistics, and recomputes all
            convolutions.
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
        (arXiv:1811.11168); He et al. 2019 (arXiv:1812.01187).
    """

    in_channels: int = 3
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__post_init__()
        self.in_channels = as_integer("in_channels", self.in_channels, 1)
        conv = functools.partial(make_conv, param_dtype=self.param_dtype, rngs=rngs)
        norm = self._norm(0, rngs)
        self.stem_conv: Any
        self.stem_norm: Any
        if self.deep_stem:
            widths = (self.width // 2, self.width // 2, self.width)
            inputs = zip((self.in_channels, *widths), widths, (2, 1, 1), strict=False)
            self.stem_conv = nnx.List([conv(a, b, 3, strides) for a, b, strides in inputs])
            self.stem_norm = nnx.List([norm(width) for width in widths])
        else:
            size, strides = (3, 1) if self.small_inputs else (7, 2)
            self.stem_conv = conv(self.in_channels, self.width, size, strides)
            self.stem_norm = norm(self.width)
        stages, channels = [], self.width
        for stage, num_blocks in enumerate(self.stage_sizes):
            blocks = []
            for i in range(num_blocks):
                strides = 2 if stage > 0 and i == 0 else 1
                pool = self.pool_shortcut and i == 0
                blocks.append(self._make_block(stage, channels, strides, pool, conv, rngs))
                channels = self.feature_channels[stage]
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
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
        x, image_mask = cast_batch(self, x, mask, self.in_channels, smallest=1)
        stem = apply_small_stem if self.small_inputs else apply_stem
        stem = apply_deep_stem if self.deep_stem else stem
        h = recompute(self, stem)(self.stem_conv, self.stem_norm, x, image_mask)
        h, outputs = self._stop_frozen_gradient(h, 0), []
        for blocks, channels in zip(self.stages, self.feature_channels, strict=True):
            for block in blocks:
                h = recompute(self, type(block).__call__)(block, h, image_mask)
            chex.assert_axis_dimension(h, 3, channels)
            h = self._stop_frozen_gradient(h, len(outputs) + 1)
            outputs.append(h)
        return tuple(outputs)

    def _norm(self, part: int, rngs: nnx.Rngs) -> Callable[..., BatchNorm]:
        """Return the constructor of the norms of the stem (part 0) or of a stage (1, …)."""
        is_frozen = self.frozen_norm or part <= self.frozen_stages
        norm = FrozenBatchNorm if is_frozen else BatchNorm
        return functools.partial(norm, **norm_options(self), rngs=rngs)

    def _make_block(
        self, stage: int, channels: int, strides: int, pool: bool, conv: Callable[..., Any],
        rngs: nnx.Rngs,
    ) -> nnx.Module:  # fmt: skip
        deform_conv = functools.partial(
            DeformConv, padding=1, use_bias=False, offset_groups=self.offset_groups,
            modulated=self.modulated, predict_offset=True, kernel_init=he_normal,
            param_dtype=self.param_dtype, promote_dtype=cast_parameters, rngs=rngs,
        )  # fmt: skip
        is_deformable = bool(self.stage_with_dcn) and self.stage_with_dcn[stage]
        conv2 = deform_conv if is_deformable else conv
        norm, features = self._norm(stage + 1, rngs), self.feature_channels[stage]
        if not self.bottleneck:
            return BasicBlock(channels, features, strides, pool, conv=conv, conv2=conv2, norm=norm)
        inner = (self.inner_width or self.width) << stage
        conv2 = functools.partial(conv2, feature_group_count=self.feature_group_count)
        return Bottleneck(
            channels, inner, features, strides, self.stride_in_1x1, pool,
            conv=conv, conv2=conv2, norm=norm,
        )  # fmt: skip

    def _stop_frozen_gradient(self, h: jax.Array, part: int) -> jax.Array:
        """Stop the gradient of the output of the stem (part 0) or of a stage (1, …) if frozen."""
        return lax.stop_gradient(h) if part <= self.frozen_stages else h


def recompute(config: ImageLayerConfig, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of modules that keeps little for its backward pass if `efficient`."""
    # It keeps the statistics of the norms, so that the backward pass repeats no all-reduce, and
    # with save="conv" the convolutions marked by `keep_conv`.
    if not config.efficient:
        return run
    names = (STATISTICS, CONV_OUTPUT) if config.save == "conv" else (STATISTICS,)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return nnx.remat(run, policy=policy, graph_updates=False)


def apply_stem(conv: Any, norm: Any, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return features of a quarter of the images' height and width."""
    return max_pool(apply_small_stem(conv, norm, x, mask))


def apply_deep_stem(convs: Any, norms: Any, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return features of a quarter of the images' height and width."""
    for conv, norm in zip(convs, norms, strict=True):
        x = apply_small_stem(conv, norm, x, mask)
    return max_pool(x)


def apply_small_stem(conv: Any, norm: Any, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return features of the height and width that the convolution has."""
    return norm(keep_conv(conv(x)), mask=mask)


def keep_conv(h: jax.Array) -> jax.Array:
    """Mark the output of a convolution, which the backward pass keeps with save="conv"."""
    return checkpoint_name(h, CONV_OUTPUT)


class Block(nnx.Module):
    """Shortcut of a block: the input, or a 1x1 convolution with its norm if the shape differs."""

    def _make_shortcut(
        self, in_features: int, out_features: int, strides: int, pool: bool, conv: Any, norm: Any
    ) -> None:
        self.shortcut: Any = nnx.data(None)
        self.shortcut_norm: Any = nnx.data(None)
        self.pools = pool and strides > 1
        if strides > 1 or in_features != out_features or pool:
            self.shortcut = conv(in_features, out_features, 1, 1 if self.pools else strides)
            self.shortcut_norm = norm(out_features, activation=None)

    def _apply_shortcut(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        if self.pools:  # at the border of an odd size, the mean of fewer pixels
            x = nnx.avg_pool(x, (2, 2), (2, 2), padding="SAME", count_include_pad=False)
        return x if self.shortcut is None else self.shortcut_norm(self.shortcut(x), mask=mask)


class Bottleneck(Block):
    """Block of convolutions 1x1, 3x3 and 1x1, each with its norm, plus the shortcut."""

    def __init__(
        self,
        in_features: int,
        inner_features: int,
        out_features: int,
        strides: int,
        stride_in_1x1: bool,
        pool: bool,
        *,
        conv: Callable[..., Any],
        conv2: Callable[..., Any],
        norm: Callable[..., BatchNorm],
    ):
        # The order of construction determines the initial values.
        strides1, strides2 = (strides, 1) if stride_in_1x1 else (1, strides)
        self.conv1 = conv(in_features, inner_features, 1, strides1)
        self.norm1 = norm(inner_features)
        self.conv2 = conv2(inner_features, inner_features, 3, strides2)
        self.norm2 = norm(inner_features)
        self.conv3 = conv(inner_features, out_features, 1)
        self.norm3 = norm(out_features)
        self._make_shortcut(in_features, out_features, strides, pool, conv, norm)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Return the output of the block; the norms apply the ReLUs, the last one to the sum."""
        shortcut = self._apply_shortcut(x, mask)
        h = self.norm1(keep_conv(self.conv1(x)), mask=mask)
        h = self.norm2(keep_conv(self.conv2(h)), mask=mask)
        return self.norm3(self.conv3(h), mask=mask, residual=shortcut)


class BasicBlock(Block):
    """Block of two 3x3 convolutions, each with its norm, plus the shortcut."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        strides: int,
        pool: bool,
        *,
        conv: Callable[..., Any],
        conv2: Callable[..., Any],
        norm: Callable[..., BatchNorm],
    ):
        self.conv1 = conv(in_features, out_features, 3, strides)
        self.norm1 = norm(out_features)
        self.conv2 = conv2(out_features, out_features, 3)
        self.norm2 = norm(out_features)
        self._make_shortcut(in_features, out_features, strides, pool, conv, norm)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Return the output of the block; the norms apply the ReLUs, the last one to the sum."""
        shortcut = self._apply_shortcut(x, mask)
        h = self.norm1(keep_conv(self.conv1(x)), mask=mask)
        return self.norm2(self.conv2(h), mask=mask, residual=shortcut)


class FrozenBatchNorm(BatchNorm):
    """BatchNorm whose running statistics, scale and bias are constants, in training too."""

    def __call__(
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalize x with the running statistics; `use_running_average` and `mask` are unused."""
        # Gradients are zero and not missing, so that optimizers see the tree of other norms.
        constants = (
            lax.stop_gradient(v[...]) for v in (self.mean, self.var, self.scale, self.bias)
        )
        return normalize_inference(
            jnp.asarray(x), *constants, dtype=self.dtype, axis=self.axis, epsilon=self.epsilon,
            activation=self.activation, residual=residual,
        )  # fmt: skip


# Options of the published networks by name; not part of the public interface.
RESNET_OPTIONS: dict[str, dict[str, Any]] = {
    "resnet18": dict(bottleneck=False, stage_sizes=(2, 2, 2, 2)),
    "resnet34": dict(bottleneck=False, stage_sizes=(3, 4, 6, 3)),
    "resnet50": dict(bottleneck=True, stage_sizes=(3, 4, 6, 3)),
    "resnet101": dict(bottleneck=True, stage_sizes=(3, 4, 23, 3)),
    "resnet152": dict(bottleneck=True, stage_sizes=(3, 8, 36, 3)),
    "wide_resnet50_2": dict(stage_sizes=(3, 4, 6, 3), inner_width=128),
    "wide_resnet101_2": dict(stage_sizes=(3, 4, 23, 3), inner_width=128),
    "resnext50_32x4d": dict(stage_sizes=(3, 4, 6, 3), inner_width=128, feature_group_count=32),
    "resnext101_32x8d": dict(stage_sizes=(3, 4, 23, 3), inner_width=256, feature_group_count=32),
    "resnext101_64x4d": dict(stage_sizes=(3, 4, 23, 3), inner_width=256, feature_group_count=64),
}

_publish = functools.partial(make_constructor, ResNet, RESNET_OPTIONS)

resnet18 = _publish("resnet18", "ResNet-18 of basic blocks", 11_689_512)
resnet34 = _publish("resnet34", "ResNet-34 of basic blocks", 21_797_672)
resnet50 = _publish("resnet50", "ResNet-50 of bottlenecks", 25_557_032)
resnet101 = _publish("resnet101", "ResNet-101 of bottlenecks", 44_549_160)
resnet152 = _publish("resnet152", "ResNet-152 of bottlenecks", 60_192_808)
wide_resnet50_2 = _publish("wide_resnet50_2", "Wide ResNet-50-2 (inner width 128)", 68_883_240)
wide_resnet101_2 = _publish("wide_resnet101_2", "Wide ResNet-101-2 (inner width 128)", 126_886_696)
resnext50_32x4d = _publish("resnext50_32x4d", "ResNeXt-50 of 32 groups of 4 channels", 25_028_904)
resnext101_32x8d = _publish(
    "resnext101_32x8d", "ResNeXt-101 of 32 groups of 8 channels", 88_791_336
)
resnext101_64x4d = _publish(
    "resnext101_64x4d", "ResNeXt-101 of 64 groups of 4 channels", 83_455_272
)
