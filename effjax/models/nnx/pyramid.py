"""Feature pyramid for Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ...layers.images import as_sizes
from ...layers.pyramid import (
    Extra,
    FeaturePyramidConfig,
    Source,
    apply_pyramid,
    prepare_features,
    pyramid_convs,
)
from ...layers.resnet import ConvSpec

glorot_uniform = nnx.initializers.glorot_uniform()


class FeaturePyramid(nnx.Module):
    """Feature pyramid network: combines the levels of a backbone from coarse to fine.

    `M_i = lateral_i(C_i) + upsample(M_{i+1})`, `P_i = output_i(M_i)`. The lateral convolutions are
    1x1, the output convolutions 3x3 with padding 1, all with a bias; upsampling takes the nearest
    neighbor. Each level has half the height and width of the one before, rounded up.

    Args:
        in_channels: of each level, the finest first: a backbone's `feature_channels`.
        out_channels: of all levels of the pyramid.
        extra_levels: the number of additional levels, each half the size of the one before. If
            None, 1 for "pool", 2 for "conv", and 0 without `extra`.
        extra: "pool" takes every second pixel of the level before (P6 of Faster R-CNN). "conv" is a
            3x3 convolution with stride 2 and padding 1, with its own entry in `outputs` (P6 and P7
            of RetinaNet). If None, "pool" if `extra_levels` is positive.
        extra_from: input of the first of these convolutions: the last input level ("input") or the
            last output level ("output"). Each further one reads the level before.
        extra_relu: apply ReLU before each further convolution, as maskrcnn-benchmark and
            torchvision do.
        dtype: of the computation. If None, that of the features, promoted with `param_dtype` unless
            they are half precision.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`).

    Parameters: `laterals` and `outputs`, each a list of convolutions. Kernels are initialized with
    Glorot's uniform rule, biases with 0.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        out_channels: int = 256,
        *,
        extra_levels: int | None = None,
        extra: Extra | None = None,
        extra_from: Source = "input",
        extra_relu: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config = FeaturePyramidConfig(
            out_channels, extra_levels, extra, extra_from, extra_relu, dtype, param_dtype
        )
        self.in_channels = as_sizes("in_channels", in_channels)

        def conv(spec: ConvSpec) -> Any:
            return nnx.Conv(
                spec.channels, spec.features, (spec.size,) * 2, kernel_init=glorot_uniform,
                param_dtype=param_dtype, rngs=rngs,
            )  # fmt: skip

        laterals, outputs = pyramid_convs(config, self.in_channels)
        self.laterals = nnx.List(map(conv, laterals))
        self.outputs = nnx.List(map(conv, outputs))

    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, in_channels[i]]`, the finest first.

        Raises:
            TypeError, ValueError: if their number, shapes or dtypes are wrong.
        """
        levels = prepare_features(self.config, features, self.in_channels)
        laterals, outputs = (
            [(conv.kernel[...], conv.bias[...]) for conv in convs]
            for convs in (self.laterals, self.outputs)
        )
        return apply_pyramid(self.config, levels, laterals, outputs)
