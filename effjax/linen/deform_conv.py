"""Deformable convolution for Flax linen."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from ..layers.deform_conv import (
    check_parameters,
    checked_images,
    convolution_options,
    kernel_shape,
    predicted_features,
    real_operands,
    split_predicted,
    symmetric_padding,
)
from ..ops._common.arguments import as_array, as_flag, as_pair, describe
from ..ops.deform_conv import deform_conv2d


class DeformConv(nn.Module):
    """Deformable convolution (DCN v1) of `[N, H, W, C]` with offsets that are given.

    Its fields, defaults and parameters are those of `effjax.nnx.DeformConv`, whose documentation
    holds here too; `features` are the output channels.

    Raises:
        TypeError, ValueError: as nnx's, when the layer is called.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] = 1
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    feature_group_count: int = 1
    offset_groups: int = 1
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros
    implementation: Literal["native", "xla", "fused"] | None = None
    deterministic: bool = False

    modulated: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x: jax.Array, offset: jax.Array) -> jax.Array:
        """Convolves `x` with its taps moved by `offset` `[N, Ho, Wo, offset_groups·K·2]`."""
        return self._convolve(x, offset, None)

    @nn.nowrap  # no rows of their own in linen's tables
    def _convolve(self, x: jax.Array, offset: jax.Array, mask: jax.Array | None) -> jax.Array:
        x, options = checked_images(x), self._options()
        features = {"in_features": x.shape[-1], "features": self.features}
        shape = kernel_shape(self.kernel_size, self.feature_group_count, features=features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        operands = real_operands(x, kernel, bias, x.shape[-1])
        x, kernel, bias = promote_dtype(*operands, dtype=self.dtype)
        return deform_conv2d(x, offset, kernel, mask, bias, **options)  # type: ignore[arg-type]

    @nn.nowrap
    def _options(self) -> dict[str, Any]:
        check_parameters(
            self.use_bias, self.dtype, self.param_dtype, self.kernel_init, self.bias_init
        )
        return convolution_options(
            strides=self.strides, padding=self.padding, kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count, offset_groups=self.offset_groups,
            precision=self.precision, implementation=self.implementation,
            deterministic=self.deterministic,
        )  # fmt: skip


class ModulatedDeformConv(DeformConv):
    """Deformable convolution whose taps are weighted too (DCN v2); both are given.

    Fields as `DeformConv`.

    References:
        Zhu et al., Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    modulated: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, offset: jax.Array, mask: jax.Array) -> jax.Array:  # type: ignore[override]
        """As `DeformConv`, with each tap times `mask` `[N, Ho, Wo, offset_groups·K]`."""
        return self._convolve(x, offset, as_array("mask", mask))


class DeformConvPack(DeformConv):
    """Deformable convolution (DCN v1) that predicts its offsets, as `effjax.nnx.DeformConvPack`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        """Convolves `x` where `offset_conv` says."""
        x, options = checked_images(x), self._options()
        size, zeros = as_pair("kernel_size", self.kernel_size, 1), nn.initializers.zeros
        predicted = nn.Conv(
            predicted_features(size, self.offset_groups, self.modulated), size,
            options["strides"], options["padding"], kernel_dilation=options["kernel_dilation"],
            dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
            kernel_init=zeros, bias_init=zeros, name="offset_conv",
        )(x)  # type: ignore[arg-type] # fmt: skip
        return self._convolve(x, *split_predicted(predicted, self.modulated))


class ModulatedDeformConvPack(DeformConvPack):
    """Modulated deformable convolution (DCN v2) that predicts its offsets and mask, as
    `effjax.nnx.ModulatedDeformConvPack`."""

    modulated: ClassVar[bool] = True


class DFConv2d(nn.Module):
    """The layer of detection networks, as `effjax.nnx.DFConv2d`; `options` are further fields of
    `DeformConv`."""

    features: int
    kernel_size: int | Sequence[int] = 3
    strides: int | Sequence[int] = 1
    modulated: bool = True
    kernel_dilation: int | Sequence[int] = 1
    use_bias: bool = False
    options: Any = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolves `x`."""
        if self.options != () and not isinstance(self.options, Mapping):
            raise TypeError(f"`options` must be a mapping, not {describe(self.options)}.")
        modulated = as_flag("modulated", self.modulated)
        return (ModulatedDeformConvPack if modulated else DeformConvPack)(
            self.features, self.kernel_size, self.strides,
            symmetric_padding(self.kernel_size, self.kernel_dilation), self.kernel_dilation,
            use_bias=self.use_bias, name="conv", **dict(self.options),
        )(x)  # type: ignore[arg-type] # fmt: skip
