"""Resident memory while effjax's handlers save and restore a state on the host.

Each measurement is a process of its own. On a CPU, memory of the kind `pinned_host` is ordinary
memory, and effjax writes arrays from where they are; with "slices" it copies them as on a GPU.
"""

import functools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from effjax import _slices
from effjax.train import make_handler_registry


def peak_resident_bytes():
    """Return the most resident memory of this process since the last call."""
    time.sleep(0.3)  # until freed memory is returned
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main(action, folder, form):
    """Save or restore 512 MiB; print the bytes beyond them."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.ShapeDtypeStruct((64, 2**20), jnp.float32, sharding=place)
    shapes = {"a": array, "b": array}
    if form == "slices":
        _slices._is_cpu = lambda place: False
    draw = jax.jit(functools.partial(jax.random.uniform, shape=array.shape), out_shardings=place)
    state = {}
    if action == "save":
        state = {name: draw(jax.random.key(i)) for i, name in enumerate(shapes)}
        jax.block_until_ready(state)
    peak_resident_bytes()
    before = peak_resident_bytes()
    with ocp.CheckpointManager(folder, handler_registry=make_handler_registry()) as manager:
        if action == "save":
            manager.save(1, args=ocp.args.StandardSave(state))
        else:
            state = manager.restore(1, args=ocp.args.StandardRestore(shapes))
            before += sum(a.nbytes for a in jax.block_until_ready(state).values())
    print(json.dumps(peak_resident_bytes() - before))


def measure(action, folder, form):
    """Return the bytes beyond the state in a new process."""
    command = [sys.executable, "-m", __name__, action, folder, form]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
