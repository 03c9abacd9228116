"""Feature pyramid for Flax linen."""

from collections.abc import Sequence

import jax
from flax import linen as nn
from flax.typing import Dtype

from ...layers.pyramid import FeaturePyramidConfig, apply_pyramid, prepare_features, pyramid_convs
from ...layers.resnet import ConvSpec

glorot_uniform = nn.initializers.glorot_uniform()


class FeaturePyramid(nn.Module, FeaturePyramidConfig):
    """Feature pyramid network: combines the levels of a backbone from coarse to fine.

    The options and the network are those of `effjax.models.FeaturePyramid`, except `in_channels`,
    which follows from the features. The variables have the same names (`laterals_0/kernel` is nnx's
    `laterals[0].kernel`).

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    def __post_init__(self):
        FeaturePyramidConfig.__post_init__(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, C_i]`, the finest first.

        Raises:
            TypeError, ValueError: if their shapes or dtypes are wrong.
        """
        levels = prepare_features(self, features)
        lateral_specs, output_specs = pyramid_convs(self, [x.shape[-1] for x in levels])
        laterals, outputs = (
            [Conv(spec, self.param_dtype, name=f"{name}_{i}")() for i, spec in enumerate(specs)]
            for name, specs in (("laterals", lateral_specs), ("outputs", output_specs))
        )
        return apply_pyramid(self, levels, laterals, outputs)


class Conv(nn.Module):
    """Kernel and bias of a convolution that `layers.pyramid` applies."""

    spec: ConvSpec
    param_dtype: Dtype

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        """Return kernel and bias."""
        size, channels, features = self.spec.size, self.spec.channels, self.spec.features
        kernel = self.param(
            "kernel", glorot_uniform, (size, size, channels, features), self.param_dtype
        )
        return kernel, self.param("bias", nn.initializers.zeros, (features,), self.param_dtype)
