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
    "resnet152": dict(bottleneck=True, stage_sizes=(3, 8, 36, 3)),
    "wide_resnet50_2": dict(stage_sizes=(3, 4, 6, 3), inner_width=128),
    "wide_resnet101_2": dict(stage_sizes=(3, 4, 23, 3), inner_width=128),
    "resnext50_32x4d": dict(stage_sizes=(3, 4, 6, 3), inner_width=128, feature_group_count=32),
    "resnext101_32x8d": dict(stage_sizes=(3, 4, 23, 3), inner_width=256, feature_group_count=32),
    "resnext101_64x4d": dict(stage_sizes=(3, 4, 23, 3), inner_width=256, feature_group_count=64),
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


def resnet152(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNet-152 of bottlenecks: 60,192,808 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnet152"] | options)


def wide_resnet50_2(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a Wide ResNet-50-2, with 3x3 convolutions of twice the width.

    It has 68,883,240 parameters for 1000 classes. The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["wide_resnet50_2"] | options)


def wide_resnet101_2(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a Wide ResNet-101-2, with 3x3 convolutions of twice the width.

    It has 126,886,696 parameters for 1000 classes. The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["wide_resnet101_2"] | options)


def resnext50_32x4d(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNeXt-50 of 32 groups of 4 channels: 25,028,904 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnext50_32x4d"] | options)


def resnext101_32x8d(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNeXt-101 of 32 groups of 8 channels: 88,791,336 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnext101_32x8d"] | options)


def resnext101_64x4d(module: Callable[..., Any] = ResNet, **options: Any) -> Any:
    """Return a ResNeXt-101 of 64 groups of 4 channels: 83,455,272 parameters for 1000 classes.

    The arguments are those of `resnet18`.
    """
    return module(**RESNET_OPTIONS["resnext101_64x4d"] | options)
