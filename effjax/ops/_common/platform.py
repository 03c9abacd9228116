"""The platform that operators are traced for; chunk sizes depend on it."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

_target = jax.make_user_context(None)  # part of the key of JAX's trace caches


def trace_for_platform(platform: str) -> AbstractContextManager:
    """Trace for this platform inside the context; the machine need not have it."""
    return _target(platform)


def traced_platform() -> str:
    """Return the platform as `lax.platform_dependent` names it; any GPU is "cuda"."""
    backend = _target.value or jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def known_sizes(*sizes: Any) -> tuple[int, ...]:
    """Return sizes as numbers, for limits of memory. A symbolic size of `jax.export` counts as 1.

    The limit is then one for each image of a batch of unknown size.
    """
    return tuple(size if isinstance(size, int) else 1 for size in sizes)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of an array on the traced platform, with the padding of a TPU.

    A TPU stores the last two axes in tiles of 128 elements along the last axis, and of 8 rows of
    32 bits along the axis before. Arrays of one axis are counted without padding.
    """
    itemsize = jax.numpy.dtype(dtype).itemsize
    shape = known_sizes(*shape)
    if traced_platform() == "tpu" and len(shape) > 1:
        tile = max(1, 32 // itemsize), 128
        last = (math.ceil(n / k) * k for n, k in zip(shape[-2:], tile, strict=True))
        shape = *shape[:-2], *last
    return math.prod(shape) * itemsize
