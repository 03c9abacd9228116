"""Code shared by the image networks: options, input checks, pooling."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike

from ..layers.images import ImageLayerConfig, compute_dtype
from ..ops._common.arguments import as_array, as_integer, as_real_array


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ImageNetworkConfig(ImageLayerConfig):
    """Options that DenseNet and ResNet have in common."""

    small_inputs: bool = False


class ImageNetwork(nnx.Module):
    """Base class of networks: options are compared by value, networks by identity."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def cast_batch(
    config: ImageNetworkConfig,
    x: ArrayLike,
    mask: ArrayLike | None,
    in_channels: int,
    smallest: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Check a batch of images and cast it to the dtype of the computation.

    Args:
        config: options of the network.
        x: [N, H, W, in_channels], H and W at least `smallest`.
        mask: [N] or [N, 1, 1, 1], or None.
        in_channels: the number of channels.
        smallest: the smallest height and width.

    Returns:
        x, and the mask as [N, 1, 1, 1].
    """
    x = as_real_array("x", x)
    if x.ndim != 4 or x.shape[-1] != in_channels or min(x.shape[1:3]) < smallest:
        raise ValueError(
            f"`x` of shape {x.shape} must be [N, H, W, {in_channels}], features last, with height "
            f"and width of at least {smallest}."
        )
    if mask is not None:
        mask = as_array("mask", mask, jnp.bool_).reshape(x.shape[0], 1, 1, 1)
    dtype = compute_dtype(x.dtype, config.dtype, config.param_dtype)
    return x.astype(dtype), mask


def as_sizes(name: str, values: Any) -> tuple[int, ...]:
    """Return positive integers as a tuple with at least one entry."""
    sizes = tuple(as_integer(name, value, 1) for value in values)
    if not sizes:
        raise ValueError(f"`{name}` (=()) must have at least one entry.")
    return sizes


def max_pool(x: jax.Array) -> jax.Array:
    """Return the 3x3 max pool with stride 2 and padding 1."""
    # As PyTorch pads: with "SAME" the windows of an even size would begin one pixel later.
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
    )


class Constructor(Protocol):
    """Constructor of a published network."""

    def __call__(self, module: Callable[..., Any] = ..., **options: Any) -> Any:
        """Return the network; see the docstring that `make_constructor` writes."""
        ...


def make_constructor(
    network: type,
    published: Mapping[str, Mapping[str, Any]],
    name: str,
    description: str,
    num_parameters: int,
) -> Constructor:
    """Return the constructor of a published network, with its options in `published`."""

    def constructor(module: Callable[..., Any] = network, **options: Any) -> Any:
        return module(**{**published[name], **options})

    num_classes = published[name].get("num_classes", 1000)
    # A public function: `help`, pickle and the reference find it by its module and name.
    constructor.__module__ = network.__module__
    constructor.__name__ = constructor.__qualname__ = name
    constructor.__doc__ = f"""Return a {description}.

    It has {num_parameters:,} parameters for {num_classes} classes.

    Args:
        module: `effjax.models.{network.__name__}` (requires `rngs`), or its counterpart in
            `effjax.models.linen`.
        **options: of the module; they override those of the published network.
    """
    return constructor
