"""Device memory of training steps on a GPU that need not be there: effjax beside its peers.

DenseNet-BC blocks of several depths in every form of `effjax.bench.dense_block`, and
DenseNet-BC-100 (k = 12) in the forms of `effjax memory`, at the batch of 64 of Pleiss et al. 2017.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from ..memory import Comparison, compare
from ..memory.compare import plan_all
from ..train.images.config import Config
from ..train.images.forms import training_steps
from ._result import write_record
from .dense_block import BLOCKS, init, train_step

DEPTHS = [12, 24, 48]


def plan_block(
    layers: int, batch_size: int, target: str, names: Sequence[str] | None = None
) -> Comparison:
    """A block on 32x32 maps, growth rate 12, 24 channels in, float32; in all forms, or these."""
    params = jax.eval_shape(lambda: init(layers, 12, 24))
    shape = (batch_size, 32, 32)
    x = jax.ShapeDtypeStruct((*shape, 24), "float32")
    weights = jax.ShapeDtypeStruct((*shape, 24 + 12 * layers), "float32")
    steps = {name: train_step(block) for name, block in BLOCKS.items()}
    steps = {name: steps[name] for name in names or steps}
    return compare(steps, params, x, weights, target=target, progress=True)


def plan_densenet(depth: int, batch_size: int, target: str) -> Comparison:
    """The whole network on 32x32 images, growth rate 12, with its SGD step."""
    config = Config(depth=depth, growth_rate=12)
    steps = training_steps(config, (32, 32, 3), num_classes=10)(batch_size)
    return plan_all(steps, target=target, progress=True)


def main(
    layers: Annotated[
        list[int], typer.Option(help="Of the block; each depth is a table.")
    ] = DEPTHS,
    depth: Annotated[int, typer.Option(help="Of the DenseNet, 6n + 4; 0 for none.")] = 100,
    batch_size: int = 64,
    target: str = "h200",
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Plans blocks and a DenseNet in every form."""
    tables: list[tuple[str, Callable, int]] = [(f"block_{n}", plan_block, n) for n in layers]
    if depth:
        tables.append((f"densenet_{depth}", plan_densenet, depth))
    for name, plan_table, size in tables:
        plans = plan_table(size, batch_size, target)
        print(f"{name}, batch {batch_size}, compiled for {target}\n{plans}\n")
        if json:
            config = {"target": target, "batch_size": batch_size}
            write_record(json / f"memory_{name}_{target}.json", name, config, rows_of(plans))


def rows_of(plans: Comparison) -> list[dict]:
    first = next(iter(plans.values())).peak_device_bytes
    return [
        {
            "name": form,
            "peak_bytes": plan.peak_device_bytes,
            "temp_bytes": plan.device.temporaries,
            "ratio": round(plan.peak_device_bytes / first, 4),
        }
        for form, plan in plans.items()
    ]


if __name__ == "__main__":
    typer.run(main)
