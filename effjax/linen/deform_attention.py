"""Deformable attention and DCNv3 for Flax linen."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike

from ..layers import deform_attention as shared
from ..ops._common.arguments import as_integer, as_real_array, check_features, check_sizes

_zeros, _xavier = nn.initializers.zeros, nn.initializers.xavier_uniform()


class MSDeformAttn(nn.Module):
    """Attention of queries to a few points of feature maps at several scales.

    The fields and the parameters, their names and initial values are those of
    `effjax.nnx.MSDeformAttn`, which documents them.

    Raises:
        TypeError, ValueError: when the layer is called with arguments of a wrong type or shape.

    References:
        Zhu et al., Deformable DETR, 2020 (arXiv:2010.04159).
    """

    features: int = 256
    num_levels: int = 4
    num_heads: int = 8
    num_points: int = 4
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    implementation: Literal["native", "xla"] | None = None
    deterministic: bool = False

    @nn.compact
    def __call__(
        self,
        query: jax.Array,
        reference_points: jax.Array,
        value: jax.Array,
        spatial_shapes: Sequence[tuple[int, int]],
        padding_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to points around reference points, as `effjax.nnx.MSDeformAttn` does."""
        names = "features", "num_levels", "num_heads", "num_points"
        check_sizes({name: getattr(self, name) for name in names}, num_heads="features")
        shapes = shared.check_shapes(spatial_shapes, self.num_levels)
        num_samples = self.num_heads * self.num_levels * self.num_points  # of a query
        # Initially the offsets do not depend on the query: kernel zero, bias with a direction for
        # each head.
        bias_init = shared.offset_bias_init(self.num_heads, self.num_levels, self.num_points)
        y = shared.attend(
            self._linear("value_proj", self.features, _xavier)(value),
            self._linear("sampling_offsets", num_samples * 2, _zeros, bias_init)(query),
            self._linear("attention_weights", num_samples, _zeros)(query),
            reference_points, padding_mask, shapes, self.num_heads,
            implementation=self.implementation, deterministic=self.deterministic,
        )  # fmt: skip
        return self._linear("output_proj", self.features, _xavier)(y)

    @nn.nowrap  # no state handling or named_call for this helper
    def _linear(self, name: str, out: int, kernel_init: Any, bias_init: Any = _zeros) -> nn.Dense:
        return nn.Dense(
            out, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
            kernel_init=kernel_init, bias_init=bias_init, name=name,
        )  # fmt: skip


class DCNv3(nn.Module):
    """Layer of InternImage: `effjax.dcn_aggregate` with predicted offsets and weights.

    The fields and the parameters, their names and initial values are those of `effjax.nnx.DCNv3`,
    which documents them.

    Raises:
        TypeError, ValueError: when the layer is called with arguments of a wrong type or shape.

    References:
        Wang et al., InternImage, 2022 (arXiv:2211.05778).
    """

    features: int
    kernel_size: int = 3
    dw_kernel_size: int | None = None
    kernel_dilation: int = 1
    offset_groups: int = 4
    offset_scale: float = 1.0
    center_feature_scale: bool = False
    remove_center: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    implementation: Literal["native", "xla"] | None = None
    deterministic: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to images `[N, H, W, features]`; return an array of the same shape."""
        names = "features", "kernel_size", "kernel_dilation", "offset_groups"
        check_sizes({name: getattr(self, name) for name in names}, offset_groups="features")
        check_features(as_real_array("x", x), self.features)
        options: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        # Offsets and masks are predicted from z, the samples are taken from a projection of x.
        dw_size = self.kernel_size if self.dw_kernel_size is None else self.dw_kernel_size
        dw_size = as_integer("dw_kernel_size", dw_size, 1)  # Flax takes no NumPy integer
        z = nn.Conv(
            self.features, (dw_size, dw_size), padding=(dw_size - 1) // 2,
            precision=self.precision, feature_group_count=self.features, name="dw_conv", **options,
        )(x)  # fmt: skip
        z = nn.LayerNorm(epsilon=1e-6, name="dw_norm", **options)(z)
        z = jax.nn.gelu(z, approximate=False)
        num_samples = self.offset_groups * (self.kernel_size**2 - self.remove_center)  # of a pixel

        def linear(name: str, out: int, kernel_init: Any) -> nn.Dense:
            return nn.Dense(
                out, precision=self.precision, kernel_init=kernel_init, name=name, **options
            )

        projected = linear("input_proj", self.features, _xavier)(x)
        y = shared.aggregate(
            projected,
            linear("offset", num_samples * 2, _zeros)(z),
            linear("mask", num_samples, _zeros)(z),
            kernel_size=self.kernel_size,
            padding=self.kernel_dilation * (self.kernel_size - 1) // 2,
            kernel_dilation=self.kernel_dilation, offset_groups=self.offset_groups,
            offset_scale=self.offset_scale, remove_center=self.remove_center,
            implementation=self.implementation, deterministic=self.deterministic,
        )  # fmt: skip
        if self.center_feature_scale:
            y = self._blend_center(y, projected, z)
        return linear("output_proj", self.features, _xavier)(y)

    @nn.nowrap
    def _blend_center(self, y: jax.Array, projected: jax.Array, z: jax.Array) -> jax.Array:
        # Two bare parameters instead of a Dense layer: the original stores them under these names,
        # with the weight as [groups, features].
        name, shape = "center_feature_scale_proj", (self.offset_groups, self.features)
        weight = self.param(f"{name}_weight", _zeros, shape, self.param_dtype)
        bias = self.param(f"{name}_bias", _zeros, shape[:1], self.param_dtype)
        z, weight, bias = promote_dtype(z, weight, bias, dtype=self.dtype)
        return shared.blend_center(y, projected, z, weight, bias)
