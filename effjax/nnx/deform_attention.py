"""Deformable attention and DCNv3 for Flax NNX."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike

from ..layers import deform_attention as shared
from ..ops._common.arguments import as_integer, as_real_array, check_features, check_sizes

Implementation = Literal["native", "xla"] | None
_zeros, _xavier = nnx.initializers.zeros, nnx.initializers.xavier_uniform()


class MSDeformAttn(nnx.Module):
    """Attention of queries to a few points of feature maps at several scales.

    ``output_proj(ms_deform_attn(value_proj(value), locations, softmax(attention_weights(query))))``
    with ``locations = reference_points + sampling_offsets(query)``; see `effjax.ms_deform_attn`.

    Parameters: `kernel` and `bias` of these four linear layers. They have the names of the original
    and of mmcv, so that `effjax.convert.from_torch` needs no table. Initially all weights are
    equal, and each head has its own direction, with point p at p + 1 pixels of each level.

    Args:
        features: channels of queries, values and results.
        num_levels, num_heads, num_points: L, M and P.
        dtype, param_dtype, precision: as in `flax.nnx.Linear`. Locations and the softmax are
            computed in float32 at least.
        implementation: None, "native" or "xla", as in `effjax.ms_deform_attn`; forward-mode and
            second derivatives need "xla".
        deterministic: make gradients bitwise reproducible on a GPU.
        rngs: for the parameters (stream `params`).

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape.

    References:
        Zhu et al., Deformable DETR, 2020 (arXiv:2010.04159).
    """

    def __init__(
        self,
        features: int = 256,
        num_levels: int = 4,
        num_heads: int = 8,
        num_points: int = 4,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        sizes = dict(features=features, num_levels=num_levels, num_points=num_points)
        check_sizes(sizes | dict(num_heads=num_heads), num_heads="features")
        self.num_levels, self.num_heads = num_levels, num_heads
        self.options: dict[str, Any] = dict(
            implementation=implementation, deterministic=deterministic
        )
        samples = num_heads * num_levels * num_points
        options: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )

        def linear(out: int, kernel_init: Any, bias_init: Any = _zeros) -> nnx.Linear:
            return nnx.Linear(
                features, out, kernel_init=kernel_init, bias_init=bias_init, **options
            )

        bias_init = shared.offset_bias_init(num_heads, num_levels, num_points)
        self.sampling_offsets = linear(samples * 2, _zeros, bias_init)
        self.attention_weights = linear(samples, _zeros)
        self.value_proj = linear(features, _xavier)
        self.output_proj = linear(features, _xavier)

    def __call__(
        self,
        query: jax.Array,
        reference_points: jax.Array,
        value: jax.Array,
        spatial_shapes: Sequence[tuple[int, int]],
        padding_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attend from each query to points around its reference points.

        Args:
            query: `[N, Q, features]`.
            reference_points: `[N, Q, L, 2]`, (x, y) in [0, 1] of each level, or boxes
                `[N, Q, L, 4]`, (x, y, width, height), whose size scales the offsets.
            value: `[N, S, features]`, the pixels of all levels, level by level.
            spatial_shapes: (H, W) of each level.
            padding_mask: `[N, S]`, True for padding pixels of value, which are replaced by zero.

        Returns:
            `[N, Q, features]`.
        """
        shapes = shared.check_shapes(spatial_shapes, self.num_levels)
        y = shared.attend(
            self.value_proj(value), self.sampling_offsets(query), self.attention_weights(query),
            reference_points, padding_mask, shapes, self.num_heads, **self.options,
        )  # fmt: skip
        return self.output_proj(y)


class DCNv3(nnx.Module):
    """Layer of InternImage: `effjax.dcn_aggregate` with predicted offsets and weights.

    ``output_proj(dcn_aggregate(input_proj(x), offset(z), softmax(mask(z))))`` with
    ``z = gelu(layer_norm(depthwise(x)))``. The output has the size of the input. Parameters have
    the names of the original, except `dw_conv` and `dw_norm`; the table is `effjax.convert.DCNV3`.

    Args:
        features: channels of x and of the result.
        kernel_size: of the window; odd.
        dw_kernel_size: of the depthwise convolution, odd; None for `kernel_size`.
        kernel_dilation, offset_groups, offset_scale, remove_center: as in `effjax.dcn_aggregate`.
        center_feature_scale: blend the result with ``input_proj(x)``, with a weight per group.
        dtype, param_dtype, precision: as in `flax.nnx.Linear`.
        implementation: None, "native" or "xla", as in `effjax.dcn_aggregate`.
        deterministic: make gradients bitwise reproducible on a GPU.
        rngs: for the parameters (stream `params`).

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape; most when the layer is
            called.

    References:
        Wang et al., InternImage, 2022 (arXiv:2211.05778).
    """

    def __init__(
        self,
        features: int,
        kernel_size: int = 3,
        *,
        dw_kernel_size: int | None = None,
        kernel_dilation: int = 1,
        offset_groups: int = 4,
        offset_scale: float = 1.0,
        center_feature_scale: bool = False,
        remove_center: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        self.features, self.dtype = features, dtype
        kernel_size = as_integer("kernel_size", kernel_size, 1)
        sizes = dict(features=features, kernel_dilation=kernel_dilation)
        check_sizes(sizes | dict(offset_groups=offset_groups), offset_groups="features")
        if dw_kernel_size is None:
            dw_kernel_size = kernel_size
        size = as_integer("dw_kernel_size", dw_kernel_size, 1)
        self.options: dict[str, Any] = dict(
            kernel_size=kernel_size, padding=kernel_dilation * (kernel_size - 1) // 2,
            kernel_dilation=kernel_dilation, offset_groups=offset_groups,
            offset_scale=offset_scale, remove_center=remove_center, implementation=implementation,
            deterministic=deterministic,
        )  # fmt: skip
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.dw_conv = nnx.Conv(
            features, features, (size, size), padding=(size - 1) // 2, precision=precision,
            feature_group_count=features, **options,
        )  # fmt: skip
        self.dw_norm = nnx.LayerNorm(features, epsilon=1e-6, **options)
        points = offset_groups * (kernel_size**2 - remove_center)
        options["precision"] = precision
        self.offset = nnx.Linear(features, points * 2, kernel_init=_zeros, **options)
        self.mask = nnx.Linear(features, points, kernel_init=_zeros, **options)
        self.input_proj = nnx.Linear(features, features, kernel_init=_xavier, **options)
        self.output_proj = nnx.Linear(features, features, kernel_init=_xavier, **options)
        self.center_feature_scale = center_feature_scale
        if center_feature_scale:
            zeros = jnp.zeros((offset_groups, features), param_dtype)
            self.center_feature_scale_proj_weight = nnx.Param(zeros)
            self.center_feature_scale_proj_bias = nnx.Param(zeros[:, 0])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to images `[N, H, W, features]`."""
        check_features(as_real_array("x", x), self.features)
        projected = self.input_proj(x)
        z = jax.nn.gelu(self.dw_norm(self.dw_conv(x)), approximate=False)
        y = shared.aggregate(projected, self.offset(z), self.mask(z), **self.options)
        if self.center_feature_scale:
            weight = self.center_feature_scale_proj_weight[...]
            bias = self.center_feature_scale_proj_bias[...]
            z, weight, bias = promote_dtype((z, weight, bias), dtype=self.dtype)
            y = shared.blend_center(y, projected, z, weight, bias)
        return self.output_proj(y)
