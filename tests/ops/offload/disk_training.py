"""A training run whose optimizer state is on disk: a program that can be killed and started again.

`python -m tests.ops.offload.disk_training FOLDER KILL_AT` kills itself at a file operation.
"""

import os
import pathlib
import shutil
import signal
import sys

import jax
import numpy as np
import optax

import effjax
from tests.ops.offload.stacks import BATCH, LAYERS, WIDTH, layer

STEPS = 6
TX = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS))
OPERATIONS = "fsync", "link", "posix_fallocate", "preadv", "pwrite", "rename", "rmdir", "unlink"


def params():
    """Return parameters from NumPy, which is faster at the start of a process."""
    draw = np.random.default_rng(0).normal
    shapes = {"a": (WIDTH, 2 * WIDTH), "b": (2 * WIDTH, WIDTH), "c": (2 * WIDTH,)}
    return {k: np.float32(0.3 * draw(size=(LAYERS, *shape))) for k, shape in shapes.items()}


def kill_at(number):
    """Kill this process at the n-th file operation."""
    count = 0

    def counted(run):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def train(folder):
    """Train to the end, from the last checkpoint if there is one; return the parameters."""
    folder = pathlib.Path(folder)
    on_disk = effjax.disk_update(TX, folder / "state")
    loss = lambda w, x: (effjax.offload_scan(layer, w, x) ** 2).mean()  # noqa: E731
    gradient = effjax.offload_jit(jax.grad(loss), donate=False)
    saved = sorted(folder.glob("checkpoint_[0-9]"))
    w = effjax.to_host(params())
    if saved:
        with np.load(saved[-1] / "params.npz") as arrays:
            w = effjax.to_host(dict(arrays))
        state = on_disk.restore(saved[-1] / "optimizer", w)
    else:
        shutil.rmtree(folder / "state", ignore_errors=True)
        state = on_disk.init(w)
    while state.step < STEPS:
        x = np.float32(np.random.default_rng(state.step).normal(size=(BATCH, WIDTH)))
        w, state = on_disk.update(gradient(w, x), state, w)
        print("step", state.step, flush=True)
        if state.step % 2 == 0:
            save(on_disk, state, w, folder)
    return w


def save(on_disk, state, w, folder):
    """Save a checkpoint, and remove the one before."""
    temporary, old = folder / "new", sorted(folder.glob("checkpoint_[0-9]"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    np.savez(temporary / "params.npz", **w)
    on_disk.save(state, temporary / "optimizer")
    temporary.rename(folder / f"checkpoint_{state.step}")
    for path in old:
        shutil.rmtree(path)


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    kill_at(int(sys.argv[2]))
    train(sys.argv[1])
    print("end")
