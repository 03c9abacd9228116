"""Networks for Flax NNX."""

from .decoder import Decoder as Decoder
from .densenet import DenseNet as DenseNet
from .pyramid import FeaturePyramid as FeaturePyramid
from .resnet import ResNet as ResNet
