"""Code shared by image blocks and networks: options, dtypes, initializers, convolution."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from ..ops._common.arguments import (
    as_dtype,
    as_number,
    check_choice,
)
from ..ops.batch_norm.statistics import as_index_groups
from .batch_norm import check_momentum, hashable_axes

Save = Literal["conv", "features"]
Config = TypeVar("Config")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ImageLayerConfig:
    """Options of blocks and networks of images with batch norms and recomputation.

    The nnx and the linen modules inherit from their configuration, so each option is defined once.
    """

    efficient: bool = True
    save: Save = "conv"
    axis_name: Any = None
    axis_index_groups: int | Sequence[Sequence[int]] | None = None
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    unbiased_running_var: bool = False

    def __post_init__(self) -> None:
        self.axis_index_groups = as_index_groups(self.axis_index_groups)
        self.axis_name = hashable_axes(self.axis_name)
        check_momentum(self.momentum)
        self.epsilon = as_number("epsilon", self.epsilon, lambda e: 0 <= e < math.inf, "at least 0")
        check_choice("save", self.save, "conv", "features")
        check_dtypes(self.dtype, self.param_dtype)


def copy_config(network: Any, config_type: type[Config]) -> Config:
    """Return the options of a network without the network."""
    fields: Any = dataclasses.fields(config_type)  # pyright: ignore[reportArgumentType]
    return config_type(**{field.name: getattr(network, field.name) for field in fields})


def norm_options(config: ImageLayerConfig, activation: str | None = "relu") -> dict[str, Any]:
    """Return the arguments of a BatchNorm."""
    return dict(
        momentum=config.momentum,
        epsilon=config.epsilon,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        axis_name=config.axis_name,
        axis_index_groups=config.axis_index_groups,
        activation=activation,
        unbiased_running_var=config.unbiased_running_var,
    )


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    """Raise an error unless both are floating-point dtypes; `dtype` may be None."""
    as_dtype("param_dtype", param_dtype)
    if dtype is not None:
        as_dtype("dtype", dtype)


def compute_dtype(x: DTypeLike, dtype: DTypeLike | None, param_dtype: DTypeLike) -> jnp.dtype:
    """Return `dtype`; if None, x's half precision, or the promoted dtype of x and parameters."""
    if dtype is not None:
        return jnp.dtype(dtype)
    if jnp.issubdtype(x, jnp.floating) and jnp.dtype(x).itemsize < 4:
        return jnp.dtype(x)
    return promote_dtypes(x, param_dtype)


def promote_dtypes(*dtypes: DTypeLike) -> jnp.dtype:
    """Return the promoted dtype, independently of JAX's `jax_numpy_dtype_promotion`."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(jnp.result_type(*dtypes))


def he_normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Draw a kernel HWIO from N(0, 2/(kh·kw·out)) (He et al. 2015), as the original DenseNet."""
    return _draw_normal(key, shape, dtype, 2 / (shape[0] * shape[1] * shape[3]))


def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Draw a matrix [in, out] from N(0, 1/in)."""
    return _draw_normal(key, shape, dtype, 1 / shape[0])


def _draw_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, variance: float
) -> jax.Array:
    # Draw in lengths that are powers of two. Every layer of a DenseNet has another shape, and
    # compiling a generator for each of them would take longer than a first epoch.
    size = math.prod(shape)
    values = _normal(key, 1 << (size - 1).bit_length(), jnp.dtype(dtype), math.sqrt(variance))
    if isinstance(values, Tracer):
        return values[:size].reshape(shape)
    return jnp.asarray(np.asarray(values)[:size].reshape(shape))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype: jnp.dtype, std: float) -> jax.Array:
    return std * jax.random.normal(key, (size,), dtype)


def conv(
    x: jax.Array, kernel: jax.Array, strides: int = 1, padding: int = 0, groups: int = 1
) -> jax.Array:
    """Convolve x (NHWC) with a kernel (HWIO) in x's dtype."""
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (strides, strides), [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip
