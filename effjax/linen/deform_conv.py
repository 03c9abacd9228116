"""Deformable convolution for Flax linen."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from ..layers.deform_conv import check_inputs, count_predicted_channels, split_predicted
from ..ops._common.arguments import (
    as_integer,
    as_padding,
    as_pair,
    as_real_array,
    check_features,
    with_torch_hints,
)
from ..ops.samplers.deform_conv import deform_conv2d

_zeros = nn.initializers.zeros


@with_torch_hints
class DeformConv(nn.Module):
    """Deformable convolution of images `[N, H, W, C]`.

    The fields and parameters are those of `effjax.nnx.DeformConv`; `features` is its
    `out_features`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape, when the layer is called.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211); Zhu et al.,
        Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] = 1
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    feature_group_count: int = 1
    offset_groups: int = 1
    modulated: bool = False
    predict_offset: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = _zeros
    implementation: Literal["native", "xla"] | None = None
    deterministic: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, offset: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Convolve `x`, as `effjax.nnx.DeformConv` does."""
        check_inputs(self.predict_offset, self.modulated, offset, mask)
        x = as_real_array("x", x)
        as_integer("feature_group_count", self.feature_group_count, 1)
        kernel = nn.meta.unbox(self.get_variable("params", "kernel"))
        if kernel is not None:
            check_features(x, kernel.shape[2] * self.feature_group_count)
        size = as_pair("kernel_size", self.kernel_size, 1)
        conv_options: dict[str, Any] = dict(
            strides=as_pair("strides", self.strides, 1),
            padding=as_padding(self.padding),
            kernel_dilation=as_pair("kernel_dilation", self.kernel_dilation, 1),
            precision=self.precision,
        )
        if self.predict_offset:
            predicted = nn.Conv(
                count_predicted_channels(size, self.offset_groups, self.modulated), size,
                **conv_options, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=_zeros,
                bias_init=_zeros, name="offset_conv",
            )(x)  # fmt: skip
            offset, mask = split_predicted(predicted, self.modulated)
        shape = (*size, x.shape[-1] // self.feature_group_count, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        arrays: Any = (x, offset, kernel, mask, bias)
        return deform_conv2d(
            *arrays, feature_group_count=self.feature_group_count,
            offset_groups=self.offset_groups, implementation=self.implementation,
            deterministic=self.deterministic, **conv_options,
        )  # fmt: skip
