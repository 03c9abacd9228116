"""The DenseNets of the papers, by name, in either flavor of Flax."""

from collections.abc import Callable
from typing import Any

from ..ops._common.arguments import as_callable, as_integer
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
    return _make("densenet121", module, options)


def densenet161(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-161 (k = 48): 28,681,000 parameters for 1000 classes. Arguments as `densenet121`."""
    return _make("densenet161", module, options)


def densenet169(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-169 (k = 32): 14,149,480 parameters for 1000 classes. Arguments as `densenet121`."""
    return _make("densenet169", module, options)


def densenet201(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-201 (k = 32): 20,013,928 parameters for 1000 classes. Arguments as `densenet121`."""
    return _make("densenet201", module, options)


def cifar_options(depth: int, growth_rate: int = 12) -> dict[str, Any]:
    """The options of DenseNet-BC with three equal blocks on small images.

    Args:
        depth: convolutions and the linear layer: 6n + 4 for n layers a block.
        growth_rate: k; the stem has 2k channels.

    Raises:
        TypeError, ValueError: if `depth` is not 6n + 4 with n ≥ 1, or `growth_rate` not positive.
    """
    layers, rest = divmod(as_integer("depth", depth, 1) - 4, 6)
    growth_rate = as_integer("growth_rate", growth_rate, 1)
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
    return as_callable("module", module)(**cifar_options(depth, growth_rate) | options)


def densenet40_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-BC-40 (k = 12): 176,122 parameters for 10 classes. Arguments as `densenet121`."""
    return _make("densenet40_12", module, options)


def densenet100_12(module: Callable[..., Any] = DenseNet, **options: Any) -> Any:
    """DenseNet-BC-100 (k = 12): 769,162 parameters for 10 classes. Arguments as `densenet121`."""
    return _make("densenet100_12", module, options)


def _make(name: str, module: Callable[..., Any], options: dict[str, Any]) -> Any:
    return as_callable("module", module)(**DENSENETS[name] | options)


DENSENETS["densenet40_12"] = cifar_options(40, 12)
DENSENETS["densenet100_12"] = cifar_options(100, 12)
