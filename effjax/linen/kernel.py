"""Kernel of a convolution for Flax linen."""

import jax
from flax import linen as nn
from flax.typing import Dtype

from ..layers.images import he_normal


class KernelParam(nn.Module):
    """The kernel that a function of `effjax.layers` or a fused operator applies."""

    features: int
    size: int
    param_dtype: Dtype

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        """Return the kernel HWIO for `channels` input channels."""
        shape = (self.size, self.size, channels, self.features)
        return self.param("kernel", he_normal, shape, self.param_dtype)
