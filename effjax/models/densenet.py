"""The DenseNets of the papers, by name, in either flavour of Flax."""

from collections.abc import Callable
from typing import Any

from .nnx.densenet import DenseNet

DENSENETS: dict[str, dict[str, Any]] = {
    "densenet121": dict(growth_rate=32, block_config=(6, 12, 24, 16), num_init_features=64),
    "densenet161": dict(growth_rate=48, block_config=(6, 12, 36, 24), num_init_features=96),
    "densenet169": dict(growth_rate=32, block_config=(6, 12, 32, 32), num_init_features=64),
    "densenet201": dict(growth_rate=32, block_config=(6, 12, 48, 32), num_init_features=64),
}


def densenet121(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-121 (k = 32): 7,978,856 parameters for 1000 classes.

    Args:
        module: `effjax.models.DenseNet` (which needs `rngs`) or `effjax.models.linen.DenseNet`.
        **options: any of its options, overriding those of the name.
    """
    return module(**DENSENETS["densenet121"] | options)


def densenet161(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-161 (k = 48): 28,681,000 parameters for 1000 classes. Arguments as `densenet121`."""
    return module(**DENSENETS["densenet161"] | options)


def densenet169(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-169 (k = 32): 14,149,480 parameters for 1000 classes. Arguments as `densenet121`."""
    return module(**DENSENETS["densenet169"] | options)


def densenet201(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-201 (k = 32): 20,013,928 parameters for 1000 classes. Arguments as `densenet121`."""
    return module(**DENSENETS["densenet201"] | options)


def cifar_options(depth: int, growth_rate: int = 12) -> dict[str, Any]:
    """The options of DenseNet-BC with three equal blocks on small images.

    Args:
        depth: convolutions and the linear layer: 6n + 4 for n layers a block.
        growth_rate: k; the stem has 2k channels.

    Raises:
        ValueError: if `depth` is not 6n + 4 with n ≥ 1.
    """
    layers, rest = divmod(depth - 4, 6)
    if rest or layers < 1:
        raise ValueError(
            f"`depth` (={depth}) of a DenseNet-BC with three blocks must be 6n + 4: 22, 40, 100."
        )
    return dict(
        growth_rate=growth_rate, block_config=(layers,) * 3, num_init_features=2 * growth_rate,
        small_inputs=True, num_classes=10,
    )  # fmt: skip


def densenet_cifar(
    depth: int = 100,
    growth_rate: int = 12,
    module: Callable[..., Any] = DenseNet,
    **options: Any,
) -> Any:
    """DenseNet-BC for small images, 10 classes; `depth`, `growth_rate` as in `cifar_options`."""
    return module(**cifar_options(depth, growth_rate) | options)


def densenet40_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-BC-40 (k = 12): 176,122 parameters for 10 classes. Arguments as `densenet121`."""
    return module(**DENSENETS["densenet40_12"] | options)


def densenet100_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-BC-100 (k = 12): 769,162 parameters for 10 classes. Arguments as `densenet121`."""
    return module(**DENSENETS["densenet100_12"] | options)


DENSENETS["densenet40_12"] = cifar_options(40, 12)
DENSENETS["densenet100_12"] = cifar_options(100, 12)
