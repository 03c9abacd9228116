"""Published ResNets, in either flavor of Flax."""

from collections.abc import Callable
from typing import Any

from .nnx.resnet import ResNet

# Options of the published networks by name; not part of the public interface.
RESNET_OPTIONS: dict[str, dict[str, Any]] = {
    "resnet18": dict(bottleneck=False, stage_sizes=(2, 2, 2, 2)),
    "resnet34": dict(bottleneck=False, stage_sizes=(3, 4, 6, 3)),
    "resnet50": dict(bottleneck=True, stage_sizes=(3, 4, 6, 3)),
    "resnet101": dict(bottleneck=True, stage_sizes=(3, 4, 23, 3)),
}


def resnet18(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNet-18 of basic blocks: 11,689,512 parameters for 1000 classes.

    Args:
        module: `effjax.models.ResNet` (requires `rngs`) or `effjax.models.linen.ResNet`.
        **options: of the module; they override those of the published network.
    """
    return module(**RESNET_OPTIONS["resnet18"] | options)


def resnet34(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNet-34 of basic blocks: 21,797,672 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnet34"] | options)


def resnet50(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNet-50 of bottlenecks: 25,557,032 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnet50"] | options)


def resnet101(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNet-101 of bottlenecks: 44,549,160 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnet101"] | options)
