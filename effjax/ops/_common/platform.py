"""The platform that operators are traced for; chunk sizes depend on it."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, get_args

import jax

from .arguments import check_choice

Platform = Literal["cpu", "cuda", "tpu"]
_F = TypeVar("_F", bound=Callable[..., Any])
_target = jax.make_user_context(None)  # part of the key of JAX's trace caches


def trace_for_platform(platform: Platform) -> AbstractContextManager:
    """Return a context in which operators are traced for a platform, which need not be present.

    Operators choose kernels and the sizes of slices by platform. They take it from the mesh of
    `jax.set_mesh` or of the types of their arrays, and otherwise assume JAX's default backend. In a
    program for other devices without a mesh, trace within this context::

        device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
        images = jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
        with effjax.trace_for_platform("tpu"):
            compiled = jax.jit(step).lower(images).compile()

    Args:
        platform: "cpu", "cuda" or "tpu".

    Raises:
        ValueError: for another platform.
    """
    return _target(check_choice("platform", platform, *get_args(Platform)))


def traced_platform() -> str:
    """Return the platform as `lax.platform_dependent` names it; any GPU is "cuda"."""
    mesh = jax.sharding.get_abstract_mesh()
    return _target.value or _platform_of(mesh) or _as_platform(jax.default_backend())


def follow_arrays(function: _F) -> _F:
    """Trace a function for the platform of the mesh of its arrays, if their types have one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arrays = (a for a in jax.tree.leaves((args, kwargs)) if isinstance(a, jax.Array))
        found = (_platform_of(jax.typeof(a).sharding.mesh) for a in arrays)
        platform = next(filter(None, found), None)
        if _target.value is not None or platform in (None, traced_platform()):
            return function(*args, **kwargs)
        with _target(platform):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _platform_of(mesh: Any) -> str | None:
    """Return the platform of the devices of an abstract mesh, if JAX knows it."""
    device = None if mesh.empty else mesh.abstract_device
    return None if device is None else _as_platform(device.platform)


def _as_platform(backend: str) -> str:
    return "cuda" if backend == "gpu" else backend


def known_sizes(*sizes: Any) -> tuple[int, ...]:
    """Return sizes as numbers, for limits of memory."""
    # A symbolic size of `jax.export` counts as 1: the limit is then one for each image of a batch
    # of unknown size.
    return tuple(size if isinstance(size, int) else 1 for size in sizes)


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of an array on the traced platform, with the padding of a TPU."""
    # A TPU stores the last two axes in tiles of 128 elements along the last axis, and of 8 rows of
    # 32 bits along the axis before. Arrays of one axis are counted without padding.
    itemsize = jax.numpy.dtype(dtype).itemsize
    shape = known_sizes(*shape)
    if traced_platform() == "tpu" and len(shape) > 1:
        tile = max(1, 32 // itemsize), 128
        last = (math.ceil(n / k) * k for n, k in zip(shape[-2:], tile, strict=True))
        shape = *shape[:-2], *last
    return math.prod(shape) * itemsize
