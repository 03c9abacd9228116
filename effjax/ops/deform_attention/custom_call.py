"""Custom calls of deformable attention, the native versions of the functions in `reference.py`."""

from typing import Any

import jax
import numpy as np

from .._common.dispatch import result_type
from .._common.sharding import match_varying
from .reference import Levels


def attend(value, locations, weights, *, levels: Levels, workspace_bytes: int) -> jax.Array:
    """Compute `reference.attend`, without a workspace."""
    args = match_varying((value, locations, weights))
    value, locations, _ = args
    shape = (*locations.shape[:2], *value.shape[2:])
    call = jax.ffi.ffi_call("effjax_ms_deform_attn", result_type(value, shape))
    return call(*args, **_attributes(levels))


def attend_backward(*args, levels: Levels, workspace_bytes: int) -> tuple:
    """Compute `reference.attend_backward`, without a workspace."""
    args = match_varying(args)
    value, locations, weights, _ = args
    results = result_type(value, dtype=weights.dtype), result_type(locations), result_type(weights)
    call = jax.ffi.ffi_call("effjax_ms_deform_attn_backward", results)
    return tuple(call(*args, **_attributes(levels)))


def _attributes(levels: Levels) -> dict[str, Any]:
    sizes = np.asarray(levels.shapes, np.int64).ravel()
    return dict(sizes=sizes, normalized=np.int64(levels.normalized))
