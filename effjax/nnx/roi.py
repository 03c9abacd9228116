"""Pooling of boxes with moving bins for Flax NNX."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ..layers.roi import as_offset, masked, of_boxes, pool_options
from ..ops._common.arguments import as_integer
from ..ops.roi import deform_roi_pool


class DeformRoIPool(nnx.Module):
    """The features of boxes of `[N, H, W, C]`, with bins that given offsets move.

    See `effjax.deform_roi_pool`. There are no parameters.

    Args:
        output_size: (rows, columns) of bins, or one number for both.
        spatial_scale, sampling_ratio, gamma: as in `effjax.deform_roi_pool`.
        implementation: None, "native" or "xla", as there.

    Raises:
        TypeError, ValueError: for options outside their range, or shapes that do not fit.

    References:
        Dai et al., Deformable Convolutional Networks, 2017 (arXiv:1703.06211).
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        *,
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        gamma: float = 0.1,
        implementation: Literal["native", "xla"] | None = None,
    ):
        self.options = pool_options(
            output_size, spatial_scale, sampling_ratio, gamma, implementation
        )

    def __call__(
        self, x: jax.Array, boxes: jax.Array, offset: jax.Array | None = None
    ) -> jax.Array:
        """Pools `boxes` `[N, R, 4]`, moved by `offset` `[N, R, rows, columns, 2]`."""
        return deform_roi_pool(x, boxes, offset, **self.options)


class DeformRoIPoolPack(DeformRoIPool):
    """Pooling of boxes that predicts its offsets from the boxes' own features.

    Three fully connected layers, `offset_fc1` to `offset_fc3`, read the bins as they are without
    offsets. The last starts at zero, so that the layer starts as `effjax.roi_align`.

    Args:
        output_channels: C of x.
        deform_fc_channels: outputs of the first two layers.
        dtype, param_dtype: as in `flax.nnx.Linear`.
        rngs: for the parameters (stream `params`).
        **options: further ones of `DeformRoIPool`.
    """

    modulated = False

    def __init__(
        self,
        output_size: int | Sequence[int],
        output_channels: int,
        deform_fc_channels: int = 1024,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(output_size, **options)
        self.output_channels = as_integer("output_channels", output_channels, 1)
        width = as_integer("deform_fc_channels", deform_fc_channels, 1)
        rows, columns = self.options["output_size"]
        features, zeros = rows * columns * output_channels, nnx.initializers.zeros
        shared: Any = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        last: Any = shared | dict(kernel_init=zeros, bias_init=zeros)
        self.offset_fc1 = nnx.Linear(features, width, **shared)
        self.offset_fc2 = nnx.Linear(width, width, **shared)
        self.offset_fc3 = nnx.Linear(width, rows * columns * 2, **last)
        if self.modulated:
            self.mask_fc1 = nnx.Linear(features, width, **shared)
            self.mask_fc2 = nnx.Linear(width, rows * columns, **last)

    def __call__(self, x: jax.Array, boxes: jax.Array) -> jax.Array:  # type: ignore[override]
        """Pools `boxes` `[N, R, 4]` where the layers say."""
        features = of_boxes(deform_roi_pool(x, boxes, **self.options))
        hidden = nnx.relu(self.offset_fc2(nnx.relu(self.offset_fc1(features))))
        offset = as_offset(self.offset_fc3(hidden), self.options["output_size"])
        y = deform_roi_pool(x, boxes, offset, **self.options)
        if not self.modulated:
            return y
        return masked(y, self.mask_fc2(nnx.relu(self.mask_fc1(features))))


class ModulatedDeformRoIPoolPack(DeformRoIPoolPack):
    """Pooling of boxes that predicts its offsets and a mask of its bins.

    The mask is the sigmoid of what two more layers, `mask_fc1` and `mask_fc2`, predict: 1/2 at the
    start. Arguments as `DeformRoIPoolPack`.

    References:
        Zhu et al., Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    modulated = True
