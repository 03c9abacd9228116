"""Networks for Flax linen, which run those for nnx."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike

from ..linen.nnx_network import NnxNetwork
from ..ops._common.arguments import as_real_array, with_torch_hints
from . import densenet, pyramid, resnet

__all__ = ["DenseNet", "FeaturePyramid", "ResNet"]


def __dir__() -> list[str]:
    return __all__


def _count_channels(x: Any) -> int:
    """Return the size of the last axis of images; the network checks their rank."""
    return x.shape[-1] if x.ndim else 1


@with_torch_hints
class DenseNet(NnxNetwork, densenet.DenseNetConfig):
    """DenseNet-BC on images `[N, H, W, C]`: stem, dense blocks with transitions, linear head.

    The options, their defaults and the network are those of `effjax.models.DenseNet`, except
    `in_channels`, which follows from the images. The variables have the same names
    (`blocks_0/layers_1/norm1/scale` is nnx's `blocks[0].layers[1].norm1.scale`). Missing, unknown
    and wrongly shaped variables are errors. Reverse mode only.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Huang et al. 2017 (arXiv:1608.06993); Pleiss et al. 2017 (arXiv:1707.06990).
    """

    def __post_init__(self):
        densenet.DenseNetConfig.__post_init__(self)
        super().__post_init__()

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: use (and collect) batch statistics, and apply dropout. Requires
                `mutable=["batch_stats"]`, and `rngs={"dropout": key}` if `drop_rate` is positive.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, computed in `dtype` and returned as float32 (float64 if computed in
            float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x`, `mask` or a variable is wrong, or
                `axis_name` is not mapped in training.
        """
        return self._call("__call__", x, train, mask)

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """Return the outputs of all blocks: `model.apply(variables, x, method="features")`."""
        return self._call("features", x, train, mask)

    @nn.nowrap
    def _call(self, method: str, x: ArrayLike, train: bool, mask: ArrayLike | None) -> Any:
        x = as_real_array("x", x)
        key = self.make_rng("dropout") if train and self.drop_rate else None
        return self.call_network(
            densenet.DenseNet, _count_channels(x), train, method, x, mask=mask, rngs=key
        )


@with_torch_hints
class ResNet(NnxNetwork, resnet.ResNetConfig):
    """ResNet of torchvision's layout on images `[N, H, W, C]`: stem, stages, linear head.

    The options, their defaults and the network are those of `effjax.models.ResNet`, except
    `in_channels`, which follows from the images. The variables have the same names
    (`stages_0_1/norm1/scale` is nnx's `stages[0][1].norm1.scale`). Missing, unknown and wrongly
    shaped variables are errors. Reverse mode only.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        He et al. 2016 (arXiv:1512.03385); Zagoruyko & Komodakis 2016 (arXiv:1605.07146); Xie et al.
        2017 (arXiv:1611.05431); Dai et al. 2017 (arXiv:1703.06211); Zhu et al. 2018
        (arXiv:1811.11168).
    """

    def __post_init__(self):
        resnet.ResNetConfig.__post_init__(self)
        super().__post_init__()

    def __call__(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> jax.Array:
        """Return the logits of images.

        Args:
            x: `[N, H, W, C]`.
            train: use (and collect) batch statistics. Requires `mutable=["batch_stats"]`, unless
                all norms are frozen.
            mask: bool `[N]` or `[N, 1, 1, 1]`; False excludes an image from the batch statistics.

        Returns:
            `[N, num_classes]`, or with `num_classes=None` the mean over the image of the last
            stage, computed in `dtype` and returned as float32 (float64 if computed in float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `x`, `mask` or a variable is wrong, or
                `axis_name` is not mapped in training.
        """
        return self._call("__call__", x, train, mask)

    def features(
        self, x: ArrayLike, train: bool = False, mask: ArrayLike | None = None
    ) -> tuple[jax.Array, ...]:
        """Return the outputs of all stages: `model.apply(variables, x, method="features")`."""
        return self._call("features", x, train, mask)

    @nn.nowrap
    def _call(self, method: str, x: ArrayLike, train: bool, mask: ArrayLike | None) -> Any:
        x = as_real_array("x", x)
        return self.call_network(resnet.ResNet, _count_channels(x), train, method, x, mask=mask)


class FeaturePyramid(NnxNetwork, pyramid.FeaturePyramidConfig):
    """Feature pyramid network: combines the levels of a backbone from coarse to fine.

    The options and the network are those of `effjax.models.FeaturePyramid`, except `in_channels`,
    which follows from the features. The variables have the same names (`laterals_0/kernel` is nnx's
    `laterals[0].kernel`). Missing, unknown and wrongly shaped variables are errors.

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Lin et al. 2017 (arXiv:1612.03144; RetinaNet: arXiv:1708.02002).
    """

    def __post_init__(self):
        pyramid.FeaturePyramidConfig.__post_init__(self)
        super().__post_init__()

    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the levels of the pyramid, `[N, H, W, out_channels]` each.

        Args:
            features: `[N, H, W, C_i]`, the finest first.

        Raises:
            TypeError, ValueError: if their shapes or dtypes, or the shape of a variable, are wrong.
        """
        levels = [as_real_array(f"features[{i}]", level) for i, level in enumerate(features)]
        in_channels = tuple(map(_count_channels, levels))
        return self.call_network(pyramid.FeaturePyramid, in_channels, False, "__call__", levels)
