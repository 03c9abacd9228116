"""Flax linen modules over the operators of effjax."""

from .batch_norm import BatchNorm as BatchNorm
from .densenet import DenseNet as DenseNet
