"""A whole training step of a DenseNet-BC, timed and planned.

The forms are those of `effjax memory`: Flax's BatchNorm, the same with ``jax.checkpoint`` on every
layer, and effjax's. PyTorch, plain and checkpointed, is timed if it is installed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effjax.train.images.config import DenseNetConfig
from effjax.train.images.forms import training_steps

from . import pytorch
from .planning import TARGET, need_compiler, plan_rows
from .results import Bars, Result, Size
from .timing import compile_program, num_threads, relative_difference, time_in_turn

REFERENCE = "plain"
GROWTH_RATE = 12
ROUNDS = 5
# Depth, batch size and image size of the timed network.
TIMED: dict[Size, tuple[int, int, int]] = {"small": (22, 8, 16), "published": (40, 64, 32)}
# Depth of the planned network, at batch 64 of 32x32 images as in Pleiss et al. 2017.
PLANNED: dict[Size, int] = {"small": 22, "published": 100}


def make_steps(depth: int, batch_size: int, image_size: int) -> dict[str, tuple]:
    """Return `(fn, *shapes)` of steps of SGD with momentum by name."""
    config = DenseNetConfig(depth=depth, growth_rate=GROWTH_RATE, batch_size=batch_size)
    return training_steps(config, (image_size, image_size, 3), num_classes=10)(batch_size)


def fill(shapes: Any) -> Any:
    """Return small positive numbers in place of shapes, and zeros in place of integers."""
    rng = np.random.default_rng(0)

    def array(a: Any) -> jax.Array:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            return jnp.asarray(0.02 * np.abs(rng.normal(size=a.shape)), a.dtype)
        return jnp.zeros(a.shape, a.dtype)

    return jax.tree.map(array, shapes)


def make_stepper(compiled: Callable, state: Any, others: list[Any]) -> Callable[[], Any]:
    """Return a function that takes one step after the other; the state is donated."""

    def step() -> Any:
        nonlocal state
        state, metrics = compiled(state, *others)
        return metrics

    return step


def measure_steps(depth: int, batch_size: int, image_size: int, rounds: int = ROUNDS) -> Result:
    runs, losses, compiler = {}, {}, {}
    for name, (fn, *shapes) in make_steps(depth, batch_size, image_size).items():
        state, *others = fill(shapes)
        compiled, compiler[name] = compile_program(fn, state, *others)
        runs[name] = make_stepper(compiled, state, others)
        losses[name] = runs[name]()
    notes = [
        '"plain" and "jax.checkpoint" have Flax\'s BatchNorm. The difference is that of the '
        "first step's loss; PyTorch draws its own weights."
    ]
    if missing := pytorch.missing("torch"):
        notes.append(missing)
    else:
        runs |= pytorch.densenet_steps(depth, batch_size, image_size, GROWTH_RATE)
    times = time_in_turn(runs, reference=REFERENCE, rounds=rounds)
    rows = []
    for name in runs:
        row = {"name": name, **times[name]}
        if name in losses:
            row |= compiler[name]
            row["difference"] = relative_difference(losses[name], losses[REFERENCE])
        rows.append(row)
    config = {"depth": depth, "batch_size": batch_size, "image_size": image_size}
    return Result(
        f"densenet_{depth}",
        f"training step of DenseNet-BC-{depth} (k = 12), batch {batch_size} of "
        f"{image_size}x{image_size}",
        config | {"rounds": rounds, "threads": num_threads(), "reference": REFERENCE},
        rows,
        notes=notes,
    )


def plan_network(depth: int, batch_size: int = 64, target: str = TARGET) -> Result:
    return Result(
        f"memory_densenet_{depth}_{target}",
        f"step of DenseNet-BC-{depth} (k = 12), batch {batch_size} of 32x32, planned for {target}",
        {"depth": depth, "batch_size": batch_size, "target": target},
        plan_rows(make_steps(depth, batch_size, 32), target),
        Bars("peak_bytes", "peak of a training step [bytes]"),
    )


def run(size: Size) -> Iterator[Result]:
    yield measure_steps(*TIMED[size])
    need_compiler()
    yield plan_network(PLANNED[size])
