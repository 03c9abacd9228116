"""A whole training step of a DenseNet-BC in the forms of `effjax memory`: with Flax's BatchNorm,
that under ``jax.checkpoint`` layer by layer, effjax's, and PyTorch's, plain and checkpointed, where
that is importable; in one process, in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..train.images.config import Config
from ..train.images.forms import training_steps
from . import _torch
from ._measure import compile_step, difference, threads, time_in_turn
from ._result import Result, Size, publish
from .h200_models import fill

REFERENCE = "plain"
SIZES = {"small": (22, 8, 16), "published": (40, 64, 32)}  # depth, batch size, image size


def bench(depth: int, batch_size: int, image_size: int, rounds: int) -> Result:
    """Times steps of SGD with momentum."""
    config = Config(depth=depth, growth_rate=12, batch_size=batch_size)
    steps = training_steps(config, (image_size, image_size, 3), num_classes=10)(batch_size)
    compiled, losses, runs = {}, {}, {}
    for name, (fn, *shapes) in steps.items():
        state, *others = fill(shapes)
        compiled[name] = compile_step(fn, state, *others)
        runs[name] = _stepping(compiled[name]["run"], state, others)
        losses[name] = runs[name]()
    torch, why = _torch.find("torch")
    if torch is not None:
        runs |= _torch.densenet_steps(depth, batch_size, image_size)
    times = time_in_turn(runs, reference=REFERENCE, rounds=rounds)
    rows = [
        {"name": name, **times[name], "temp_bytes": found["temp_bytes"]}
        | {"compile_seconds": found["compile_seconds"]}
        | {"difference": float(f"{difference(losses[name], losses[REFERENCE]):.1e}")}
        for name, found in compiled.items()
    ]
    rows += [{"name": name, **times[name]} for name in runs if name not in compiled]
    return Result(
        f"densenet_{depth}",
        f"training step of DenseNet-BC-{depth} (k = 12), batch {batch_size} of "
        f"{image_size}x{image_size}",
        {
            "depth": depth, "batch_size": batch_size, "image_size": image_size,
            "rounds": rounds, "threads": threads(), "reference": REFERENCE,
        },
        rows,
        notes=[
            '"plain" and "jax.checkpoint" have Flax\'s BatchNorm. The difference is that of the '
            "first step's loss; PyTorch draws weights of its own.",
            *([f"Without PyTorch: {why}."] if torch is None else []),
        ],
    )  # fmt: skip


def _stepping(run: Callable, state: Any, others: list[Any]) -> Callable[[], Any]:
    """A function that takes one step after the other; the state is donated."""

    def step() -> Any:
        nonlocal state
        state, metrics = run(state, *others)
        return metrics

    return step


def results(size: Size) -> Iterator[Result]:
    yield bench(*SIZES[size], rounds=5)


def main(
    depth: Annotated[int, typer.Option(help="6n + 4.")] = 40,
    batch_size: int = 64,
    image_size: int = 32,
    rounds: Annotated[int, typer.Option(help="Timed steps of each form, in turn.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Times training steps of a DenseNet in every form."""
    publish(bench(depth, batch_size, image_size, rounds), json)


if __name__ == "__main__":
    typer.run(main)
