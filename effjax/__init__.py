"""effjax: train networks that do not fit in device memory, in JAX."""

from .ops.batch_norm import BatchStats as BatchStats
from .ops.batch_norm import batch_norm_inference as batch_norm_inference
from .ops.batch_norm import sync_batch_norm as sync_batch_norm
from .ops.deform_conv import deform_conv2d as deform_conv2d
from .ops.dense_block import DenseLayerParams as DenseLayerParams
from .ops.dense_block import bn_relu_conv as bn_relu_conv
from .ops.dense_block import dense_block as dense_block
from .ops.offload import OffloadState as OffloadState
from .ops.offload import host_init as host_init
from .ops.offload import offload_jit as offload_jit
from .ops.offload import offload_scan as offload_scan
from .ops.offload import offload_sequential as offload_sequential
from .ops.offload import offload_train_step as offload_train_step
from .ops.offload import stream_update as stream_update
from .ops.offload import to_device as to_device
from .ops.offload import to_host as to_host

__version__ = "0.1.0"
