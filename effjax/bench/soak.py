"""Many steps of a small model with a deformable stem and offloaded layers: what grows meanwhile."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console
from rich.table import Table

import effjax

from ._result import write_record

SIDE, CHANNELS, LAYERS, CLASSES, BATCH = 8, 8, 3, 5, 8
TAPS = 9
EVERY = 500  # steps from one sample to the next
WARM_UP = 0.1  # of the steps, in which allocators find their size
COMPILATION = "/jax/core/compile/backend_compile_duration"  # an event of JAX's


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


def make() -> tuple[Callable, Any]:
    """A compiled step, and its state: layers and their moments on the host, updated there."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.1

    others = {
        "offset": drawn(3, 3, 3, 2 * TAPS), "kernel": drawn(3, 3, 3, CHANNELS),
        "classes": drawn(CHANNELS, CLASSES),
    }  # fmt: skip
    layers = {name: drawn(LAYERS, CHANNELS, CHANNELS) for name in "ab"}
    init, step = effjax.offload_train_step(embed, layer, head, optax.adam(1e-3))
    return effjax.offload_jit(step), init(effjax.to_host(layers), others)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """New arrays for ever."""
    rng = np.random.default_rng(0)
    while True:
        labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        noise = rng.normal(size=(BATCH, SIDE, SIDE, 3)) + labels[:, None, None, None]
        yield noise.astype(np.float32), labels


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of each one meanwhile, as JAX tells them."""
    found: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILATION:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def soak(steps: int, every: int = EVERY) -> dict[str, Any]:
    """Takes so many steps, and samples this process after each `every` of them.

    Returns what grew after the warm-up: resident bytes a step by least squares, compilations,
    descriptors; the samples, the losses and the seconds.
    """
    run, state = make()
    data, key = batches(), jax.random.key(1)
    samples: list[dict[str, Any]] = []
    began = time.perf_counter()
    with compilations() as compiled:
        for step in range(1, steps + 1):
            state, loss = run(state, next(data), jax.random.fold_in(key, step))
            if step % every == 0:
                gc.collect()
                samples.append(
                    {
                        "step": step, "loss": round(float(loss), 4), "compiled": len(compiled),
                        "resident_bytes": resident_bytes(), "descriptors": descriptors(),
                    }
                )  # fmt: skip
    warm = [sample for sample in samples if sample["step"] >= WARM_UP * steps]
    x, y = (np.array([sample[name] for sample in warm]) for name in ("step", "resident_bytes"))
    first, last = warm[0], warm[-1]
    return {
        "bytes_a_step": round(float(np.polyfit(x, y, 1)[0]), 1),
        "compilations": last["compiled"] - first["compiled"],
        "descriptors": last["descriptors"] - first["descriptors"],
        "seconds": round(time.perf_counter() - began, 1),
        "samples": samples,
    }


def main(
    steps: Annotated[int, typer.Option(help="How many.")] = 20_000,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Takes the steps, and says whether memory, compilations or open files grew after a tenth."""
    found = soak(steps, min(EVERY, max(steps // 20, 1)))
    table = Table(title=f"{steps} steps, after the first {WARM_UP:.0%} of them")
    table.add_column("what")
    table.add_column("grew by", justify="right")
    megabytes = found["bytes_a_step"] * 1000 / 2**20
    table.add_row("resident memory in 1,000 steps", f"{megabytes:.3f} MiB")
    table.add_row("programs compiled", str(found["compilations"]))
    table.add_row("descriptors open", str(found["descriptors"]))
    table.add_row("seconds", f"{found['seconds']:.0f}")
    Console().print(table)
    if json is not None:
        rows = found.pop("samples")
        title = "a deformable stem and offloaded layers"
        write_record(json / "soak.json", title, {"steps": steps} | found, rows)
    if megabytes >= 1 or found["compilations"] or found["descriptors"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
