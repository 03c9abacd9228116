"""Arrays created and read in slices of rows, in device or host memory.

Only a slice is in the memory of the host at a time, beside the array itself.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

Bounds = tuple[tuple[int, int], ...]  # first and last + 1 along each axis
# The first row, the last + 1, and a function that reads them into a contiguous array.
Rows = tuple[int, int, Callable[[np.ndarray], object]]


def whole(shape: Sequence[int]) -> Bounds:
    """Return the bounds of a whole array."""
    return tuple((0, size) for size in shape)


def bounds_of(index: Any, shape: Sequence[int]) -> Bounds:
    """Return the bounds of a shard, given its index, a tuple of slices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def sharding_of(array: Any) -> jax.sharding.Sharding:
    """Return the sharding of an array or a shape; one without is on one device."""
    if (sharding := getattr(array, "sharding", None)) is not None:
        return sharding
    return SingleDeviceSharding(jax.local_devices()[0])


def devices_by_shard(array: Any) -> dict[Bounds, list[Any]]:
    """Return the devices of this process that have each shard of an array or a shape."""
    shape, devices = tuple(array.shape), {}
    for device, index in sharding_of(array).addressable_devices_indices_map(shape).items():
        devices.setdefault(bounds_of(index, shape), []).append(device)
    return devices


def create_array(
    like: Any, rows_of: Callable[[Bounds], Iterable[Rows]], max_bytes: int
) -> jax.Array:
    """Create an array where its sharding says, and read its shards on devices of this process.

    Args:
        like: The shape, the dtype and the sharding.
        rows_of: Returns the slices of a shard, counted from its first row. A scalar has one row.
        max_bytes: Smaller arrays are put on their devices as a whole.
    """
    sharding, arrays = sharding_of(like), []
    dtype = jax.dtypes.canonicalize_dtype(like.dtype)
    for bounds, devices in devices_by_shard(like).items():
        shape, kind = tuple(last - first for first, last in bounds), sharding.memory_kind
        places = [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        arrays += _create_shard(shape, dtype, rows_of(bounds), places, max_bytes)
    if isinstance(sharding, SingleDeviceSharding) and arrays:
        # Here JAX would return an array with the type of one in device memory (JAX 0.10 to 0.12).
        return arrays[0]
    return jax.make_array_from_single_device_arrays(tuple(like.shape), sharding, arrays)


def _create_shard(
    shape: tuple[int, ...],
    dtype: np.dtype,
    slices: Iterable[Rows],
    places: list[SingleDeviceSharding],
    max_bytes: int,
) -> list[jax.Array]:
    """Create a shard at each of the places, which are a device and its memory."""
    if math.prod(shape) * dtype.itemsize <= max_bytes:
        array = np.empty(shape or (1,), dtype)
        for first, last, read in slices:
            read(array[first:last])
        # Programs may overwrite the new arrays in place, so they must not share memory.
        return [jax.device_put(array.reshape(shape), place, may_alias=False) for place in places]
    arrays = [_empty(place)(shape, dtype) for place in places]
    if _is_cpu(places[0]):
        views = [_view(jax.block_until_ready(a)) for a in arrays]
        for first, last, read in slices:
            read(views[0][first:last])
            for view in views[1:]:
                view[first:last] = views[0][first:last]
        return arrays
    for first, last, read in slices:
        read(rows := np.empty((last - first, *shape[1:]), dtype))
        arrays = [_write(place)(a, rows, first) for a, place in zip(arrays, places, strict=True)]
        jax.block_until_ready(arrays)  # so that there is one `rows` at a time
    return arrays


def own_shards(a: Any) -> Iterator[tuple[Bounds, Any]]:
    """Yield the bounds and data of the shards of an array that this process writes."""
    if not isinstance(a, jax.Array):
        yield whole(a.shape), a
        return
    for shard in a.addressable_shards:
        if shard.replica_id == 0:
            yield bounds_of(shard.index, a.shape), shard.data


def read_rows(a: Any, first: int, last: int, max_bytes: int) -> np.ndarray:
    """Return the rows from `first` to `last` - 1 of an array on one device; a scalar has one row.

    Arrays of up to `max_bytes` are copied to the host as a whole.
    """
    if not isinstance(a, jax.Array) or _is_cpu(a.sharding):
        return np.asarray(a).reshape(a.shape or (1,))[first:last]  # on the CPU: a view
    if a.nbytes <= max_bytes:
        # JAX keeps the copy on the host with the array that it was asked of.
        a = jax.make_array_from_single_device_arrays(a.shape, a.sharding, [a])
        return np.asarray(a).reshape(a.shape or (1,))[first:last]
    return np.asarray(_reader(next(iter(a.devices())))(a, first, last - first))


def _is_cpu(place: jax.sharding.Sharding) -> bool:
    """Return True for arrays in ordinary memory of this process."""
    return next(iter(place.device_set)).platform == "cpu"


def _view(a: jax.Array) -> np.ndarray:
    """Return a writable view of a new array on the CPU."""
    # XLA for CPUs would copy it with every `_write`, and change the bits of bfloat16 NaNs.
    data: Any = (ctypes.c_uint8 * a.nbytes).from_address(a.unsafe_buffer_pointer())
    return np.frombuffer(data, a.dtype).reshape(a.shape)


@functools.lru_cache(maxsize=64)
def _empty(place: SingleDeviceSharding) -> Callable[..., jax.Array]:
    """Return ``empty(shape, dtype)``, which creates an array at a place."""

    def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # The scalar is in the memory of the result, so the result is created there.
        return lax.broadcast(_put(jnp.zeros((), dtype), place), shape)

    return jax.jit(empty, static_argnums=(0, 1), out_shardings=place)


@functools.lru_cache(maxsize=64)
def _write(place: SingleDeviceSharding) -> Callable[..., jax.Array]:
    """Return ``write(a, rows, first)``, which overwrites rows of an array at a place."""

    def write(a: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
        # Only along the first axis: TPUs copy no other slices to the host.
        return lax.dynamic_update_slice_in_dim(a, _put(rows, place), first, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=place)


def _put(x: Any, place: SingleDeviceSharding) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host) if place.memory_kind == "pinned_host" else x


@functools.lru_cache(maxsize=64)
def _reader(device: Any) -> Callable[..., Any]:
    """Return a function that copies rows of an array on a device, or of its host memory."""

    def read(a: jax.Array, first: Any, size: int) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(a, first, size, 0)
        return jax.device_put(rows, jax.memory.Space.Device)

    return jax.jit(read, static_argnums=2, out_shardings=SingleDeviceSharding(device))
