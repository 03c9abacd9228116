"""effjax: train networks that do not fit in device memory, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import compat as compat
    from . import convert as convert
    from . import linen as linen
    from . import memory as memory
    from . import models as models
    from . import nnx as nnx
    from .ops.batch_norm import BatchStats as BatchStats
    from .ops.batch_norm import batch_norm_inference as batch_norm_inference
    from .ops.batch_norm import sync_batch_norm as sync_batch_norm
    from .ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .ops.deform_attention import dcn_aggregate as dcn_aggregate
    from .ops.deform_attention import ms_deform_attn as ms_deform_attn
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
    from .ops.roi import deform_psroi_pool as deform_psroi_pool
    from .ops.roi import deform_roi_pool as deform_roi_pool
    from .ops.roi import multiscale_roi_align as multiscale_roi_align
    from .ops.roi import roi_align as roi_align

__version__ = "0.1.0"

__all__ = [
    "BatchStats",
    "DenseLayerParams",
    "OffloadState",
    "batch_norm_inference",
    "bn_relu_conv",
    "dcn_aggregate",
    "deform_conv2d",
    "deform_psroi_pool",
    "deform_roi_pool",
    "dense_block",
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
]

_MODULES = "compat", "convert", "linen", "memory", "models", "nnx"
_MODULE_OF = {
    "BatchStats": "ops.batch_norm",
    "batch_norm_inference": "ops.batch_norm",
    "sync_batch_norm": "ops.batch_norm",
    "linear_cross_entropy": "ops.cross_entropy",
    "dcn_aggregate": "ops.deform_attention",
    "ms_deform_attn": "ops.deform_attention",
    "deform_conv2d": "ops.deform_conv",
    "DenseLayerParams": "ops.dense_block",
    "bn_relu_conv": "ops.dense_block",
    "dense_block": "ops.dense_block",
    "OffloadState": "ops.offload",
    "host_init": "ops.offload",
    "offload_jit": "ops.offload",
    "offload_scan": "ops.offload",
    "offload_sequential": "ops.offload",
    "offload_train_step": "ops.offload",
    "stream_update": "ops.offload",
    "to_device": "ops.offload",
    "to_host": "ops.offload",
    "deform_psroi_pool": "ops.roi",
    "deform_roi_pool": "ops.roi",
    "multiscale_roi_align": "ops.roi",
    "roi_align": "ops.roi",
}


# Names are imported when they are first used: `effjax --help` then does not wait for JAX, nor
# `import effjax` for Flax. Type checkers use the imports above, and report unknown names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULE_OF})
