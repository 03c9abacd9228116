"""The memory of a dense block by its depth, and how fast it grows, in every form.

Two tables: what is kept for the backward pass, which is a count and needs no compiler; and the peak
of a training step, planned for a GPU. The exponent is that of ``bytes = a · depth^p``.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from ..memory import residual_bytes
from . import _torch
from ._measure import exponent
from ._result import Curves, Result, Size, need_compiler, publish
from .dense_block import BLOCKS, init
from .memory import plan_block

DEPTHS = [12, 24, 48, 96]
BATCH_SIZE = 64
PLANNED = (
    "plain autodiff", "jax.checkpoint a layer", "jax.checkpoint pass-through", 'effjax save="conv"',
    'effjax save="features"',
)  # fmt: skip


def shapes(layers: int, batch_size: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A block on 32x32 maps, growth rate 12, 24 channels in, float32."""
    x = jax.ShapeDtypeStruct((batch_size, 32, 32, 24), "float32")
    return jax.eval_shape(lambda: init(layers, 12, 24)), x


def with_exponents(rows: list[dict], key: str) -> list[dict]:
    """How fast the bytes of each form grow, in its last row."""
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        if len(own) > 1:
            own[-1]["exponent"] = exponent([r["layers"] for r in own], [r[key] for r in own])
    return rows


def kept(depths: Sequence[int], batch_size: int) -> Result:
    """What autodiff keeps between forward and backward pass."""
    forms: dict[str, Callable[[Any, Any], int]] = {
        name: lambda params, x, block=block: residual_bytes(block, x, params).bytes
        for name, block in BLOCKS.items()
    }
    torch, why = _torch.find("torch")
    if torch is not None:
        for name in (_torch.PLAIN, _torch.EFFICIENT):
            forms[name] = lambda params, x, efficient=name == _torch.EFFICIENT: (
                _torch.block_kept_bytes(params, x, efficient)
            )
    rows = [
        {"name": name, "layers": layers, "kept_bytes": count(*shapes(layers, batch_size))}
        for name, count in forms.items()
        for layers in depths
    ]
    notes = ["Counted from shapes, parameters included; nothing is run. XLA may keep less."]
    if torch is None:
        notes.append(f"Without PyTorch: {why}.")
    return Result(
        "depth_kept",
        f"kept for the backward pass of a dense block, batch {batch_size} of 32x32, growth rate 12",
        {"batch_size": batch_size, "growth_rate": 12, "channels": 24, "image_size": 32},
        with_exponents(rows, "kept_bytes"),
        Curves("layers", "kept_bytes", "kept for the backward pass [MB]", 1e6),
        notes,
    )


def planned(depths: Sequence[int], batch_size: int, target: str) -> Result:
    """The peak of a training step on a GPU that need not be there."""
    rows = []
    for layers in depths:
        plans = plan_block(layers, batch_size, target, PLANNED)
        rows += [
            {"name": name, "layers": layers, "peak_bytes": found.peak_device_bytes}
            | {"temp_bytes": found.device.temporaries}
            for name, found in plans.items()
        ]
    rows.sort(key=lambda row: PLANNED.index(row["name"]))
    return Result(
        f"depth_planned_{target}",
        f"peak of a step of a dense block, batch {batch_size} of 32x32, planned for {target}",
        {"target": target, "batch_size": batch_size, "growth_rate": 12, "image_size": 32},
        with_exponents(rows, "peak_bytes"),
        Curves("layers", "peak_bytes", "peak of a training step [MB]", 1e6),
    )


def both(depths: Sequence[int], compiled: Sequence[int], target: str) -> Iterator[Result]:
    """`compiled`: the depths that are planned, which takes longest."""
    yield kept(depths, BATCH_SIZE)
    if compiled:
        need_compiler()
        yield planned(compiled, BATCH_SIZE, target)


def results(size: Size) -> Iterator[Result]:
    yield from both(DEPTHS, DEPTHS if size == "published" else (6, 12, 24), "h200")


def main(
    layers: Annotated[list[int], typer.Option(help="Depths of the block.")] = DEPTHS,
    compiled: Annotated[list[int], typer.Option(help="Those that are planned too.")] = [12, 24],  # noqa: B006
    target: str = "h200",
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Counts and plans the memory of a dense block by its depth."""
    for result in both(layers, compiled, target):
        publish(result, json)


if __name__ == "__main__":
    typer.run(main)
