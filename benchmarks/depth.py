"""Memory of a dense block by its depth: bytes kept for the backward pass, and planned peaks.

The first table counts autodiff's arrays and needs no compiler. The exponent is p in
``bytes = a · depth^p``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from effjax.memory import residual_bytes

from . import pytorch
from .dense_block import BLOCKS, CHANNELS, GROWTH_RATE, step_shapes, train_step
from .measure import TARGET, fit_exponent, need_compiler, plan_training
from .results import Curves, Result, Size

BATCH_SIZE = 64
CONFIG = {
    "batch_size": BATCH_SIZE,
    "growth_rate": GROWTH_RATE,
    "channels": CHANNELS,
    "image_size": 32,
}


def add_exponents(rows: list[dict], key: str) -> None:
    """Add the exponent of each program's growth to its last row."""
    for name in dict.fromkeys(row["name"] for row in rows):
        of_program = [row for row in rows if row["name"] == name]
        if len(of_program) > 1:
            layers, values = ([row[k] for row in of_program] for k in ("layers", key))
            of_program[-1]["exponent"] = fit_exponent(layers, values)


def count_kept(depths: Sequence[int], batch_size: int = BATCH_SIZE) -> Result:
    """Count the bytes autodiff keeps between forward and backward pass."""
    counts: dict[str, Callable[[Any, Any], int]] = {
        name: lambda params, x, block=block: residual_bytes(block, x, params).bytes
        for name, block in BLOCKS.items()
    }
    notes = ["Counted from shapes, parameters included; nothing runs. XLA may keep less."]
    if missing := pytorch.missing("torch"):
        notes.append(missing)
    else:
        counts |= pytorch.KEPT_BYTES
    rows = []
    for name, count in counts.items():
        for layers in depths:
            params, x, _ = step_shapes(layers, batch_size)
            rows.append({"name": name, "layers": layers, "kept_bytes": count(params, x)})
    add_exponents(rows, "kept_bytes")
    return Result(
        "depth_kept",
        f"kept for the backward pass of a dense block, batch {batch_size} of 32x32, growth rate 12",
        CONFIG | {"batch_size": batch_size},
        rows,
        Curves("layers", "kept_bytes", "kept for the backward pass [MB]", 1e6),
        notes,
    )


def plan_depths(
    depths: Sequence[int],
    batch_size: int = BATCH_SIZE,
    target: str = TARGET,
    names: Sequence[str] = tuple(BLOCKS),
) -> Iterator[Result]:
    """Plan the peak of a training step: a table per depth, and one of all depths."""
    config = CONFIG | {"batch_size": batch_size}
    all_rows = []
    for layers in depths:
        args = step_shapes(layers, batch_size)
        result = plan_training(
            f"memory_block_{layers}",
            f"step of a dense block of {layers} layers, batch {batch_size}",
            config | {"layers": layers},
            {name: (train_step(BLOCKS[name]), *args) for name in names},
            target,
        )
        all_rows += [row | {"layers": layers} for row in result.rows]
        yield result
    for row in all_rows:
        del row["ratio"]  # to the first program of the same depth
    all_rows.sort(key=lambda row: names.index(row["name"]))
    add_exponents(all_rows, "peak_bytes")
    yield Result(
        f"depth_planned_{target}",
        f"peak of a step of a dense block, batch {batch_size} of 32x32, planned for {target}",
        config | {"target": target},
        all_rows,
        Curves("layers", "peak_bytes", "peak of a training step [MB]", 1e6),
    )


def run(size: Size) -> Iterator[Result]:
    yield count_kept((12, 24, 48, 96))
    need_compiler()
    yield from plan_depths((12, 24, 48) if size == "published" else (3, 6, 12))
