"""A feature pyramid for Flax linen."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype

from ...layers.pyramid import Extra, PyramidOptions, Source, pyramid
from ...layers.resnet import ConvPlan

glorot_uniform = nn.initializers.glorot_uniform()


class FeaturePyramid(nn.Module):
    """Features of all levels, each with what the coarser ones have seen.

    The options and the network are those of `effjax.models.FeaturePyramid`, whose documentation
    holds here too, but for `in_channels`, which the features say; the variables have the same
    names (`laterals_0/kernel` is nnx's `laterals[0].kernel`).

    Raises:
        TypeError, ValueError: for an option that is not what it must be, or outside its range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    out_channels: int = 256
    extra_levels: int = 0
    extra: Extra = "pool"
    extra_from: Source = "input"
    extra_relu: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    def __post_init__(self):
        self._options()  # checks them
        super().__post_init__()

    @nn.compact
    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, C_i]`, the finest first.

        Raises:
            TypeError, ValueError: if they do not fit each other.
        """
        options = self._options()
        levels = options.prepare(features)
        named = zip(
            ("laterals", "outputs"), options.convs([x.shape[-1] for x in levels]), strict=True
        )
        laterals, outputs = (
            [Conv(plan, self.param_dtype, name=f"{name}_{i}")() for i, plan in enumerate(plans)]
            for name, plans in named
        )
        return pyramid(options, levels, laterals, outputs)

    @nn.nowrap
    def _options(self) -> PyramidOptions:
        return PyramidOptions(
            self.out_channels, self.extra_levels, self.extra, self.extra_from, self.extra_relu,
            self.dtype, self.param_dtype,
        )  # fmt: skip


class Conv(nn.Module):
    """Holds kernel and bias; the convolution is that of `layers.pyramid`."""

    plan: ConvPlan
    param_dtype: Dtype

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        size, channels, features = self.plan.size, self.plan.channels, self.plan.features
        kernel = self.param(
            "kernel", glorot_uniform, (size, size, channels, features), self.param_dtype
        )
        return kernel, self.param("bias", nn.initializers.zeros, (features,), self.param_dtype)
