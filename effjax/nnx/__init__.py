"""Flax NNX modules over the operators of effjax."""

from .batch_norm import BatchNorm as BatchNorm
from .convert import convert_batch_norm as convert_batch_norm
from .densenet import DenseNet as DenseNet
