"""The planner's own time by depth.

It plans a dense block, whose layers all differ, and a language model, whose layers are one loop.
"""

import time
from collections.abc import Iterator, Sequence

import jax

from effjax.memory import plan

from .dense_block import BLOCKS, step_shapes, train_step
from .measure import TARGET, need_compiler
from .offload_forms import FORMS, REMAT, Setting, abstract_step
from .results import Curves, Result, Size, num_threads

BLOCK = 'effjax save="features"'
# Depths of the block and of the language model.
DEPTHS: dict[Size, tuple[Sequence[int], Sequence[int]]] = {
    "small": ((3, 6, 12), (2, 8, 32)),
    "published": ((6, 12, 24, 48), (4, 16, 64)),
}


def block_step(layers: int) -> tuple:
    return train_step(BLOCKS[BLOCK]), *step_shapes(layers, 64)


def language_model_step(layers: int) -> tuple:
    setting = Setting(layers=layers, width=256, heads=4, dropout=0.0)
    return abstract_step(setting, FORMS[REMAT])


def measure_plans(blocks: Sequence[int], models: Sequence[int], target: str = TARGET) -> Result:
    programs = [(f"dense block, {BLOCK}", n, block_step) for n in blocks]
    programs += [("language model, a scan", n, language_model_step) for n in models]
    rows = []
    for name, layers, make_step in programs:
        fn, *args = make_step(layers)
        start = time.perf_counter()
        jax.jit(fn).trace(*args)
        traced = time.perf_counter()
        # A new function, so that the plan traces it again.
        planned = plan(*make_step(layers), target=target)
        rows.append(
            {
                "name": name,
                "layers": layers,
                "trace_seconds": round(traced - start, 2),
                "plan_seconds": round(time.perf_counter() - traced, 2),
                "peak_bytes": planned.peak_device_bytes,
            }
        )
    return Result(
        f"planner_{target}",
        f"the planner's own time by depth, for {target}",
        {"target": target, "threads": num_threads()},
        rows,
        Curves("layers", "plan_seconds", "seconds of a plan, tracing included"),
        ["Tracing runs in Python; the rest is XLA's compiler, in a separate process."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    yield measure_plans(*DEPTHS[size])
