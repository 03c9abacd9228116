"""Averages over bins by custom calls: the functions of `reference.py`."""

import math
from typing import Any

import jax
import numpy as np

from ..._common.sharding import match_varying
from ..kernels import SAMPLE_FLOPS, call_native, count_bytes, count_sampled_bytes, result_type
from .reference import Pooling

_DETERMINISTIC = "effjax_roi_pool_backward_deterministic"


def pool(*args, pooling: Pooling) -> jax.Array:
    """Implement `reference.pool`."""
    x, *bins, initial = args = match_varying(args)
    shape = (*bins[0].shape[:3], x.shape[-1] // pooling.parts**2)
    result, (samples, flops) = result_type(x, shape), _count_samples(shape, pooling)
    return call_native(
        "effjax_roi_pool",
        result,
        args,
        flops=flops,
        memory_bytes=count_sampled_bytes(x, samples) + count_bytes(*bins, initial, result),
        aliases={4: 0} if initial.shape == shape else {},  # added to in place
        pooling=_as_attribute(pooling),
    )


def pool_backward(
    *args, pooling: Pooling, target: str = "effjax_roi_pool_backward"
) -> tuple[jax.Array, jax.Array]:
    """Implement `reference.pool_backward`."""
    x, first, *_, dy = args = match_varying(args)
    moves = pooling.has_position_gradients
    shape = (*first.shape[:4], 2 if moves else 0)
    results = result_type(x, dtype=first.dtype), result_type(first, shape)
    samples, flops = _count_samples(dy.shape, pooling)
    # dx is set to zero before threads add to it; x is read for the gradients of positions.
    added = 0 if target == _DETERMINISTIC else 4 * first.dtype.itemsize * samples
    read = count_sampled_bytes(x, samples) if moves else 0
    dx, dfirst = call_native(
        target,
        results,
        args,
        flops=None if flops is None else (1 + moves) * flops,
        memory_bytes=read + added + count_bytes(*args[1:], *results),
        pooling=_as_attribute(pooling),
    )
    return dx, dfirst


def _count_samples(bins: tuple[int, ...], pooling: Pooling) -> tuple[int, int | None]:
    """Return the samples of all bins [N, R, P, C], times their channels, and their FLOPs."""
    # If their number depends on the data, each bin counts one, and the FLOPs are unknown.
    samples = math.prod(bins) * max(1, pooling.samples) ** 2
    return samples, SAMPLE_FLOPS * samples if pooling.samples else None


def deterministic_pool_backward(*args, pooling: Pooling) -> tuple[jax.Array, jax.Array]:
    """Compute dx without atomic additions, whose order varies on a GPU."""
    # Each pixel adds up the bins that read it, in their order.
    return pool_backward(*args, pooling=pooling, target=_DETERMINISTIC)


def _as_attribute(pooling: Pooling) -> dict[str, Any]:
    """Return the struct `Attributes` of native/roi_ffi.h."""
    rows, columns = pooling.output_size
    sizes = dict(rows=rows, columns=columns, parts=pooling.parts)
    sizes["of_inside"] = pooling.average_inside_only
    return {name: np.int64(size) for name, size in sizes.items()} | {
        "margin": np.float64(pooling.margin)
    }
