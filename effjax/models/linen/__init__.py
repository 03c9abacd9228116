"""Networks for Flax linen."""

from ..._names import list_public as _list_public
from .densenet import DenseNet as DenseNet
from .pyramid import FeaturePyramid as FeaturePyramid
from .resnet import ResNet as ResNet


def __dir__() -> list[str]:
    return _list_public(globals())
