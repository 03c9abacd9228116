"""Whole networks for Flax linen."""

from .densenet import DenseNet as DenseNet
