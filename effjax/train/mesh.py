"""The devices of a run: a mesh with the axis `data` and, if wanted, `fsdp`.

The batch is split over all axes. Parameters and optimizer state are replicated over `data` and
split over `fsdp`; split parameters are gathered where they are used.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import TrainError, counted

Array = jax.Array | np.ndarray
Devices = Sequence[Any]  # of jax.Device, which type checkers take for a variable
AnyMesh = Mesh | AbstractMesh

AXIS, FSDP = "data", "fsdp"
SMALL = 1024  # a parameter of fewer elements is replicated


def make_mesh(axes: str | None, devices: Devices | None = None) -> Mesh:
    """Return the mesh that an option such as `data=2,fsdp=4` describes.

    Args:
        axes: The sizes of the axes. If None, all devices are along `data`.
        devices: By default, those of all processes, ordered by process.

    Raises:
        TrainError: The text has another form, or another number of devices, or there is no device.
    """
    if devices is None:
        try:
            devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        except RuntimeError as error:
            raise TrainError(f"JAX finds no device ({error}). Run effjax doctor.") from error
    sizes = parse_axes(axes, len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def planning_mesh(axes: str | None, num_devices: int) -> AnyMesh:
    """Return the mesh of a step that is planned and not run.

    It consists of this process's devices if there are enough. Otherwise it is abstract.
    """
    if jax.device_count() >= num_devices:
        return make_mesh(axes, jax.devices()[:num_devices])
    sizes = parse_axes(axes, num_devices)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def parse_axes(text: str | None, num_devices: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes in a text such as `data=2,fsdp=4`.

    Args:
        text: If None, all devices are along `data`.
        num_devices: The number that the sizes must multiply to; by default any.
    """
    if text is None:
        return {AXIS: num_devices or 1}
    sizes = {}
    for item in text.split(","):
        name, _, size = (word.strip() for word in item.partition("="))
        if name not in (AXIS, FSDP) or name in sizes or not re.fullmatch("0*[1-9][0-9]{0,8}", size):
            raise TrainError(
                f"`mesh` (={text!r:.120}) must be like {AXIS}=2,{FSDP}=4: each axis once, with "
                "its size"
            )
        sizes[name] = int(size)
    if num_devices is not None and math.prod(sizes.values()) != num_devices:
        raise TrainError(
            f"the sizes in `mesh` (={text}) must multiply to the number of devices (={num_devices})"
        )
    return sizes


def describe_devices(mesh: Mesh) -> str:
    """Return the number of devices, the axes, the number of processes and the kind of device."""
    details = [f"{name}={size}" for name, size in mesh.shape.items()] if FSDP in mesh.shape else []
    processes = len({device.process_index for device in mesh.devices.flat})
    details += [f"{processes} processes"] if processes > 1 else []
    in_parentheses = f" ({', '.join(details)})" if details else ""
    return f"{counted(mesh.size, 'device')}{in_parentheses}: {mesh.devices.flat[0].device_kind}"


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Raise TrainError unless the batch can be split over the devices."""
    if batch_size % mesh.size:
        raise TrainError(
            f"`batch_size` (={batch_size}) must be divisible by the number of devices "
            f"(={mesh.size}). Use {batch_size // mesh.size * mesh.size or mesh.size}."
        )


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Return a fully replicated sharding."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of an array whose first axis is split over all devices."""
    return NamedSharding(mesh, P(mesh.axis_names))


def param_sharding(shape: Sequence[int], mesh: AnyMesh, stacked: bool = False) -> NamedSharding:
    """Return the sharding of a parameter, or of an optimizer moment of it.

    Shard the largest axis that the size of `fsdp` divides; of equal axes, the last. Replicate if
    there is none, or if the parameter (one layer of it, if `stacked`) has fewer than `SMALL`
    elements.

    Args:
        shape: The shape of the parameter.
        mesh: The devices.
        stacked: Whether the first axis counts layers; it is then not split.
    """
    size = mesh.shape.get(FSDP, 1)
    divisible = [axis for axis in range(stacked, len(shape)) if shape[axis] % size == 0]
    if size == 1 or not divisible or math.prod(shape[stacked:]) < SMALL:
        return replicated(mesh)
    largest = max(divisible, key=lambda axis: (shape[axis], axis))
    return NamedSharding(mesh, P(*[None] * largest, FSDP))


def param_shardings(state: Any, mesh: AnyMesh, stacked: bool = False) -> Any:
    """Return the `param_sharding` of each array of a pytree."""
    return jax.tree.map(lambda a: param_sharding(np.shape(a), mesh, stacked), state)


def gather_params(params: Any, mesh: AnyMesh) -> Any:
    """Replicate split parameters to compute with them; their gradients are split again."""
    # Without this, XLA may split the computation over `fsdp` instead, as tensor parallelism does.
    if FSDP not in mesh.shape:
        return params
    return jax.tree.map(
        lambda p: _gather(p, replicated(mesh), param_sharding(p.shape, mesh)), params
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, to: NamedSharding, back: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(x, to)


def _gather_forward(x: jax.Array, to: NamedSharding, back: NamedSharding):
    return _gather(x, to, back), None


def _gather_backward(to: NamedSharding, back: NamedSharding, _: None, dy: jax.Array):
    # First sum over the devices, then split: XLA fuses the two into a reduce-scatter where it can.
    # If the gradient of an embedding lookup were split at once, XLA would gather what is summed.
    return (lax.with_sharding_constraint(lax.with_sharding_constraint(dy, to), back),)


_gather.defvjp(_gather_forward, _gather_backward)


def local_rows(batch_size: int, mesh: Mesh) -> slice:
    """Return the rows of a batch that are on devices of this process."""
    indices: Any = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    bounds = [rows.indices(batch_size)[:2] for (rows,) in indices]
    return slice(min(first for first, _ in bounds), max(last for _, last in bounds))


def global_batch(rows: Any, batch_size: int, mesh: Mesh) -> Any:
    """Return a batch over all devices; each process passes its `local_rows`."""
    sharding = batch_sharding(mesh)

    def put(a: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, a, (batch_size, *a.shape[1:]))

    return jax.tree.map(put, rows)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return `jax.ShapeDtypeStruct`s with shardings."""
    return jax.tree.map(
        lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), shapes, shardings
    )


def put(state: Any, shardings: Any) -> Any:
    """Place a pytree with the given shardings.

    Every process passes full arrays, or the arrays are on the devices of all of them.
    """

    def put_one(a: Any, to: Any) -> jax.Array:
        if isinstance(a, jax.Array) and a.sharding == to:
            return a
        if to.is_fully_addressable:
            return jax.device_put(a, to)
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            return jax.jit(lambda a: a, out_shardings=to)(a)
        if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):  # not an array of NumPy
            return jax.jit(lambda: a, out_shardings=to)()
        return jax.make_array_from_callback(np.shape(a), to, lambda index: np.asarray(a)[index])

    return jax.tree.map(put_one, state, shardings)
