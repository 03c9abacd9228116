"""A feature pyramid for Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ...layers.pyramid import Extra, PyramidOptions, Source, as_channels, pyramid
from ...layers.resnet import ConvPlan

glorot_uniform = nnx.initializers.glorot_uniform()


class FeaturePyramid(nnx.Module):
    """Features of all levels, each with what the coarser ones have seen.

    `M_i = lateral_i(C_i) + up(M_{i+1})`, `P_i = output_i(M_i)`: 1x1 convolutions, nearest neighbors
    from level to level, 3x3 convolutions with padding 1, all with a bias. A level has half the
    height and width of the one before, rounded up.

    Args:
        in_channels: of each level, the finest first: a backbone's `feature_channels`.
        out_channels: of all levels that come out.
        extra_levels: further ones, each of half the size of the one before.
        extra: "pool" takes every second pixel of the level before (P6 of Faster R-CNN); "conv"
            convolves with stride 2, 3x3 and padding 1, with entries of `outputs` of their own (P6
            and P7 of RetinaNet).
        extra_from: what the first of these convolutions reads: the last level that came in, or the
            last that comes out. Further ones read the one before.
        extra_relu: further ones read it rectified, as maskrcnn-benchmark's and torchvision's do.
        dtype: of the computation. None: that of the features, promoted with `param_dtype` unless
            they are half precision.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`).

    Parameters: `laterals` and `outputs`, a list of convolutions each. Kernels are initialized by
    Glorot's uniform rule, biases with 0.

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        out_channels: int = 256,
        *,
        extra_levels: int = 0,
        extra: Extra = "pool",
        extra_from: Source = "input",
        extra_relu: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.options = options = PyramidOptions(
            out_channels, extra_levels, extra, extra_from, extra_relu, dtype, param_dtype
        )
        self.in_channels = as_channels(in_channels)

        def conv(plan: ConvPlan) -> Any:
            return nnx.Conv(
                plan.channels, plan.features, (plan.size,) * 2, kernel_init=glorot_uniform,
                param_dtype=param_dtype, rngs=rngs,
            )  # fmt: skip

        laterals, outputs = options.convs(self.in_channels)
        self.laterals = nnx.List(map(conv, laterals))
        self.outputs = nnx.List(map(conv, outputs))

    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, in_channels[i]]`, the finest first.

        Raises:
            TypeError, ValueError: if they do not fit, or each other.
        """
        levels = self.options.prepare(features, self.in_channels)
        laterals, outputs = (
            [(conv.kernel[...], conv.bias[...]) for conv in convs]
            for convs in (self.laterals, self.outputs)
        )
        return pyramid(self.options, levels, laterals, outputs)
