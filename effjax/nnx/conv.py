"""Convolution of the image blocks and networks."""

from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from ..layers.images import he_normal


def make_conv(
    in_features: int,
    out_features: int,
    size: int,
    strides: int = 1,
    *,
    feature_group_count: int = 1,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """Return a convolution without bias, padded by half of the kernel size on every side."""
    return nnx.Conv(
        in_features, out_features, (size, size), strides, padding=size // 2,
        feature_group_count=feature_group_count, use_bias=False, kernel_init=he_normal,
        param_dtype=param_dtype, promote_dtype=cast_parameters, rngs=rngs,
    )  # fmt: skip


def cast_parameters(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Cast features and parameters to the features' dtype: the `promote_dtype` of Flax's layers."""
    # Flax's own function would promote features in half precision to the parameters' float32.
    del dtype, inexact  # a network casts its images once
    return tuple(None if a is None else a.astype(arrays[0].dtype) for a in arrays)
