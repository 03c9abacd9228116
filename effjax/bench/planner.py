"""What the planner itself takes, by the depth of what it plans: a dense block, whose layers are all
different, and a language model, whose layers are one loop."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from ..memory.plan import prepare
from ._measure import threads
from ._offload_forms import REMAT, Setting, forms_of
from ._result import Curves, Result, Size, need_compiler, publish
from .dense_block import BLOCKS, init, train_step
from .offload import abstract_step

OURS = 'effjax save="features"'
SIZES = {"small": ((3, 6, 12), (2, 8, 32)), "published": ((6, 12, 24, 48), (4, 16, 64))}


def block(layers: int, form: str) -> tuple:
    """`(fn, *args)` of a dense block on 32x32 maps at batch 64."""
    shape = 64, 32, 32
    x, weights = (jax.ShapeDtypeStruct((*shape, c), "float32") for c in (24, 24 + 12 * layers))
    return train_step(BLOCKS[form]), jax.eval_shape(lambda: init(layers, 12, 24)), x, weights


def language_model(layers: int) -> tuple:
    """`(fn, *args)` of a language model's step, its layers recomputed in a scan."""
    setting = Setting(width=256, heads=4, dropout=0.0)
    return abstract_step(dataclasses.replace(setting, layers=layers), forms_of(1)[REMAT], True)


def bench(blocks: Sequence[int], models: Sequence[int], target: str) -> Result:
    """A row a program and depth; nothing else is running in this process."""
    programs = [(f"dense block, {OURS}", n, lambda n=n: block(n, OURS)) for n in blocks]
    programs += [("language model, a scan", n, lambda n=n: language_model(n)) for n in models]
    rows = []
    for name, layers, make in programs:
        start = time.perf_counter()
        finish = prepare(*make(), target=target)
        traced = time.perf_counter()
        found = finish()
        rows.append(
            {
                "name": name,
                "layers": layers,
                "trace_seconds": round(traced - start, 2),
                "plan_seconds": round(time.perf_counter() - start, 2),
                "peak_bytes": found.peak_device_bytes,
            }
        )
    return Result(
        f"planner_{target}",
        f"the planner's own time by depth, for {target}",
        {"target": target, "threads": threads()},
        rows,
        Curves("layers", "plan_seconds", "seconds of a plan, tracing included"),
        ["Tracing is Python's and JAX's; the rest is XLA's compiler, in a process of its own."],
    )


def results(size: Size) -> Iterator[Result]:
    need_compiler()
    blocks, models = SIZES[size]
    yield bench(blocks, models, "h200")


def main(
    blocks: Annotated[list[int], typer.Option(help="Depths of the block.")] = [6, 12, 24],  # noqa: B006
    models: Annotated[list[int], typer.Option(help="Depths of the model.")] = [4, 16, 64],  # noqa: B006
    target: str = "h200",
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Times plans of a dense block and of a language model by their depth."""
    publish(bench(blocks, models, target), json)


if __name__ == "__main__":
    typer.run(main)
