"""Residual networks in torchvision's layout for Flax linen."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike

from ...layers.images import he_normal, lecun_normal
from ...layers.residual_block import NormArrays, Part, block, norm_of, stem
from ...layers.resnet import BlockPlan, ConvPlan, ResNetOptions, Save
from ...linen.batch_norm import BatchNorm
from ...linen.deform_conv import DeformConv
from ...ops._common.arguments import as_flag
from ...ops._common.dtypes import accumulation_dtype
from ...ops.batch_norm.sync import BatchStats


class ResNet(nn.Module):
    """ResNet of torchvision's layout on images `[N, H, W, C]`: stem, stages, linear head.

    The options, their defaults and the network are those of `effjax.models.ResNet`, whose
    documentation holds here too; the variables have the same names (`stages_0_1/norm1/scale` is
    nnx's `stages[0][1].norm1.scale`). Reverse mode only.

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        He et al. 2016 (arXiv:1512.03385); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    stride_in_1x1: bool = False
    stage_with_dcn: Sequence[bool] = ()
    modulated: bool = True
    offset_groups: int = 1
    num_classes: int | None = 1000
    small_inputs: bool = False
    efficient: bool = True
    save: Save = "conv"
    frozen_stages: int = -1
    frozen_norm: bool = False
    axis_name: Any = None
    axis_index_groups: Any = None
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    unbiased_running_var: bool = False

    def __post_init__(self):
        _options(self)  # checks them
        super().__post_init__()

    def setup(self):
        options = self.options
        self.stem_conv = Kernel(options.stem(0), options)
        self.stem_norm = BatchNorm(**options.norm())
        self.stages = [[ResNetBlock(plan, options) for plan in plans] for plans in options.stages()]
        if options.num_classes is not None:
            self.classifier = nn.Dense(
                options.num_classes, kernel_init=lecun_normal, dtype=options.dtype,
                param_dtype=options.param_dtype,
            )  # fmt: skip

    @property
    def options(self) -> ResNetOptions:
        """The fields, checked."""
        return _options(self)

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return self.options.feature_channels

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: whether to use (and collect) batch statistics. Needs `mutable=["batch_stats"]`.
            mask: bool `[N]` or `[N, 1, 1, 1]`: which images count in the batch statistics.

        Returns:
            `[N, num_classes]`, or with `num_classes=None` the mean over the image of the last
            stage; computed in `dtype`, returned as float32 (float64 where computed so).

        Raises:
            TypeError, ValueError: if `x`, `train` or `mask` does not fit, or `axis_name` is not
                mapped in training.
        """
        h = self._features(x, train, mask)[-1].mean((1, 2))
        if self.num_classes is not None:
            h = self.classifier(h)
            chex.assert_shape(h, (None, self.num_classes))
        return h.astype(accumulation_dtype(h))

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """The outputs of all stages, as nnx's: `model.apply(variables, x, method="features")`."""
        return self._features(x, train, mask)

    @nn.nowrap
    def _features(self, x: ArrayLike, train: bool, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        options = self.options
        as_flag("train", train)
        h, valid = options.prepare(x, None, mask)
        norm = norm_of(self.stem_norm, not train or self.is_initializing(), options.freezes_norm(0))
        arrays = _arrays(self.stem_norm, options.width)
        part = Part((self.stem_conv(h.shape[-1]),), (arrays,))
        h, (batch,) = stem(options, norm, h, part, valid)
        _update(self.stem_norm, batch)
        h, found = options.cut(h, 0), []
        for blocks, channels in zip(self.stages, options.feature_channels, strict=True):
            for each in blocks:
                h = each(h, train, valid)
            chex.assert_axis_dimension(h, 3, channels)
            h = options.cut(h, len(found) + 1)
            found.append(h)
        return tuple(found)


def _options(module: ResNet) -> ResNetOptions:
    names = [field.name for field in dataclasses.fields(ResNetOptions)]
    return ResNetOptions(**{name: getattr(module, name) for name in names})


class ResNetBlock(nn.Module):
    """The convolutions of a block with their norms, plus the shortcut, ReLU."""

    plan: BlockPlan
    options: ResNetOptions

    def setup(self):
        options = self.options
        for k, of_conv in enumerate(self.plan.convs, 1):
            setattr(self, f"conv{k}", _conv(of_conv, options))
            setattr(self, f"norm{k}", BatchNorm(**options.norm()))
        if self.plan.shortcut is not None:
            self.shortcut = Kernel(self.plan.shortcut, options)
            self.shortcut_norm = BatchNorm(**options.norm(activation=None))

    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        plans, numbers = list(self.plan.convs), range(1, len(self.plan.convs) + 1)
        convs = [getattr(self, f"conv{k}") for k in numbers]
        norms = [getattr(self, f"norm{k}") for k in numbers]
        if self.plan.shortcut is not None:
            plans.append(self.plan.shortcut)
            convs.append(self.shortcut)
            norms.append(self.shortcut_norm)
        part = Part(
            tuple(_parameters(*pair) for pair in zip(convs, plans, strict=True)),
            tuple(_arrays(norm, p.features) for norm, p in zip(norms, plans, strict=True)),
        )
        running = not train or self.is_initializing()
        how = tuple(norm_of(norm, running, self.plan.frozen) for norm in norms)
        y, batches = block(self.options, self.plan, how, x, part, mask)
        for norm, batch in zip(norms, batches, strict=True):
            _update(norm, batch)
        return y


class Kernel(nn.Module):
    """Holds a kernel; the convolution is in `layers.residual_block`."""

    plan: ConvPlan
    options: ResNetOptions

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        shape = (self.plan.size, self.plan.size, channels, self.plan.features)
        return self.param("kernel", he_normal, shape, self.options.param_dtype)


def _conv(plan: ConvPlan, options: ResNetOptions) -> Any:
    if not plan.deformable:
        return Kernel(plan, options)
    return DeformConv(
        plan.features, plan.size, plan.strides, plan.padding, use_bias=False,
        offset_groups=options.offset_groups, modulated=options.modulated, predict_offset=True,
        kernel_init=he_normal, dtype=options.dtype,
        param_dtype=options.param_dtype,
    )  # fmt: skip


def _parameters(layer: Any, plan: ConvPlan) -> Any:
    if not plan.deformable:
        return layer(plan.channels)
    if layer.is_initializing():
        layer(jnp.zeros((1, 1, 1, plan.channels), layer.dtype))  # which creates them
    return nn.meta.unbox(layer.variables["params"])


def _arrays(norm: BatchNorm, features: int) -> NormArrays:
    if norm.is_initializing():
        norm(jnp.zeros((1, features), norm.dtype), use_running_average=True)  # which creates them
    mean, var = (norm.get_variable("batch_stats", name) for name in ("mean", "var"))
    if mean is None and not norm.is_mutable_collection("batch_stats"):
        raise ValueError("The variables have no `batch_stats`: pass all that `init` gives.")
    return NormArrays(mean, var, *norm.parameters())


def _update(norm: BatchNorm, batch: BatchStats | None) -> None:
    if batch is not None:
        norm.update_running_stats(batch)
