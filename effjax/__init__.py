"""effjax: train networks that do not fit in device memory, in JAX."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from . import compat as compat
    from . import convert as convert
    from . import linen as linen
    from . import memory as memory
    from . import models as models
    from . import nnx as nnx

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

_FOLDERS = "compat", "convert", "linen", "memory", "models", "nnx"


if not TYPE_CHECKING:  # a type checker has them above, and shall know every other name as an error

    def __getattr__(name: str) -> ModuleType:
        """`effjax.nnx` is imported at its first use: Flax takes a while."""
        if name in _FOLDERS:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOLDERS})
