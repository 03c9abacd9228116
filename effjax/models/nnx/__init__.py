"""Networks for Flax NNX."""

from .decoder import Decoder as Decoder
from .densenet import DenseNet as DenseNet
from .pyramid import FeaturePyramid as FeaturePyramid
from .resnet import ResNet as ResNet
from .transformer import TransformerBlock as TransformerBlock
from .transformer import TransformerLM as TransformerLM
from .transformer import scan_layers as scan_layers
