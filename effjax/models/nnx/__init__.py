"""Whole networks for Flax NNX."""

from .densenet import DenseNet as DenseNet
from .resnet import DeformResNet as DeformResNet
from .transformer import TransformerBlock as TransformerBlock
from .transformer import TransformerLM as TransformerLM
from .transformer import scan_layers as scan_layers
