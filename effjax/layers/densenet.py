"""What the linen and the nnx DenseNet share: options, their validation, widths."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..ops._common.arguments import as_dtype, as_flag, as_integer, as_number, check_choice, describe
from ..ops.batch_norm.statistics import as_index_groups
from .batch_norm import check_momentum, hashable_axes
from .images import as_image_mask, as_images, compute_dtype

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
        _freeze(self, "axis_index_groups", as_index_groups(self.axis_index_groups))
        _freeze(self, "axis_name", hashable_axes(self.axis_name))
        if self.num_chunks is not None:
            as_integer("num_chunks", self.num_chunks, 1)
        wanted = "in (0, 1]; 1 keeps all channels"
        as_number("compression", self.compression, lambda c: 0 < c <= 1, wanted)
        as_number("drop_rate", self.drop_rate, lambda r: 0 <= r < 1, "in [0, 1); 0 is no dropout")
        check_momentum(self.momentum)
        as_number("epsilon", self.epsilon, lambda e: 0 <= e < math.inf, "at least 0")
        check_choice("save", self.save, "conv", "features")
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

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each block's output, before its transition."""
        return tuple(
            before + layers * self.growth_rate
            for layers, (before, _) in zip(self.block_config, self.widths(), strict=True)
        )

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
        x = as_images(x, in_channels)
        halvings = len(self.block_config) - 1
        smallest = 2**halvings if self.small_inputs else 2 ** (halvings + 2) - 3
        if min(x.shape[1:3]) < smallest:
            raise ValueError(
                f"`x` of shape {x.shape} is too small for {len(self.block_config)} blocks with "
                f"small_inputs={self.small_inputs}: height and width must be at least {smallest}. "
                "Use fewer blocks, small_inputs=True or larger images."
            )
        dtype = compute_dtype(x.dtype, self.dtype, self.param_dtype)
        return x.astype(dtype), as_image_mask(mask, x)


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
            f"{describe(block_config)}."
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
