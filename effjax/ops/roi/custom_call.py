"""The custom calls that compute what `reference.py` says: of CPUs and GPUs alike."""

from typing import Any

import jax
import numpy as np

from .._common.dispatch import fail_at_compile_time, result_type
from .._common.sharding import match_varying
from . import reference
from .reference import Pooling

OPERATOR = "pooling of boxes"


def _attribute(pooling: Pooling) -> dict[str, Any]:
    """`Attributes` of native/roi_ffi.h."""
    rows, columns = pooling.output_size
    sizes = dict(rows=rows, columns=columns, parts=pooling.parts, of_inside=pooling.of_inside)
    return {name: np.int64(size) for name, size in sizes.items()} | {
        "margin": np.float64(pooling.margin)
    }


def pool(*args, pooling: Pooling) -> jax.Array:
    x, first, *_, so_far = args = match_varying(args)
    shape = (*first.shape[:3], x.shape[-1] // pooling.parts**2)
    in_place = {4: 0} if so_far.shape == shape else {}
    call = jax.ffi.ffi_call("effjax_roi_pool", result_type(x, shape), input_output_aliases=in_place)
    return call(*args, pooling=_attribute(pooling))


def pool_backward(*args, pooling: Pooling) -> tuple[jax.Array, jax.Array]:
    x, first, *_ = args = match_varying(args)
    shape = (*first.shape[:4], 2 if pooling.moves else 0)
    results = result_type(x, dtype=first.dtype), result_type(first, shape)
    call = jax.ffi.ffi_call("effjax_roi_pool_backward", results)
    dx, dfirst = call(*args, pooling=_attribute(pooling))
    return dx, dfirst


nowhere = (
    fail_at_compile_time(reference.pool, OPERATOR),
    fail_at_compile_time(reference.pool_backward, OPERATOR),
)
