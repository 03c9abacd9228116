"""All devices of a run along one axis, that of the batch."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import TrainError

Array = jax.Array | np.ndarray
Devices = Sequence[Any]  # of jax.Device, which type checkers take for a variable

AXIS = "data"


def local_devices() -> Devices:
    """All devices of this process; `TrainError` if there is none."""
    try:
        return jax.local_devices()
    except RuntimeError as error:
        raise TrainError(f"JAX finds no device ({error}); run effjax doctor") from error


def data_mesh(devices: Devices | None = None) -> Mesh:
    """All `devices` (default: all local ones) along one axis, `"data"`."""
    devices = jax.local_devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)


def replicate(state: Any, devices: Devices | None = None) -> Any:
    """The same state on each device."""
    return jax.device_put(state, NamedSharding(data_mesh(devices), P()))


def check_batch_size(batch_size: int, devices: Devices) -> None:
    """Raises `TrainError` unless each device gets the same share of a batch."""
    count = len(devices)
    if batch_size % count:
        raise TrainError(
            f"batch_size (={batch_size}) is not divisible by the number of devices (={count}); "
            f"use {batch_size // count * count or count}"
        )
