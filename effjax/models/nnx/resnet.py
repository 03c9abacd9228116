"""Residual networks in torchvision's layout for Flax NNX, as classifiers or for their features."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.typing import ArrayLike

from ...layers.images import he_normal, lecun_normal
from ...layers.residual_block import NormArrays, Part, block, norm_of, stem
from ...layers.resnet import BlockPlan, ConvPlan, ResNetOptions, Save
from ...nnx.batch_norm import BatchNorm
from ...nnx.deform_conv import DeformConv
from ...ops._common.arguments import as_integer
from ...ops._common.dtypes import accumulation_dtype
from ...ops.batch_norm.sync import BatchStats


class ResNet(nnx.Module):
    """ResNet of torchvision's layout on images `[N, H, W, C]`: stem, stages, linear head.

    The stem is a 7x7 convolution with stride 2, BN, ReLU and a 3x3 max pool with stride 2. A block
    is conv1x1-BN-ReLU-conv3x3-BN-ReLU-conv1x1-BN (or conv3x3-BN-ReLU-conv3x3-BN), plus its
    shortcut, ReLU; the first block of every stage but the first has stride 2. Padding is half of
    the kernel on every side, as in PyTorch, and unlike "SAME". The head is the mean over the image
    and a linear layer.

    ReLU and the shortcut's addition are fused into the norms. With `efficient=True` a block keeps
    for its backward pass its input, the statistics of its norms, and the outputs of its inner
    convolutions; the rest is computed again: norms, and the convolutions that end the block and its
    shortcut, which are 1x1 in a bottleneck. No statistics are taken twice, and there is no second
    all-reduce. Outputs, gradients, running statistics and state trees are those of
    `efficient=False`; only memory and time differ. Reverse mode only.

    Args:
        stage_sizes: the number of blocks of each stage.
        bottleneck: blocks of three convolutions (ResNet-50, …) rather than two (-18, -34).
        width: channels of the stem, and of the first stage's 3x3 convolutions; each later stage has
            twice as many. Bottlenecks end with four times as many.
        stride_in_1x1: a bottleneck's stride is in its first convolution, as in Caffe's models and
            maskrcnn-benchmark's, rather than in its 3x3 convolution.
        stage_with_dcn: for each stage, whether `conv2` of its blocks, the 3x3 of a bottleneck, is
            deformable, with its stride; () for none.
        modulated: DCN v2 (offsets and masks) rather than v1 (offsets).
        offset_groups: groups of channels with offsets of their own.
        num_classes: size of the logits; None for no linear layer.
        small_inputs: the stem is one 3x3 convolution, BN and ReLU, for small images.
        efficient: recompute in the backward pass instead of keeping all that a block computes.
        save: "conv" keeps the outputs of a block's convolutions but the last, "features" only the
            block's input and its statistics, and computes all convolutions again.
        frozen_stages: -1 for none, 0 for the stem, k for the stem and the first k stages: their
            norms are frozen, and no gradient goes into them or through them. An optimizer's weight
            decay would still move them: leave them out there.
        frozen_norm: all norms compute with their running statistics, in training too, and have no
            gradients for scale and bias, as maskrcnn-benchmark's FrozenBatchNorm2d (with
            `epsilon=0`).
        axis_name, axis_index_groups: the mapped axes over which all batch statistics are taken. If
            vmap maps them, `grad` of `jit` of it needs `efficient=False`; `jit` of `grad` does not.
        momentum, epsilon: of the BatchNorms; 0.9 is PyTorch's 0.1.
        dtype: of the computation. None: x's, promoted with `param_dtype` unless x is half
            precision. Parameters stay `param_dtype` and statistics float32 or wider.
        param_dtype: of the parameters.
        unbiased_running_var: the running variances are those of PyTorch, σ²·n/(n − 1).
        in_channels: channels of the images.
        rngs: for the parameters (stream `params`).

    Convolutions are initialized from N(0, 2/(kh·kw·out)), those that predict offsets with 0, norms
    with 1 and 0, the head from N(0, 1/in) and 0.

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        He et al. 2016 (arXiv:1512.03385); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    def __init__(
        self,
        *,
        stage_sizes: Sequence[int] = (3, 4, 6, 3),
        bottleneck: bool = True,
        width: int = 64,
        stride_in_1x1: bool = False,
        stage_with_dcn: Sequence[bool] = (),
        modulated: bool = True,
        offset_groups: int = 1,
        num_classes: int | None = 1000,
        small_inputs: bool = False,
        efficient: bool = True,
        save: Save = "conv",
        frozen_stages: int = -1,
        frozen_norm: bool = False,
        axis_name: Any = None,
        axis_index_groups: int | Sequence[Sequence[int]] | None = None,
        momentum: float | None = 0.9,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        unbiased_running_var: bool = False,
        in_channels: int = 3,
        rngs: nnx.Rngs,
    ):
        options = ResNetOptions(
            stage_sizes=stage_sizes, bottleneck=bottleneck, width=width,
            stride_in_1x1=stride_in_1x1, stage_with_dcn=stage_with_dcn, modulated=modulated,
            offset_groups=offset_groups, num_classes=num_classes, small_inputs=small_inputs,
            efficient=efficient, save=save, frozen_stages=frozen_stages, frozen_norm=frozen_norm,
            axis_name=axis_name, axis_index_groups=axis_index_groups, momentum=momentum,
            epsilon=epsilon, dtype=dtype, param_dtype=param_dtype,
            unbiased_running_var=unbiased_running_var,
        )  # fmt: skip
        self.options = options
        self.in_channels = as_integer("in_channels", in_channels, 1)
        self.stem_conv = _conv(options.stem(in_channels), options, rngs)
        self.stem_norm = BatchNorm(width, **options.norm(), rngs=rngs)
        self.stages = nnx.List(
            nnx.List(ResNetBlock(plan, options, rngs=rngs) for plan in plans)
            for plans in options.stages()
        )
        self.classifier: Any = nnx.data(None)
        if num_classes is not None:
            self.classifier = nnx.Linear(
                options.feature_channels[-1], num_classes, kernel_init=lecun_normal, dtype=dtype,
                param_dtype=param_dtype, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self, x: ArrayLike, *, rngs: Any = None, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Logits of images.

        Args:
            x: `[N, H, W, in_channels]`.
            rngs: is taken and not needed, as by all models here.
            mask: bool `[N]` or `[N, 1, 1, 1]`: which images count in the batch statistics.

        Returns:
            `[N, num_classes]`, or with `num_classes=None` the mean over the image of the last
            stage; computed in `dtype`, returned as float32 (float64 where computed so).

        Raises:
            TypeError, ValueError: if `x` or `mask` does not fit, or `axis_name` is not mapped in
                training.
        """
        h = self._features(x, mask)[-1].mean((1, 2))
        if self.classifier is not None:
            h = self.classifier(h)
            chex.assert_shape(h, (None, self.options.num_classes))
        return h.astype(accumulation_dtype(h))

    def features(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> tuple[jax.Array, ...]:
        """The outputs of all stages, in `dtype`: C2 to C5, at 1/4 to 1/32 of the images' size.

        Arguments and errors as in a call; sizes are rounded up. With `small_inputs` they are from
        1/1 on. `feature_channels` says how many channels each has.
        """
        return self._features(x, mask)

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return self.options.feature_channels

    # Not the public method, which `nnx.tabulate` would show in place of the model.
    def _features(self, x: ArrayLike, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        options = self.options
        h, valid = options.prepare(x, self.in_channels, mask)
        norm = norm_of(
            self.stem_norm, self.stem_norm._uses_running_average(), options.freezes_norm(0)
        )
        part = Part((self.stem_conv.kernel[...],), (_arrays(self.stem_norm),))
        h, (batch,) = stem(options, norm, h, part, valid)
        _update(self.stem_norm, batch)
        h, found = options.cut(h, 0), []
        for blocks, channels in zip(self.stages, options.feature_channels, strict=True):
            for each in blocks:
                h = each(h, mask=valid)
            chex.assert_axis_dimension(h, 3, channels)
            h = options.cut(h, len(found) + 1)
            found.append(h)
        return tuple(found)


class ResNetBlock(nnx.Module):
    """The convolutions of a block with their norms, plus the shortcut, ReLU."""

    def __init__(self, plan: BlockPlan, options: ResNetOptions, *, rngs: nnx.Rngs):
        self.plan, self.options = plan, options
        for k, of_conv in enumerate(plan.convs, 1):
            setattr(self, f"conv{k}", _conv(of_conv, options, rngs))
            setattr(self, f"norm{k}", BatchNorm(of_conv.features, **options.norm(), rngs=rngs))
        self.shortcut: Any = nnx.data(None)
        self.shortcut_norm: Any = nnx.data(None)
        if plan.shortcut is not None:
            self.shortcut = _conv(plan.shortcut, options, rngs)
            self.shortcut_norm = BatchNorm(
                plan.shortcut.features, **options.norm(activation=None), rngs=rngs
            )

    def __call__(self, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        numbers = range(1, len(self.plan.convs) + 1)
        convs = [getattr(self, f"conv{k}") for k in numbers]
        norms: list[BatchNorm] = [getattr(self, f"norm{k}") for k in numbers]
        if self.shortcut is not None:
            convs.append(self.shortcut)
            norms.append(self.shortcut_norm)
        part = Part(tuple(map(_parameters, convs)), tuple(map(_arrays, norms)))
        how = (norm_of(norm, norm._uses_running_average(), self.plan.frozen) for norm in norms)
        y, batches = block(self.options, self.plan, tuple(how), x, part, mask)
        for norm, batch in zip(norms, batches, strict=True):
            _update(norm, batch)
        return y


def _conv(plan: ConvPlan, options: ResNetOptions, rngs: nnx.Rngs) -> Any:
    """What `layers.residual_block` computes with these parameters, called by itself."""
    kinds: dict[str, Any] = dict(
        padding=plan.padding, use_bias=False, kernel_init=he_normal, dtype=options.dtype,
        param_dtype=options.param_dtype, rngs=rngs,
    )  # fmt: skip
    if not plan.deformable:
        return nnx.Conv(plan.channels, plan.features, (plan.size,) * 2, plan.strides, **kinds)
    return DeformConv(
        plan.channels, plan.features, plan.size, plan.strides,
        offset_groups=options.offset_groups, modulated=options.modulated, predict_offset=True,
        **kinds,
    )  # fmt: skip


def _parameters(conv: Any) -> Any:
    if not hasattr(conv, "offset_conv"):
        return conv.kernel[...]
    moves = conv.offset_conv
    of_offsets = {"kernel": moves.kernel[...], "bias": moves.bias[...]}
    return {"kernel": conv.kernel[...], "offset_conv": of_offsets}


def _arrays(norm: BatchNorm) -> NormArrays:
    names = NormArrays._fields
    return NormArrays(*(None if (v := getattr(norm, n)) is None else v[...] for n in names))


def _update(norm: BatchNorm, batch: BatchStats | None) -> None:
    if batch is not None:
        norm._update_running_stats(batch)
