"""Pooling of boxes with moving bins for Flax linen."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype

from ..layers.roi import apply_mask, as_offset, flatten_bins
from ..ops._common.arguments import as_integer, as_pair
from ..ops.samplers.roi import deform_roi_pool


class DeformRoIPool(nn.Module):
    """RoI pooling of x `[N, H, W, C]` with bins that are shifted by offsets.

    The fields are the arguments of `effjax.nnx.DeformRoIPool`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape, when the layer is called.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """

    output_size: int | Sequence[int]
    spatial_scale: float = 1.0
    sampling_ratio: int = 0
    gamma: float = 0.1
    implementation: Literal["native", "xla"] | None = None
    deterministic: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, boxes: jax.Array, offset: jax.Array | None = None
    ) -> jax.Array:
        """Pool `boxes` `[N, R, 4]`, with bins shifted by `offset` `[N, R, rows, columns, 2]`."""
        return deform_roi_pool(x, boxes, offset, **self._options())

    @nn.nowrap
    def _options(self) -> dict[str, Any]:
        return dict(
            output_size=as_pair("output_size", self.output_size, 1),
            spatial_scale=self.spatial_scale, sampling_ratio=self.sampling_ratio,
            gamma=self.gamma, implementation=self.implementation,
            deterministic=self.deterministic,
        )  # fmt: skip


class DeformRoIPoolPack(DeformRoIPool):
    """Pooling of boxes that predicts its offsets, as `effjax.nnx.DeformRoIPoolPack`.

    The number of channels is that of x.
    """

    deform_fc_channels: int = 1024
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    modulated: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x: jax.Array, boxes: jax.Array) -> jax.Array:  # type: ignore[override]
        """Pool `boxes` `[N, R, 4]` with the predicted offsets."""
        options = self._options()
        width = as_integer("deform_fc_channels", self.deform_fc_channels, 1)
        (rows, columns), zeros = options["output_size"], nn.initializers.zeros

        def layer(name: str, size: int, **inits: Any) -> nn.Dense:
            dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
            return nn.Dense(size, name=name, **dtypes, **inits)  # type: ignore[arg-type]

        last = dict(kernel_init=zeros, bias_init=zeros)
        features = flatten_bins(deform_roi_pool(x, boxes, **options))
        hidden = nn.relu(layer("offset_fc1", width)(features))
        hidden = nn.relu(layer("offset_fc2", width)(hidden))
        predicted = layer("offset_fc3", rows * columns * 2, **last)(hidden)
        y = deform_roi_pool(x, boxes, as_offset(predicted, (rows, columns)), **options)
        if not self.modulated:
            return y
        hidden = nn.relu(layer("mask_fc1", width)(features))
        return apply_mask(y, layer("mask_fc2", rows * columns, **last)(hidden))


class ModulatedDeformRoIPoolPack(DeformRoIPoolPack):
    """Pooling of boxes that predicts its offsets and a mask of its bins.

    See `effjax.nnx.ModulatedDeformRoIPoolPack`.
    """

    modulated: ClassVar[bool] = True
