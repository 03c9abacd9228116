"""Deformable convolution: sampled by a custom call or by XLA, multiplied by XLA."""

from .api import deform_conv2d as deform_conv2d
