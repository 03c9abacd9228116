"""Deformable attention by custom calls: the functions of `reference.py`, without a workspace."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._common.platform import known_sizes
from ..._common.sharding import match_varying, zeros
from ..chunks import split
from ..kernels import SAMPLE_FLOPS, call_native, count_bytes, count_sampled_bytes, result_type
from . import reference
from .reference import Levels


def attend(value, locations, weights, *, levels: Levels, chunk_bytes: int) -> jax.Array:
    """Implement `reference.attend`."""
    args = match_varying((value, locations, weights))
    value, locations, weights = args
    result = result_type(value, (*locations.shape[:2], *value.shape[2:]))
    samples = _count_samples(value, weights)
    return call_native(
        "effjax_ms_deform_attn",
        result,
        args,
        flops=SAMPLE_FLOPS * samples,
        memory_bytes=count_sampled_bytes(value, samples) + count_bytes(locations, weights, result),
        **_attributes(levels),
    )


def _count_samples(value, weights) -> int:
    """Return the number of samples, times their channels."""
    return math.prod(weights.shape) * value.shape[-1]


def attend_backward(*args, levels: Levels, chunk_bytes: int, skip_dvalue: bool = False) -> tuple:
    """Implement `reference.attend_backward`. With `skip_dvalue`, dvalue has size 0."""
    value, locations, weights, dy = args = match_varying(args)
    n, pixels, *head = value.shape
    dvalue = result_type(value, (n, 0 if skip_dvalue else pixels, *head), weights.dtype)
    results = dvalue, result_type(locations), result_type(weights)
    samples, added = _count_samples(value, weights), 0 if skip_dvalue else 4 * dvalue.dtype.itemsize
    gradients = call_native(
        "effjax_ms_deform_attn_backward",
        results,
        args,
        flops=(1 if skip_dvalue else 2) * SAMPLE_FLOPS * samples,
        # dvalue is set to zero first.
        memory_bytes=count_sampled_bytes(value, samples)
        + count_bytes(locations, weights, dy, *results)
        + added * samples,
        **_attributes(levels),
    )
    return tuple(gradients)


# For each of a sample's four corners: its pixel, and two numbers before and after the sort.
_SORT_BYTES = 4 * 4 * (1 + 2 * 2)


def sorted_attend_backward(*args, levels: Levels, chunk_bytes: int) -> tuple:
    """Compute all gradients; dvalue without atomic additions, whose order varies on a GPU."""
    # The corners of the samples are sorted by their pixel, and the corners of each pixel are summed
    # in that order. Chunks of queries, one after the other, limit the memory of the sort.
    value, locations, weights, dy = args = match_varying(args)
    _, *gradients = attend_backward(*args, levels=levels, chunk_bytes=chunk_bytes, skip_dvalue=True)
    n, queries, heads, *of_head, _ = known_sizes(*locations.shape)
    per_query = max(n * heads * math.prod(of_head) * _SORT_BYTES, 1)
    size = max(1, min(chunk_bytes // per_query, queries))
    size = math.ceil(queries / max(math.ceil(queries / size), 1))
    dvalue = zeros(value.shape, weights.dtype, value)
    if queries <= size:
        return _add_sorted(dvalue, locations, weights, dy, levels), *gradients

    def run(dvalue, chunks):
        return _add_sorted(dvalue, *chunks, levels=levels), None

    chunks = [split(a, size) for a in (locations, weights, dy)]
    dvalue, _ = lax.scan(run, dvalue, chunks)
    return dvalue, *gradients


def _add_sorted(dvalue, locations, weights, dy, levels: Levels) -> jax.Array:
    """Add the gradient of value for these queries to dvalue, in a fixed order."""
    destination = destinations(locations, levels)
    source = lax.broadcasted_iota(jnp.int32, destination.shape, 2) // 4
    destination, source = match_varying((destination, source))
    # The corners of a sample are different pixels, or count for nothing: an unstable sort of the
    # pairs is deterministic.
    destination, source = lax.sort((destination, source), num_keys=2, is_stable=False)
    args = (locations, weights, dy, destination, source, dvalue)
    return call_native(
        "effjax_ms_deform_attn_scatter_sorted",
        result_type(dvalue),
        match_varying(args),
        flops=SAMPLE_FLOPS * _count_samples(dvalue, weights),
        memory_bytes=count_bytes(*args, dvalue),
        aliases={5: 0},
        **_attributes(levels),
    )


def destinations(locations: jax.Array, levels: Levels) -> jax.Array:
    """Return the pixel of every corner, int32 [N, M, Q * L * P * 4]; S if it is outside."""
    pixels = sum(height * width for height, width in levels.shapes)
    index, valid = reference.corners(locations, levels)  # [N, Q, M, L, P, 4]
    by_head = jnp.moveaxis(jnp.where(valid, index, pixels), 2, 1)
    return by_head.reshape(*by_head.shape[:2], math.prod(by_head.shape[2:]))


def _attributes(levels: Levels) -> dict[str, Any]:
    sizes = np.asarray(levels.shapes, np.int64).ravel()
    return dict(sizes=sizes, normalized=np.int64(levels.normalized))
