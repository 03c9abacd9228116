"""Networks for Flax linen."""

from .densenet import DenseNet as DenseNet
from .pyramid import FeaturePyramid as FeaturePyramid
from .resnet import ResNet as ResNet
