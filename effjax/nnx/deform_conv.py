"""Deformable convolution for Flax NNX."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
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
from ..ops._common.arguments import as_array, as_flag
from ..ops.deform_conv import deform_conv2d

Implementation = Literal["native", "xla", "fused"] | None
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

_default_kernel_init = nnx.initializers.lecun_normal()


class DeformConv(nnx.Module):
    """Deformable convolution (DCN v1) of `[N, H, W, in_features]` with offsets that are given.

    Each tap of the kernel reads the image where an offset moves it, by bilinear interpolation; see
    `effjax.deform_conv2d`. Parameters: `kernel` (HWIO) and `bias`, as in `flax.nnx.Conv`.

    Args:
        in_features, out_features, kernel_size, strides, padding, kernel_dilation,
            feature_group_count, use_bias, dtype, param_dtype, precision, kernel_init, bias_init:
            as in `flax.nnx.Conv`, for images.
        offset_groups: groups of input channels with offsets of their own.
        implementation: None, "native", "xla" or "fused", as in `effjax.deform_conv2d`; forward mode
            and second derivatives need "xla".
        deterministic: whether gradients are the same, bit for bit, in every run.
        rngs: for the parameters (stream `params`).

    Raises:
        ValueError: for options outside their range, or shapes that do not fit.
        TypeError: for what is no number, array or dtype, and for images or parameters that are
            not real floating-point numbers.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """

    modulated = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: Padding = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        feature_group_count: int = 1,
        offset_groups: int = 1,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        implementation: Implementation = None,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        features = {"in_features": in_features, "out_features": out_features}
        shape = kernel_shape(kernel_size, feature_group_count, features=features)
        check_parameters(use_bias, dtype, param_dtype, kernel_init, bias_init)
        self.options = convolution_options(
            strides=strides, padding=padding, kernel_dilation=kernel_dilation,
            feature_group_count=feature_group_count, offset_groups=offset_groups,
            precision=precision, implementation=implementation, deterministic=deterministic,
        )  # fmt: skip
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias: Any = nnx.data(None if bias is None else nnx.Param(bias))
        self.dtype = dtype

    def __call__(self, x: jax.Array, offset: jax.Array) -> jax.Array:
        """Convolves `x` with its taps moved by `offset` `[N, Ho, Wo, offset_groups·K·2]`."""
        return self._convolve(x, offset, None)

    def _convolve(self, x: jax.Array, offset: jax.Array, mask: jax.Array | None) -> jax.Array:
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        operands = real_operands(x, kernel, bias, self._channels())
        x, kernel, bias = promote_dtype(operands, dtype=self.dtype)
        return deform_conv2d(x, offset, kernel, mask, bias, **self.options)  # type: ignore[arg-type]

    def _channels(self) -> int:
        return self.kernel.shape[2] * self.options["feature_group_count"]


class ModulatedDeformConv(DeformConv):
    """Deformable convolution whose taps are weighted too (DCN v2); both are given.

    Arguments as `DeformConv`.

    References:
        Zhu et al., Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    modulated = True

    def __call__(self, x: jax.Array, offset: jax.Array, mask: jax.Array) -> jax.Array:  # type: ignore[override]
        """As `DeformConv`, with each tap times `mask` `[N, Ho, Wo, offset_groups·K]`."""
        return self._convolve(x, offset, as_array("mask", mask))


class DeformConvPack(DeformConv):
    """Deformable convolution (DCN v1) that predicts its offsets with a convolution of its own.

    `offset_conv` has the kernel's size, strides, padding and dilation, reads all channels, and
    starts at zero, so that the layer starts as a plain convolution. Arguments as `DeformConv`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(in_features, out_features, kernel_size, strides, rngs=rngs, **options)
        size, zeros = self.kernel.shape[:2], nnx.initializers.zeros
        shared = ("strides", "padding", "kernel_dilation", "precision")
        self.offset_conv = nnx.Conv(
            in_features, predicted_features(size, self.options["offset_groups"], self.modulated),
            size, kernel_init=zeros, bias_init=zeros, rngs=rngs,
            **{name: self.options[name] for name in shared},
            **{name: options[name] for name in ("dtype", "param_dtype") if name in options},
        )  # fmt: skip

    def offset_and_mask(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """What is predicted for `x`: offsets in pixels, and the mask in (0, 1), None for v1."""
        return self._predict(x)

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        """Convolves `x` where `offset_conv` says."""
        return self._convolve(x, *self._predict(x))

    # Not the public method, which `nnx.tabulate` would show in place of the layer.
    def _predict(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = checked_images(x, self._channels())
        return split_predicted(self.offset_conv(x), self.modulated)


class ModulatedDeformConvPack(DeformConvPack):
    """Modulated deformable convolution (DCN v2) that predicts its offsets and mask.

    The mask is the sigmoid of the last third of `offset_conv`'s channels: 1/2 at the start.
    Arguments as `DeformConv`.
    """

    modulated = True


class DFConv2d(nnx.Module):
    """The layer of detection networks: a `DeformConvPack`, modulated or not, that keeps the size.

    For odd kernels, that is: padding is `kernel_dilation·(kernel_size − 1)/2` on every side, as in
    maskrcnn-benchmark's `DFConv2d`, and there is no bias unless asked for. The parameters are those
    of `conv`.

    Args:
        modulated: DCN v2 rather than v1.
        **options: further ones of `DeformConv`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int] = 3,
        strides: int | Sequence[int] = 1,
        *,
        modulated: bool = True,
        kernel_dilation: int | Sequence[int] = 1,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        modulated = as_flag("modulated", modulated)
        self.conv = (ModulatedDeformConvPack if modulated else DeformConvPack)(
            in_features, out_features, kernel_size, strides,
            padding=symmetric_padding(kernel_size, kernel_dilation),
            kernel_dilation=kernel_dilation, use_bias=use_bias, rngs=rngs, **options,
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolves `x`."""
        return self.conv(x)
