"""Resident memory beyond a state on the host while Orbax saves and restores it, on the CPU.

Each measurement is a process of its own. On a CPU, memory of the kind `pinned_host` is ordinary
memory, and effjax writes arrays from where they are. "In slices" copies them as it does on a GPU.
"""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from effjax import _slices
from effjax.train import make_handler_registry

from .results import Bars, Result, Size
from .run_memory import peak_resident_bytes

ORBAX, ONE_GB, SLICES, OURS = (
    "Orbax", "Orbax, 1 GB at a time", "effjax, in slices", "effjax"
)  # fmt: skip
ARRAY_BYTES = 256 << 20


def make_manager(folder: Path, name: str) -> ocp.CheckpointManager:
    """Return a manager of Orbax with its handlers or with those of effjax."""
    if name == ORBAX:
        return ocp.CheckpointManager(folder)
    if name == ONE_GB:
        handler = ocp.StandardCheckpointHandler(save_concurrent_gb=1, restore_concurrent_gb=1)
        registry = ocp.handlers.create_default_handler_registry(default=handler)
        return ocp.CheckpointManager(folder, handler_registry=registry)
    if name == SLICES:
        _slices._is_cpu = lambda place: False
    return ocp.CheckpointManager(folder, handler_registry=make_handler_registry())


def shapes_of(num_arrays: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a state on the host."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    a = jax.ShapeDtypeStruct((64, ARRAY_BYTES // 256), jnp.float32, sharding=place)
    return {f"array{i}": a for i in range(num_arrays)}


def measure_save(folder: Path, name: str, num_arrays: int) -> dict[str, Any]:
    """Save a state in this process."""
    state = {}
    for i, (key, a) in enumerate(shapes_of(num_arrays).items()):
        draw = functools.partial(jax.random.uniform, shape=a.shape)
        draw = jax.jit(draw, out_shardings=a.sharding)
        state[key] = jax.block_until_ready(draw(jax.random.key(i)))
    peak_resident_bytes()
    before = peak_resident_bytes()
    with make_manager(folder, name) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    return {
        "state_bytes": sum(a.nbytes for a in state.values()),
        "save_bytes": peak_resident_bytes() - before,
    }


def measure_restore(folder: Path, name: str, num_arrays: int) -> dict[str, Any]:
    """Restore the state of `measure_save` in this process."""
    shapes = shapes_of(num_arrays)
    peak_resident_bytes()
    before = peak_resident_bytes()
    with make_manager(folder, name) as manager:
        state = jax.block_until_ready(manager.restore(1, args=ocp.args.StandardRestore(shapes)))
    size = sum(a.nbytes for a in state.values())
    return {"restore_bytes": peak_resident_bytes() - before - size}


def measure(name: str, num_arrays: int) -> dict[str, Any]:
    """Save and restore a state, in two new processes."""
    row: dict[str, Any] = {"name": name}
    with tempfile.TemporaryDirectory() as folder:
        for function in ("save", "restore"):
            command = [sys.executable, "-m", __name__, function, folder, name, str(num_arrays)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row |= json.loads(output.splitlines()[-1])
    return row


def run(size: Size) -> Iterator[Result]:
    num_arrays = 2 if size == "small" else 6
    yield Result(
        "checkpoint_memory",
        "resident memory beyond a state on the host, saved and restored with Orbax",
        {"array_bytes": ARRAY_BYTES, "arrays": num_arrays},
        [measure(name, num_arrays) for name in (ORBAX, ONE_GB, SLICES, OURS)],
        Bars("save_bytes", "memory beyond the state while it is saved [GiB]", unit=2**30),
        ["On a CPU, memory of the kind pinned_host is ordinary memory."],
    )


if __name__ == "__main__":
    action = {"save": measure_save, "restore": measure_restore}[sys.argv[1]]
    print(json.dumps(action(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
