"""Weights of PyTorch projects, as parameters of effjax's modules."""

from .deform_conv import convert_deform_conv as convert_deform_conv
