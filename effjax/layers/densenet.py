"""Options of a DenseNet and the code shared by the linen and nnx modules."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from ..ops._common.arguments import as_integer, as_number
from .dense_block import DenseLayerConfig
from .images import ImageNetworkConfig, as_sizes, cast_batch


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class DenseNetConfig(ImageNetworkConfig, DenseLayerConfig):
    """Options of a DenseNet; `effjax.models.DenseNet` documents them."""

    block_config: Sequence[int] = (6, 12, 24, 16)
    compression: float = 0.5
    num_init_features: int = 64
    num_classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_init_features", "num_classes"):
            setattr(self, name, as_integer(name, getattr(self, name), 1))
        self.block_config = as_sizes("block_config", self.block_config)
        self.compression = as_number(
            "compression", self.compression, lambda c: 0 < c <= 1, "in (0, 1]"
        )
        widths = block_widths(self)
        if min(after for _, after in widths) < 1:
            raise ValueError(
                f"`compression` (={self.compression}) must leave at least one channel after each "
                f"transition; the channels before and after each block would be {widths}."
            )

    @property
    def feature_channels(self) -> tuple[int, ...]:
        """Channels of each of the `features`."""
        return tuple(
            before + num_layers * self.growth_rate
            for num_layers, (before, _) in zip(self.block_config, block_widths(self), strict=True)
        )


def block_widths(config: DenseNetConfig) -> list[tuple[int, int]]:
    """Return each block's input channels, and the channels after the block and its transition."""
    widths, channels = [], config.num_init_features
    for i, num_layers in enumerate(config.block_config):
        before, channels = channels, channels + num_layers * config.growth_rate
        if i < len(config.block_config) - 1:
            channels = int(channels * config.compression)
        widths.append((before, channels))
    return widths


def block_options(config: DenseNetConfig) -> dict[str, Any]:
    """Return the options of a network's dense blocks."""
    fields = dataclasses.fields(DenseLayerConfig)
    return {field.name: getattr(config, field.name) for field in fields}


def prepare_batch(
    config: DenseNetConfig, x: ArrayLike, in_channels: int | None, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Check a batch of images; return it in the dtype of the computation, and its mask."""
    # Each transition halves the image; the stem of large images does so twice, with padding.
    num_blocks = len(config.block_config)
    smallest = 2 ** (num_blocks - 1) if config.small_inputs else 2 ** (num_blocks + 1) - 3
    return cast_batch(config, x, mask, in_channels, smallest)


def block_key(key: jax.Array | None, block: int) -> jax.Array | None:
    """Return the dropout key of a block."""
    return None if key is None else jax.random.fold_in(key, block)
