"""effjax: train networks that do not fit in device memory, in JAX."""

from .ops.batch_norm import BatchStats as BatchStats
from .ops.batch_norm import batch_norm_inference as batch_norm_inference
from .ops.batch_norm import sync_batch_norm as sync_batch_norm
from .ops.bn_relu_conv import bn_relu_conv as bn_relu_conv
from .ops.deform_conv import deform_conv2d as deform_conv2d
from .ops.dense_block import DenseLayerParams as DenseLayerParams
from .ops.dense_block import dense_block as dense_block

__version__ = "0.1.0"
