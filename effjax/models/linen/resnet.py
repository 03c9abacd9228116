"""Residual networks in torchvision's layout for Flax linen, as classifiers or backbones."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
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
from ...linen.batch_norm import BatchNorm
from ...linen.deform_conv import DeformConv
from ...linen.kernel import KernelParam
from ...ops._common.arguments import with_torch_hints
from ...ops._common.dtypes import accumulation_dtype
from ...ops.batch_norm.sync import BatchStats


@with_torch_hints
class ResNet(nn.Module, ResNetConfig):
    """ResNet of torchvision's layout on images `[N, H, W, C]`: stem, stages, linear head.

    The options, their defaults and the network are those of `effjax.models.ResNet`. The variables
    have the same names (`stages_0_1/norm1/scale` is nnx's `stages[0][1].norm1.scale`).
    Reverse mode only.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        He et al. 2016 (arXiv:1512.03385); Zagoruyko & Komodakis 2016 (arXiv:1605.07146); Xie et al.
        2017 (arXiv:1611.05431); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    def __post_init__(self):
        ResNetConfig.__post_init__(self)
        super().__post_init__()

    def setup(self):
        """Create the submodules."""
        config = copy_config(self, ResNetConfig)
        self.stem_conv = _conv(stem_spec(config, 0), config)
        self.stem_norm = BatchNorm(**norm_options(config))
        self.stages = [
            [ResNetBlock(spec, config) for spec in specs] for specs in stage_specs(config)
        ]
        if config.num_classes is not None:
            self.classifier = nn.Dense(
                config.num_classes, kernel_init=lecun_normal, dtype=config.dtype,
                param_dtype=config.param_dtype,
            )  # fmt: skip

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: use (and collect) batch statistics. Requires `mutable=["batch_stats"]`.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, or with `num_classes=None` the mean over the image of the last
            stage, computed in `dtype` and returned as float32 (float64 if computed in float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x` or `mask` is wrong, or `axis_name`
                is not mapped in training.
        """
        h = self._features(x, train, mask)[-1].mean((1, 2))
        if self.num_classes is not None:
            h = self.classifier(h)
            chex.assert_shape(h, (None, self.num_classes))
        return h.astype(accumulation_dtype(h))

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """Return the outputs of all stages: `model.apply(variables, x, method="features")`."""
        return self._features(x, train, mask)

    @nn.nowrap
    def _features(self, x: ArrayLike, train: bool, mask: ArrayLike | None) -> tuple[jax.Array, ...]:
        h, image_mask = cast_batch(self, x, mask, None, smallest=1)
        use_running_stats = not train or self.is_initializing()
        norm = norm_spec(self.stem_norm, use_running_stats, has_frozen_norm(self, 0))
        kernel, norm_arrays = self.stem_conv(h.shape[-1]), _norm_arrays(self.stem_norm, self.width)
        arrays = BlockArrays((kernel,), (norm_arrays,))
        h, (batch_stats,) = apply_stem(self, norm, h, arrays, image_mask)
        _update(self.stem_norm, batch_stats)
        h, outputs = stop_frozen_gradient(self, h, 0), []
        for blocks, channels in zip(self.stages, self.feature_channels, strict=True):
            for block in blocks:
                h = block(h, train, image_mask)
            chex.assert_axis_dimension(h, 3, channels)
            h = stop_frozen_gradient(self, h, len(outputs) + 1)
            outputs.append(h)
        return tuple(outputs)


class ResNetBlock(nn.Module):
    """Convolutions of a block with their norms, plus the shortcut, then ReLU."""

    spec: BlockSpec
    config: ResNetConfig

    def setup(self):
        """Create the submodules."""
        config = self.config
        for k, conv_spec in enumerate(self.spec.convs, 1):
            setattr(self, f"conv{k}", _conv(conv_spec, config))
            setattr(self, f"norm{k}", BatchNorm(**norm_options(config)))
        if self.spec.shortcut is not None:
            self.shortcut = _conv(self.spec.shortcut, config)
            self.shortcut_norm = BatchNorm(**norm_options(config, activation=None))

    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Return the output of the block."""
        specs, numbers = list(self.spec.convs), range(1, len(self.spec.convs) + 1)
        convs = [getattr(self, f"conv{k}") for k in numbers]
        norms = [getattr(self, f"norm{k}") for k in numbers]
        if self.spec.shortcut is not None:
            specs.append(self.spec.shortcut)
            convs.append(self.shortcut)
            norms.append(self.shortcut_norm)
        arrays = BlockArrays(
            tuple(_conv_arrays(conv, spec) for conv, spec in zip(convs, specs, strict=True)),
            tuple(_norm_arrays(n, spec.features) for n, spec in zip(norms, specs, strict=True)),
        )
        use_running_stats = not train or self.is_initializing()
        norm_specs = tuple(norm_spec(norm, use_running_stats, self.spec.frozen) for norm in norms)
        y, stats = apply_block(self.config, self.spec, norm_specs, x, arrays, mask)
        for norm, batch_stats in zip(norms, stats, strict=True):
            _update(norm, batch_stats)
        return y


def _conv(spec: ConvSpec, config: ResNetConfig) -> Any:
    if not spec.deformable:
        return KernelParam(spec.features, spec.size, config.param_dtype)
    return DeformConv(
        spec.features, spec.size, spec.strides, spec.padding,
        feature_group_count=spec.groups, use_bias=False, offset_groups=config.offset_groups,
        modulated=config.modulated, predict_offset=True,
        kernel_init=he_normal, dtype=config.dtype, param_dtype=config.param_dtype,
    )  # fmt: skip


def _conv_arrays(layer: Any, spec: ConvSpec) -> Any:
    if not spec.deformable:
        return layer(spec.channels // spec.groups)
    if layer.is_initializing():  # the first call creates the parameters
        layer(jnp.zeros((1, 1, 1, spec.channels), layer.dtype))
    return nn.meta.unbox(layer.variables["params"])


def _norm_arrays(norm: BatchNorm, features: int) -> NormArrays:
    if norm.is_initializing():  # the first call creates the variables
        norm(jnp.zeros((1, features), norm.dtype), use_running_average=True)
    mean, var = (norm.get_variable("batch_stats", name) for name in ("mean", "var"))
    return NormArrays(mean, var, *norm.parameters())


def _update(norm: BatchNorm, batch_stats: BatchStats | None) -> None:
    if batch_stats is not None:
        norm.update_running_stats(batch_stats)
