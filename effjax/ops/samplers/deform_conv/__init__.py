"""Deformable convolution.

The samples are computed by a custom call or by XLA, the matrix products by XLA.
"""

from .api import deform_conv2d as deform_conv2d
