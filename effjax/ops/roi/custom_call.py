"""Custom calls of pooling, the native versions of the functions in `reference.py`."""

from typing import Any

import jax
import numpy as np

from .._common.dispatch import result_type
from .._common.sharding import match_varying
from .reference import Pooling


def pool(*args, pooling: Pooling) -> jax.Array:
    """Compute `reference.pool`; `so_far` is added to in place."""
    x, first, *_, so_far = args = match_varying(args)
    shape = (*first.shape[:3], x.shape[-1] // pooling.parts**2)
    aliases = {4: 0} if so_far.shape == shape else {}
    call = jax.ffi.ffi_call("effjax_roi_pool", result_type(x, shape), input_output_aliases=aliases)
    return call(*args, pooling=_as_attribute(pooling))


def pool_backward(*args, pooling: Pooling) -> tuple[jax.Array, jax.Array]:
    """Compute `reference.pool_backward`."""
    x, first, *_ = args = match_varying(args)
    shape = (*first.shape[:4], 2 if pooling.moves else 0)
    results = result_type(x, dtype=first.dtype), result_type(first, shape)
    call = jax.ffi.ffi_call("effjax_roi_pool_backward", results)
    dx, dfirst = call(*args, pooling=_as_attribute(pooling))
    return dx, dfirst


def _as_attribute(pooling: Pooling) -> dict[str, Any]:
    """Return the struct `Attributes` of native/roi_ffi.h."""
    rows, columns = pooling.output_size
    sizes = dict(rows=rows, columns=columns, parts=pooling.parts, of_inside=pooling.of_inside)
    return {name: np.int64(size) for name, size in sizes.items()} | {
        "margin": np.float64(pooling.margin)
    }
