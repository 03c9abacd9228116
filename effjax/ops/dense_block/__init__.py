"""DenseNet layers with recomputation: one bottleneck, and a whole block."""

from .block import DenseLayerParams as DenseLayerParams
from .block import dense_block as dense_block
from .bn_relu_conv import bn_relu_conv as bn_relu_conv
