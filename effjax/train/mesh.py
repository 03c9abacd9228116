"""The devices of a run: a mesh of the axes `data` and, where asked for, `fsdp`.

The batch is split over all axes. Parameters and the optimizer's state are whole on each device, or,
over `fsdp`, split, and gathered where they are used.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import TrainError, counted

Array = jax.Array | np.ndarray
Devices = Sequence[Any]  # of jax.Device, which type checkers take for a variable
AnyMesh = Mesh | AbstractMesh

AXIS, FSDP = "data", "fsdp"
SMALL = 1024  # a parameter of fewer elements is whole on each device


def all_devices() -> Devices:
    """Those of all processes, one process after the other; `TrainError` if there is none."""
    try:
        return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    except RuntimeError as error:
        raise TrainError(f"JAX finds no device ({error}); run effjax doctor") from error


def data_mesh(devices: Devices | None = None) -> Mesh:
    """All `devices` (default: those of all processes) along one axis, `"data"`."""
    return run_mesh(None, devices)


def run_mesh(axes: str | None, devices: Devices | None = None) -> Mesh:
    """The mesh that an option names, such as `data=2,fsdp=4`, of all devices.

    Args:
        axes: None: all along `data`.
        devices: default: those of all processes.

    Raises:
        TrainError: it names another axis, or another number of devices.
    """
    devices = all_devices() if devices is None else devices
    sizes = {AXIS: len(devices)} if axes is None else axes_of(axes)
    _check_number(axes, sizes, len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(axes: str, num_devices: int) -> AbstractMesh:
    """As `run_mesh`, of devices that are not there."""
    sizes = axes_of(axes)
    _check_number(axes, sizes, num_devices)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _check_number(axes: str | None, sizes: dict[str, int], num_devices: int) -> None:
    if math.prod(sizes.values()) != num_devices:
        raise TrainError(
            f"mesh (={axes}) is of {math.prod(sizes.values())} devices, but there are "
            f"{num_devices}; change one of its sizes"
        )


def axes_of(text: str) -> dict[str, int]:
    """The sizes of the axes in `data=2,fsdp=4`."""
    sizes = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in (AXIS, FSDP) or name in sizes or not size.isdecimal() or not int(size):
            raise TrainError(
                f"mesh (={text!r}) must be like {AXIS}=2,{FSDP}=4: each axis once, with its size"
            )
        sizes[name] = int(size)
    return sizes


def devices_of(mesh: Mesh) -> str:
    """For a line of text: how many devices of what kind, split how, of how many processes."""
    parts = [f"{name}={size}" for name, size in mesh.shape.items()] if FSDP in mesh.shape else []
    processes = len({device.process_index for device in mesh.devices.flat})
    parts += [f"{processes} processes"] if processes > 1 else []
    more = f" ({', '.join(parts)})" if parts else ""
    return f"{counted(mesh.size, 'device')}{more}: {mesh.devices.flat[0].device_kind}"


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Raises `TrainError` unless each device gets the same share of a batch."""
    count = mesh.size
    if batch_size % count:
        raise TrainError(
            f"batch_size (={batch_size}) is not divisible by the number of devices (={count}); "
            f"use {batch_size // count * count or count}"
        )


def whole(mesh: AnyMesh) -> NamedSharding:
    """The same on each device."""
    return NamedSharding(mesh, P())


def by_batch(mesh: AnyMesh) -> NamedSharding:
    """The first axis split over all devices."""
    return NamedSharding(mesh, P(mesh.axis_names))


def sharding_of(shape: Sequence[int], mesh: AnyMesh, stacked: bool = False) -> NamedSharding:
    """Of a parameter, or what an optimizer keeps of it: its largest axis that `fsdp` divides is
    split over that, the last one of equals; without one, and if it is small, it is whole.

    Args:
        stacked: its first axis counts layers, and is not split.
    """
    parts = mesh.shape.get(FSDP, 1)
    fitting = [axis for axis in range(stacked, len(shape)) if shape[axis] % parts == 0]
    if parts == 1 or not fitting or math.prod(shape[stacked:]) < SMALL:
        return whole(mesh)
    largest = max(fitting, key=lambda axis: (shape[axis], axis))
    return NamedSharding(mesh, P(*[None] * largest, FSDP))


def shardings_of(state: Any, mesh: AnyMesh, stacked: bool = False) -> Any:
    """`sharding_of` each array of a tree."""
    return jax.tree.map(lambda a: sharding_of(np.shape(a), mesh, stacked), state)


def gathered(params: Any, mesh: AnyMesh) -> Any:
    """The parameters whole on each device, to compute with; their gradients are split again."""
    if FSDP not in mesh.shape:
        return params
    return jax.tree.map(lambda p: _gather(p, whole(mesh), sharding_of(p.shape, mesh)), params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, to: NamedSharding, back: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(x, to)


def _gather_forward(x: jax.Array, to: NamedSharding, back: NamedSharding):
    return _gather(x, to, back), None


def _gather_backward(to: NamedSharding, back: NamedSharding, _: None, g: jax.Array):
    # Summed over devices, then split, which XLA makes one of where it can. Split at once it would
    # gather what a lookup's gradient is summed from.
    return (lax.with_sharding_constraint(lax.with_sharding_constraint(g, to), back),)


_gather.defvjp(_gather_forward, _gather_backward)


def rows_here(batch_size: int, mesh: Mesh) -> slice:
    """The rows of a batch that lie on devices of this process."""
    indices: Any = by_batch(mesh).addressable_devices_indices_map((batch_size,)).values()
    bounds = [rows.indices(batch_size)[:2] for (rows,) in indices]
    return slice(min(first for first, _ in bounds), max(last for _, last in bounds))


def global_batch(rows: Any, batch_size: int, mesh: Mesh) -> Any:
    """A batch over all devices, of the rows that each process has of it."""
    to = by_batch(mesh)

    def put(a: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(to, a, (batch_size, *a.shape[1:]))

    return jax.tree.map(put, rows)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s that say where the arrays lie."""
    return jax.tree.map(
        lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), shapes, shardings
    )


def place(state: Any, shardings: Any) -> Any:
    """Arrays that each process has whole, as `shardings` have them."""

    def put(a: Any, to: Any) -> jax.Array:
        if isinstance(a, jax.Array) and a.sharding == to:
            return a
        if to.is_fully_addressable:
            return jax.device_put(a, to)
        return jax.make_array_from_callback(np.shape(a), to, lambda index: np.asarray(a)[index])

    return jax.tree.map(put, state, shardings)
