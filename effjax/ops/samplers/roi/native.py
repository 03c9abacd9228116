"""Averages over bins by custom calls: the functions of `reference.py`."""

from typing import Any

import jax
import numpy as np

from ..._common.sharding import match_varying
from ..kernels import result_type
from .reference import Pooling


def pool(*args, pooling: Pooling) -> jax.Array:
    """Implement `reference.pool`."""
    x, first, *_, initial = args = match_varying(args)
    shape = (*first.shape[:3], x.shape[-1] // pooling.parts**2)
    aliases = {4: 0} if initial.shape == shape else {}  # added to in place
    call = jax.ffi.ffi_call("effjax_roi_pool", result_type(x, shape), input_output_aliases=aliases)
    return call(*args, pooling=_as_attribute(pooling))


def pool_backward(
    *args, pooling: Pooling, target: str = "effjax_roi_pool_backward"
) -> tuple[jax.Array, jax.Array]:
    """Implement `reference.pool_backward`."""
    x, first, *_ = args = match_varying(args)
    shape = (*first.shape[:4], 2 if pooling.has_position_gradients else 0)
    results = result_type(x, dtype=first.dtype), result_type(first, shape)
    call = jax.ffi.ffi_call(target, results)
    dx, dfirst = call(*args, pooling=_as_attribute(pooling))
    return dx, dfirst


def deterministic_pool_backward(*args, pooling: Pooling) -> tuple[jax.Array, jax.Array]:
    """Compute dx without atomic additions, whose order varies on a GPU.

    Each pixel adds up the bins that read it, in their order.
    """
    target = "effjax_roi_pool_backward_deterministic"
    return pool_backward(*args, pooling=pooling, target=target)


def _as_attribute(pooling: Pooling) -> dict[str, Any]:
    """Return the struct `Attributes` of native/roi_ffi.h."""
    rows, columns = pooling.output_size
    sizes = dict(rows=rows, columns=columns, parts=pooling.parts)
    sizes["of_inside"] = pooling.average_inside_only
    return {name: np.int64(size) for name, size in sizes.items()} | {
        "margin": np.float64(pooling.margin)
    }
