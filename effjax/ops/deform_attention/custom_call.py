"""The custom calls of deformable attention."""

from typing import Any

import jax
import numpy as np

from .._native import like
from .._parallel import same_varying
from .reference import Levels


def attend(value, locations, weights, *, levels: Levels, workspace_bytes: int) -> jax.Array:
    """As `reference.attend`; it needs no workspace."""
    args = same_varying((value, locations, weights))
    value, locations, _ = args
    shape = (*locations.shape[:2], *value.shape[2:])
    call = jax.ffi.ffi_call("effjax_ms_deform_attn", like(value, shape))
    return call(*args, **_attributes(levels))


def attend_backward(*args, levels: Levels, workspace_bytes: int) -> tuple:
    """As `reference.attend_backward`."""
    args = same_varying(args)
    value, locations, weights, _ = args
    results = like(value, dtype=weights.dtype), like(locations), like(weights)
    call = jax.ffi.ffi_call("effjax_ms_deform_attn_backward", results)
    return tuple(call(*args, **_attributes(levels)))


def _attributes(levels: Levels) -> dict[str, Any]:
    sizes = np.asarray(levels.shapes, np.int64).ravel()
    return dict(sizes=sizes, normalized=np.int64(levels.normalized))
