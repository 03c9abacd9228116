"""Deformable convolution for Flax NNX."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from ..layers.deform_conv import check_inputs, count_predicted_channels, split_predicted
from ..ops._common.arguments import (
    as_padding,
    as_pair,
    as_real_array,
    check_features,
    check_sizes,
    with_torch_hints,
)
from ..ops.samplers.deform_conv import deform_conv2d

_lecun_normal, _zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros


class DeformConv(nnx.Module):
    """Deformable convolution of images `[N, H, W, in_features]`.

    ``y = deform_conv2d(x, offset, kernel, mask, bias)``; see `effjax.deform_conv2d`.

    Offsets and mask are arguments of the call. With `predict_offset`, a convolution `offset_conv`
    computes them from `x`. It has the kernel size, strides, padding and dilation of the layer,
    reads all channels, and starts at zero: the layer starts as a plain convolution (with
    `modulated`, half of one).

    Parameters: `kernel` (HWIO) and `bias`, as in `flax.nnx.Conv`, and those of `offset_conv`.

    Args:
        in_features, out_features, kernel_size, strides, padding, kernel_dilation,
            feature_group_count, use_bias, dtype, param_dtype, precision, kernel_init, bias_init,
            promote_dtype: as in `flax.nnx.Conv`, for images.
        offset_groups: groups of input channels, each with its own offsets.
        modulated: weight each sample with a mask (second version of the paper).
        predict_offset: predict offsets from `x`, and with `modulated` the mask, as the sigmoid of
            the last third of the features of `offset_conv`.
        implementation: None, "native" or "xla", as in `effjax.deform_conv2d`; forward-mode and
            second derivatives need "xla".
        deterministic: make gradients bitwise reproducible on a GPU.
        rngs: for the parameters (stream `params`).

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape; most when the layer is
            called.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211); Zhu et al.,
        Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    @with_torch_hints
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        feature_group_count: int = 1,
        offset_groups: int = 1,
        modulated: bool = False,
        predict_offset: bool = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _lecun_normal,
        bias_init: Initializer = _zeros,
        promote_dtype: PromoteDtypeFn = promote_dtype,
        implementation: Literal["native", "xla"] | None = None,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        sizes = dict(in_features=in_features, out_features=out_features)
        groups = dict(feature_group_count=feature_group_count, offset_groups=offset_groups)
        check_sizes(sizes | groups, **dict.fromkeys(groups, "in_features"))
        check_sizes(sizes | groups, feature_group_count="out_features")
        size = as_pair("kernel_size", kernel_size, 1)
        conv_options: dict[str, Any] = dict(
            strides=as_pair("strides", strides, 1),
            padding=as_padding(padding),
            kernel_dilation=as_pair("kernel_dilation", kernel_dilation, 1),
            precision=precision,
        )
        self.options = conv_options | dict(
            feature_group_count=feature_group_count,
            offset_groups=offset_groups,
            implementation=implementation,
            deterministic=deterministic,
        )
        self.modulated, self.predict_offset = modulated, predict_offset
        self.dtype, self.promote_dtype = dtype, promote_dtype
        shape = (*size, in_features // feature_group_count, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias: Any = nnx.data(None if bias is None else nnx.Param(bias))
        if predict_offset:
            self.offset_conv = nnx.Conv(
                in_features, count_predicted_channels(size, offset_groups, modulated), size,
                **conv_options, dtype=dtype, param_dtype=param_dtype, kernel_init=_zeros,
                bias_init=_zeros, promote_dtype=promote_dtype, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self, x: jax.Array, offset: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Convolve `x`.

        Args:
            x: `[N, H, W, in_features]`.
            offset: `[N, Ho, Wo, offset_groups * K * 2]`, (y, x) in pixels for each tap; None with
                `predict_offset`.
            mask: `[N, Ho, Wo, offset_groups * K]` with `modulated`, else None; None with
                `predict_offset`.

        Returns:
            `[N, Ho, Wo, out_features]`.
        """
        check_inputs(self.predict_offset, self.modulated, offset, mask)
        groups: Any = self.options["feature_group_count"]
        check_features(as_real_array("x", x), self.kernel.shape[2] * groups)
        if self.predict_offset:
            offset, mask = self._predict(x)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        return deform_conv2d(x, offset, kernel, mask, bias, **self.options)  # type: ignore[arg-type]

    def offset_and_mask(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the predicted offsets, in pixels, and the mask in (0, 1), None if unmodulated."""
        return self._predict(x)

    # `__call__` uses this method, because `nnx.tabulate` would list a public one as a layer.
    def _predict(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return split_predicted(self.offset_conv(x), self.modulated)
