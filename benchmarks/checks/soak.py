"""Memory, compilations and open files over many steps of a model with all kinds of offloading.

The model has a deformable stem and offloaded layers: `python -m benchmarks.checks.soak`.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax

import effjax

from ..results import Result, write_json

SIDE, CHANNELS, LAYERS, CLASSES, BATCH = 8, 8, 3, 5, 8
TAPS = 9
SAMPLE_EVERY = 500  # steps
WARM_UP = 0.1  # of all steps, while allocators reach their size
COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"


def embed(others: Any, batch: Any, key: Any) -> jax.Array:
    images = batch[0]
    offset = jax.lax.conv_general_dilated(
        images, others["offset"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return effjax.deform_conv2d(images, offset, others["kernel"], padding=1).mean((1, 2))


def layer(params: Any, x: jax.Array, key: Any) -> jax.Array:
    return x + jnp.tanh(x @ params["a"]) @ params["b"]


def head(others: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    logits = x @ others["classes"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def make_step() -> tuple[Callable, Any]:
    """Return a compiled step and its state, whose layers and moments are on the host."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.1

    others = {
        "offset": normal(3, 3, 3, 2 * TAPS),
        "kernel": normal(3, 3, 3, CHANNELS),
        "classes": normal(CHANNELS, CLASSES),
    }
    layers = {name: normal(LAYERS, CHANNELS, CHANNELS) for name in "ab"}
    init, step = effjax.offload_train_step(embed, layer, head, optax.adam(1e-3))
    return effjax.offload_jit(step), init(effjax.to_host(layers), others)


def generate_batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        noise = rng.normal(size=(BATCH, SIDE, SIDE, 3)) + labels[:, None, None, None]
        yield noise.astype(np.float32), labels


@contextmanager
def record_compilations() -> Iterator[list[float]]:
    """Collect the seconds of each compilation in a list."""
    seconds: list[float] = []

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILATION_EVENT:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(steps: int, sample_every: int = SAMPLE_EVERY) -> dict[str, Any]:
    """Take steps and sample this process.

    Returns:
        Growth after the warm-up (resident bytes per step by least squares, compilations, file
        descriptors), the seconds of the run, and the samples.
    """
    step_fn, state = make_step()
    batches, key = generate_batches(), jax.random.key(1)
    samples: list[dict[str, Any]] = []
    start = time.perf_counter()
    with record_compilations() as compilations:
        for step in range(1, steps + 1):
            state, loss, *_ = step_fn(state, next(batches), jax.random.fold_in(key, step))
            if step % sample_every == 0:
                gc.collect()
                samples.append(
                    {
                        "step": step,
                        "loss": round(float(loss), 4),
                        "compiled": len(compilations),
                        "resident_bytes": resident_bytes(),
                        "descriptors": len(os.listdir("/proc/self/fd")),
                    }
                )
    warm = [sample for sample in samples if sample["step"] >= WARM_UP * steps]
    x, y = (np.array([sample[name] for sample in warm]) for name in ("step", "resident_bytes"))
    first, last = warm[0], warm[-1]
    return {
        "bytes_per_step": round(float(np.polyfit(x, y, 1)[0]), 1),
        "compilations": last["compiled"] - first["compiled"],
        "descriptors": last["descriptors"] - first["descriptors"],
        "seconds": round(time.perf_counter() - start, 1),
        "samples": samples,
    }


def has_grown(growth: Mapping[str, Any], max_mib: float) -> bool:
    """Return True if memory grew by `max_mib` in 1,000 steps, or compilations or files grew."""
    mebibytes = growth["bytes_per_step"] * 1000 / 2**20
    return mebibytes >= max_mib or growth["compilations"] > 0 or growth["descriptors"] > 0


def main(argv: list[str] | None = None) -> int:
    """Take the steps; return 1 if memory, compilations or open files grew after the warm-up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--max-mib", type=float, default=1.0, help="Growth in 1,000 steps.")
    parser.add_argument("--json", type=Path, help="Folder for soak.json.")
    options = parser.parse_args(argv)
    growth = soak(options.steps, min(SAMPLE_EVERY, max(options.steps // 20, 1)))
    samples = growth.pop("samples")
    mebibytes = growth["bytes_per_step"] * 1000 / 2**20
    print(f"{options.steps} steps in {growth['seconds']:.0f} s, growth after the warm-up:")
    print(f"resident memory in 1,000 steps: {mebibytes:.3f} MiB")
    print(f"compilations: {growth['compilations']}, file descriptors: {growth['descriptors']}")
    if options.json is not None:
        config = {"steps": options.steps} | growth
        result = Result("soak", "a deformable stem and offloaded layers", config, samples)
        write_json(result, options.json, "python -m benchmarks.checks.soak")
    return int(has_grown(growth, options.max_mib))


if __name__ == "__main__":
    sys.exit(main())
