"""Published DenseNets, in either flavor of Flax."""

from collections.abc import Callable
from typing import Any

from ..ops._common.arguments import as_integer
from .nnx.densenet import DenseNet


def densenet121(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-121 (k = 32): 7,978,856 parameters for 1000 classes.

    Args:
        module: `effjax.models.DenseNet` (requires `rngs`) or `effjax.models.linen.DenseNet`.
        **options: of the module; they override those of the published network.
    """
    return module(**DENSENET_OPTIONS["densenet121"] | options)


def densenet161(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-161 (k = 48): 28,681,000 parameters for 1000 classes.

    The arguments are those of `densenet121`.
    """
    return module(**DENSENET_OPTIONS["densenet161"] | options)


def densenet169(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-169 (k = 32): 14,149,480 parameters for 1000 classes.

    The arguments are those of `densenet121`.
    """
    return module(**DENSENET_OPTIONS["densenet169"] | options)


def densenet201(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-201 (k = 32): 20,013,928 parameters for 1000 classes.

    The arguments are those of `densenet121`.
    """
    return module(**DENSENET_OPTIONS["densenet201"] | options)


def densenet40_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-BC-40 (k = 12): 176,122 parameters for 10 classes.

    The arguments are those of `densenet121`.
    """
    return densenet_cifar(40, 12, module, **options)


def densenet100_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """Return a DenseNet-BC-100 (k = 12): 769,162 parameters for 10 classes.

    The arguments are those of `densenet121`.
    """
    return densenet_cifar(100, 12, module, **options)


def densenet_cifar(
    depth: int = 100,
    growth_rate: int = 12,
    module: Callable[..., Any] = DenseNet,
    **options: Any,
) -> Any:
    """Return a DenseNet-BC with three equal blocks for small images, by default of 10 classes.

    Args:
        depth: the number of convolutions and linear layers: 6n + 4 for n layers per block.
        growth_rate: k; the stem has 2k channels.
        module: `effjax.models.DenseNet` (requires `rngs`) or `effjax.models.linen.DenseNet`.
        **options: of the module; they override those of the published network.

    Raises:
        TypeError, ValueError: if `depth` is not 6n + 4 with n ≥ 1, or an option is out of range.
    """
    return module(**_cifar_options(depth, growth_rate) | options)


def _cifar_options(depth: int, growth_rate: int = 12) -> dict[str, Any]:
    num_layers, rest = divmod(as_integer("depth", depth, 1) - 4, 6)
    if rest or num_layers < 1:
        raise ValueError(
            f"`depth` (={depth}) of a DenseNet-BC with three blocks must be 6n + 4: 22, 40, 100."
        )
    return dict(
        growth_rate=growth_rate, block_config=(num_layers,) * 3, num_init_features=2 * growth_rate,
        small_inputs=True, num_classes=10,
    )  # fmt: skip


# Options of the published networks by name; not part of the public interface.
DENSENET_OPTIONS: dict[str, dict[str, Any]] = {
    "densenet121": dict(growth_rate=32, block_config=(6, 12, 24, 16), num_init_features=64),
    "densenet161": dict(growth_rate=48, block_config=(6, 12, 36, 24), num_init_features=96),
    "densenet169": dict(growth_rate=32, block_config=(6, 12, 32, 32), num_init_features=64),
    "densenet201": dict(growth_rate=32, block_config=(6, 12, 48, 32), num_init_features=64),
    "densenet40_12": _cifar_options(40, 12),
    "densenet100_12": _cifar_options(100, 12),
}
