"""What the linen and the nnx DenseNet share: options, their validation, widths, convolution."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ..ops._arguments import as_array, as_dtype, as_flag, as_integer, as_number, described, one_of
from ..ops.batch_norm.statistics import index_groups
from .arguments import as_real_input
from .batch_norm import check_momentum, hashable_axes

Save = Literal["conv", "features"]


@dataclasses.dataclass(frozen=True)
class DenseNetOptions:
    """The options of a DenseNet, checked; `effjax.models.DenseNet` documents them."""

    growth_rate: int = 32
    block_config: Sequence[int] = (6, 12, 24, 16)
    compression: float = 0.5
    num_init_features: int = 64
    bn_size: int = 4
    drop_rate: float = 0.0
    num_classes: int = 1000
    small_inputs: bool = False
    efficient: bool = True
    save: Save = "conv"
    num_chunks: int | None = None
    axis_name: Any = None
    axis_index_groups: int | Sequence[Sequence[int]] | None = None
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    unbiased_running_var: bool = False

    def __post_init__(self):
        for name in ("growth_rate", "num_init_features", "bn_size", "num_classes"):
            as_integer(name, getattr(self, name), 1)
        _freeze(self, "block_config", _layers(self.block_config))
        _freeze(self, "axis_index_groups", index_groups(self.axis_index_groups))
        _freeze(self, "axis_name", hashable_axes(self.axis_name))
        if self.num_chunks is not None:
            as_integer("num_chunks", self.num_chunks, 1)
        wanted = "in (0, 1]; 1 keeps all channels"
        as_number("compression", self.compression, lambda c: 0 < c <= 1, wanted)
        as_number("drop_rate", self.drop_rate, lambda r: 0 <= r < 1, "in [0, 1); 0 is no dropout")
        check_momentum(self.momentum)
        as_number("epsilon", self.epsilon, lambda e: 0 <= e < math.inf, "at least 0")
        one_of("save", self.save, "conv", "features")
        for name in ("small_inputs", "efficient", "unbiased_running_var"):
            as_flag(name, getattr(self, name))
        if self.dtype is not None:
            as_dtype("dtype", self.dtype)
        as_dtype("param_dtype", self.param_dtype)
        if min(after for _, after in self.widths()) < 1:
            raise ValueError(
                f"`compression` (={self.compression}) leaves no channels: the widths before and "
                f"after each transition would be {self.widths()}."
            )

    def widths(self) -> list[tuple[int, int]]:
        """For each block, its input channels, and those after the block and its transition."""
        widths, channels = [], self.num_init_features
        for i, layers in enumerate(self.block_config):
            before, channels = channels, channels + layers * self.growth_rate
            if i < len(self.block_config) - 1:
                channels = int(channels * self.compression)
            widths.append((before, channels))
        return widths

    def norm(self) -> dict[str, Any]:
        """The arguments of every BatchNorm."""
        return dict(
            momentum=self.momentum, epsilon=self.epsilon, dtype=self.dtype,
            param_dtype=self.param_dtype, axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups, activation="relu",
            unbiased_running_var=self.unbiased_running_var,
        )  # fmt: skip

    def prepare(
        self, x: ArrayLike, in_channels: int | None, mask: ArrayLike | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Checks a batch; returns it in the computation's dtype, and the mask as [N, 1, 1, 1]."""
        x = as_real_input("x", x)
        if x.ndim != 4:
            raise ValueError(
                f"`x` must be of shape [batch, height, width, channels], not {x.shape}."
            )
        if in_channels is not None and x.shape[-1] != in_channels:
            raise ValueError(
                f"`x` of shape {x.shape} has {x.shape[-1]} channels in its last axis, but the "
                f"model was made with in_channels={in_channels}; channels come last (NHWC)."
            )
        halvings = len(self.block_config) - 1
        smallest = 2**halvings if self.small_inputs else 2 ** (halvings + 2) - 3
        if min(x.shape[1:3]) < smallest:
            raise ValueError(
                f"`x` of shape {x.shape} is too small for {len(self.block_config)} blocks with "
                f"small_inputs={self.small_inputs}: height and width must be at least {smallest}. "
                "Use fewer blocks, small_inputs=True or larger images."
            )
        if mask is not None:
            mask = as_array("mask", mask, jnp.bool_)
            if mask.shape not in ((x.shape[0],), (x.shape[0], 1, 1, 1)):
                raise ValueError(
                    f"`mask` of shape {mask.shape} must say which images count: of shape "
                    f"({x.shape[0]},) or ({x.shape[0]}, 1, 1, 1)."
                )
            mask = mask.reshape(-1, 1, 1, 1)
        return x.astype(self.compute_dtype(x.dtype)), mask

    def compute_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
            return jnp.dtype(dtype)
        return jnp.promote_types(dtype, self.param_dtype)


def he_normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """A kernel HWIO from N(0, 2/(kh·kw·out)): He et al. 2015, as in the DenseNet paper's code."""
    return _drawn(key, shape, dtype, 2 / (shape[0] * shape[1] * shape[3]))


def lecun_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """A matrix [in, out] from N(0, 1/in)."""
    return _drawn(key, shape, dtype, 1 / shape[0])


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, variance: float) -> jax.Array:
    # Drawn in lengths that are powers of two: every layer of a DenseNet has a shape of its own, and
    # compiling a generator for each of them would take longer than a first epoch.
    size = math.prod(shape)
    values = _normal(key, 1 << (size - 1).bit_length(), jnp.dtype(dtype), math.sqrt(variance))
    if isinstance(values, Tracer):
        return values[:size].reshape(shape)
    return jnp.asarray(np.asarray(values)[:size].reshape(shape))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype: jnp.dtype, std: float) -> jax.Array:
    return std * jax.random.normal(key, (size,), dtype)


def conv(x: jax.Array, kernel: jax.Array, strides: int = 1, padding: int = 0) -> jax.Array:
    """Convolution of NHWC with HWIO in x's dtype."""
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (strides, strides), [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def max_pool(x: jax.Array) -> jax.Array:
    """3x3 with stride 2 and a border of 1."""
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
    )


def block_key(key: jax.Array | None, block: int) -> jax.Array | None:
    """The dropout key of a block."""
    return None if key is None else jax.random.fold_in(key, block)


def common(values: Sequence[Any]) -> Any:
    """The value that all have, or None if they differ."""
    return values[0] if all(v == values[0] for v in values) else None


def _layers(block_config: Any) -> tuple[int, ...]:
    """The number of layers of each block."""
    try:
        layers = tuple(map(operator.index, block_config))
    except TypeError:
        raise TypeError(
            "`block_config` must be the number of layers of each block, like (6, 12), not "
            f"{described(block_config)}."
        ) from None
    if not layers:
        raise ValueError(
            "`block_config` is empty: give the number of layers of each block, like (6, 12)."
        )
    if min(layers) < 1:
        raise ValueError(f"`block_config` (={layers}) must be at least 1 in every block.")
    return layers


def _freeze(options: DenseNetOptions, name: str, value: Any) -> None:
    object.__setattr__(options, name, value)
