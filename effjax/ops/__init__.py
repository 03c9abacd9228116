"""Operators: pure functions of arrays with hand-written backward passes."""

from ._common.platform import trace_for_platform
from .attention import dot_product_attention
from .batch_norm import BatchStats, batch_norm_inference, sync_batch_norm
from .cross_entropy import linear_cross_entropy
from .dense_block import DenseLayerParams, bn_relu_conv, dense_block
from .expert_mlp import expert_mlp
from .fp8 import fp8_linear
from .offload import (
    OffloadParams,
    OffloadState,
    host_init,
    offload_jit,
    offload_scan,
    offload_sequential,
    offload_train_step,
    stream_update,
    to_device,
    to_host,
)
from .samplers import (
    dcn_aggregate,
    deform_conv2d,
    deform_psroi_pool,
    deform_roi_pool,
    ms_deform_attn,
    multiscale_roi_align,
    roi_align,
)

__all__ = [
    "BatchStats",
    "DenseLayerParams",
    "OffloadParams",
    "OffloadState",
    "batch_norm_inference",
    "bn_relu_conv",
    "dcn_aggregate",
    "deform_conv2d",
    "deform_psroi_pool",
    "deform_roi_pool",
    "dense_block",
    "dot_product_attention",
    "expert_mlp",
    "fp8_linear",
    "host_init",
    "linear_cross_entropy",
    "ms_deform_attn",
    "multiscale_roi_align",
    "offload_jit",
    "offload_scan",
    "offload_sequential",
    "offload_train_step",
    "roi_align",
    "stream_update",
    "sync_batch_norm",
    "to_device",
    "to_host",
    "trace_for_platform",
]
