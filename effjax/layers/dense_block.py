"""Options of a dense block and the code shared by the linen and nnx modules."""

import dataclasses

import jax
from jax.typing import ArrayLike

from ..ops._common.arguments import as_integer, as_number, as_real_array
from ..ops.dense_block.bn_relu_conv import check_pixel_mask
from .images import ImageLayerConfig, compute_dtype


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class DenseLayerConfig(ImageLayerConfig):
    """Options that a dense block and a DenseNet have in common."""

    growth_rate: int = 32
    bn_size: int = 4
    drop_rate: float = 0.0
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("growth_rate", "bn_size"):
            setattr(self, name, as_integer(name, getattr(self, name), 1))
        if self.chunk_size is not None:
            self.chunk_size = as_integer("chunk_size", self.chunk_size, 1)
        self.drop_rate = as_number("drop_rate", self.drop_rate, lambda r: 0 <= r < 1, "in [0, 1)")


@dataclasses.dataclass(unsafe_hash=True)
class DenseBlockConfig(DenseLayerConfig):
    """Options of a dense block; `effjax.nnx.DenseBlock` documents them."""

    num_layers: int
    _: dataclasses.KW_ONLY
    momentum: float | None = 0.99  # as in Flax; a DenseNet has that of PyTorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_layers = as_integer("num_layers", self.num_layers, 1)


def prepare_features(
    config: DenseBlockConfig, x: ArrayLike, in_features: int | None, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Check the input of a block; return it in the dtype of the computation, and its mask."""
    x = as_real_array("x", x)
    if x.ndim != 4 or in_features not in (None, x.shape[-1]):
        raise ValueError(
            f"`x` of shape {x.shape} must be [N, H, W, {in_features or 'C'}], features last."
        )
    x = x.astype(compute_dtype(x.dtype, config.dtype, config.param_dtype))
    return x, None if mask is None else check_pixel_mask(mask, x)
