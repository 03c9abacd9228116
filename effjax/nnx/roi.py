"""Pooling of boxes with moving bins for Flax NNX."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ..layers.roi import apply_mask, as_offset, flatten_bins
from ..ops._common.arguments import as_pair, check_sizes
from ..ops.samplers.roi import deform_roi_pool


class DeformRoIPool(nnx.Module):
    """RoI pooling of x `[N, H, W, C]` with bins that are shifted by offsets.

    See `effjax.deform_roi_pool`. The layer has no parameters.

    Args:
        output_size: (rows, columns) of bins, or one integer for both.
        spatial_scale, sampling_ratio, gamma, implementation, deterministic: as in
            `effjax.deform_roi_pool`.

    Raises:
        TypeError, ValueError: for arguments of a wrong type or shape; most when the layer is
            called.

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
        deterministic: bool = False,
    ):
        self.options: dict[str, Any] = dict(
            output_size=as_pair("output_size", output_size, 1), spatial_scale=spatial_scale,
            sampling_ratio=sampling_ratio, gamma=gamma, implementation=implementation,
            deterministic=deterministic,
        )  # fmt: skip

    def __call__(
        self, x: jax.Array, boxes: jax.Array, offset: jax.Array | None = None
    ) -> jax.Array:
        """Pool `boxes` `[N, R, 4]`, with bins shifted by `offset` `[N, R, rows, columns, 2]`."""
        return deform_roi_pool(x, boxes, offset, **self.options)


class DeformRoIPoolPack(DeformRoIPool):
    """Pooling of boxes that predicts its offsets from the features of the boxes.

    Three fully connected layers, `offset_fc1` to `offset_fc3`, read the bins without offsets. The
    last one starts at zero, so that the layer starts as `effjax.roi_align`.

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
        check_sizes(dict(output_channels=output_channels, deform_fc_channels=deform_fc_channels))
        super().__init__(output_size, **options)
        rows, columns = self.options["output_size"]
        features, zeros = rows * columns * output_channels, nnx.initializers.zeros
        shared: Any = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        last: Any = shared | dict(kernel_init=zeros, bias_init=zeros)
        self.offset_fc1 = nnx.Linear(features, deform_fc_channels, **shared)
        self.offset_fc2 = nnx.Linear(deform_fc_channels, deform_fc_channels, **shared)
        self.offset_fc3 = nnx.Linear(deform_fc_channels, rows * columns * 2, **last)
        if self.modulated:
            self.mask_fc1 = nnx.Linear(features, deform_fc_channels, **shared)
            self.mask_fc2 = nnx.Linear(deform_fc_channels, rows * columns, **last)

    def __call__(self, x: jax.Array, boxes: jax.Array) -> jax.Array:  # type: ignore[override]
        """Pool `boxes` `[N, R, 4]` with the predicted offsets."""
        features = flatten_bins(deform_roi_pool(x, boxes, **self.options))
        hidden = nnx.relu(self.offset_fc2(nnx.relu(self.offset_fc1(features))))
        offset = as_offset(self.offset_fc3(hidden), self.options["output_size"])
        y = deform_roi_pool(x, boxes, offset, **self.options)
        if not self.modulated:
            return y
        return apply_mask(y, self.mask_fc2(nnx.relu(self.mask_fc1(features))))


class ModulatedDeformRoIPoolPack(DeformRoIPoolPack):
    """Pooling of boxes that predicts its offsets and a mask of its bins.

    The mask is the sigmoid of the output of two more layers, `mask_fc1` and `mask_fc2`, and starts
    as 1/2. The arguments are those of `DeformRoIPoolPack`.

    References:
        Zhu et al., Deformable ConvNets v2, 2018 (arXiv:1811.11168).
    """

    modulated = True
