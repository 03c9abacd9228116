"""The ResNets of the paper, by name, in either flavor of Flax."""

from collections.abc import Callable
from typing import Any

from ..ops._common.arguments import as_callable
from .nnx.resnet import ResNet

RESNETS: dict[str, dict[str, Any]] = {
    "resnet18": dict(bottleneck=False, stage_sizes=(2, 2, 2, 2)),
    "resnet34": dict(bottleneck=False, stage_sizes=(3, 4, 6, 3)),
    "resnet50": dict(bottleneck=True, stage_sizes=(3, 4, 6, 3)),
    "resnet101": dict(bottleneck=True, stage_sizes=(3, 4, 23, 3)),
}


def resnet18(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """ResNet-18, of basic blocks: 11,689,512 parameters for 1000 classes.

    Args:
        module: `effjax.models.ResNet` (which needs `rngs`) or `effjax.models.linen.ResNet`.
        **options: any of its options, overriding those of the name.
    """
    return _make("resnet18", module, options)


def resnet34(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """ResNet-34, of basic blocks: 21,797,672 parameters for 1000 classes. Arguments as
    `resnet18`."""
    return _make("resnet34", module, options)


def resnet50(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """ResNet-50, of bottlenecks: 25,557,032 parameters for 1000 classes. Arguments as
    `resnet18`."""
    return _make("resnet50", module, options)


def resnet101(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """ResNet-101, of bottlenecks: 44,549,160 parameters for 1000 classes. Arguments as
    `resnet18`."""
    return _make("resnet101", module, options)


def _make(name: str, module: Callable[..., Any], options: dict[str, Any]) -> Any:
    return as_callable("module", module)(**RESNETS[name] | options)
