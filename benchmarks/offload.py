"""A training step of a language model in device memory, recomputed, and offloaded.

Times whole steps, and gradients alone, whose bits are compared; plans the memory of whole steps by
the number of layers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from effjax import offload_jit, to_device

from .measure import TARGET, need_compiler, plan_steps, relative_difference, time_in_turn
from .offload_forms import (
    FORMS,
    FUSED,
    FUSED_IN_MEMORY,
    IN_MEMORY,
    OFFLOADED,
    OURS,
    PEERS,
    REMAT,
    Setting,
    abstract_step,
    gradients_of,
    make_params,
    planned_bytes,
    step_of,
)
from .results import Curves, Result, Size, num_threads

ROUNDS = 5
CHECKED_STEPS = 3
TIMED: dict[Size, Setting] = {
    "small": Setting(layers=4, width=64, heads=4, context=64, batch_size=4, dropout=0.0),
    "published": Setting(layers=8, width=256, heads=4, context=256, batch_size=8, dropout=0.1),
}
PLANNED = Setting(width=1024, heads=16, batch_size=8, context=512, dropout=0.0)
BASIC = (IN_MEMORY, REMAT, FUSED_IN_MEMORY, "activations offloaded", OFFLOADED, FUSED)


def measure_steps(setting: Setting, names: Sequence[str], rounds: int = ROUNDS) -> Result:
    """Time whole training steps.

    "compile_seconds" is the time the first step takes beyond the second one.
    """
    tokens, key = setting.make_batch(), jax.random.key(2)
    runs: dict[str, Callable] = {}
    losses: dict[str, list[float]] = {}
    compile_seconds: dict[str, float] = {}
    for name in names:
        init, step = step_of(setting, FORMS[name])
        run = _make_run(offload_jit(step), init(*make_params(setting, FORMS[name].layers)), tokens)
        losses[name], seconds = [], []
        for i in range(CHECKED_STEPS):
            start = time.perf_counter()
            _, loss = run(jax.random.fold_in(key, i))
            losses[name].append(float(loss))
            seconds.append(time.perf_counter() - start)
        runs[name] = functools.partial(run, key)
        compile_seconds[name] = round(seconds[0] - seconds[1], 2)
    rows = time_forms(setting, runs, rounds)
    for row in rows:
        name = row["name"]
        row |= {"losses": losses[name], **compare_results(name, losses)}
        row["compile_seconds"] = compile_seconds[name]
    return make_result("step", setting, rows, rounds)


def _make_run(step: Callable, state: Any, tokens: jax.Array) -> Callable:
    """Return a function of the key that takes one step after the other."""

    def run(key: jax.Array) -> tuple[Any, jax.Array]:
        nonlocal state
        state, loss, *_ = step(state, tokens, key)
        return state, loss

    return run


def measure_gradients(setting: Setting, names: Sequence[str], rounds: int = ROUNDS) -> Result:
    """Time loss and gradients, and compare their bits."""
    tokens, key = setting.make_batch(), jax.random.key(2)
    on_host, others = make_params(setting, "host")
    layers = {"host": on_host, "device": to_device(on_host)}
    runs, results = {}, {}
    for name in names:
        form = FORMS[name]
        compiled = offload_jit(gradients_of(setting, form), donate=False)
        runs[name] = functools.partial(compiled, layers[form.layers], others, tokens, key)
        results[name] = jax.tree.map(np.asarray, runs[name]())
    rows = [
        row | compare_results(row["name"], results) for row in time_forms(setting, runs, rounds)
    ]
    return make_result("gradients", setting, rows, rounds)


def time_forms(setting: Setting, runs: dict[str, Callable], rounds: int) -> list[dict]:
    times = time_in_turn(runs, reference=next(iter(runs)), rounds=rounds)
    num_tokens = setting.batch_size * setting.context
    return [
        {"name": name, **row, "tokens_per_second": round(num_tokens / row["seconds"])}
        for name, row in times.items()
    ]


def compare_results(name: str, results: dict[str, Any]) -> dict:
    """Compare with the first form, and with the first that recomputes its layers.

    XLA may round differently what it computes again, and does so alike for remat and offload.
    """

    def same_bits(other: str) -> bool:
        pairs = zip(jax.tree.leaves(results[name]), jax.tree.leaves(results[other]), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    first = next(iter(results))
    return {
        "compared_with": first,
        "difference": relative_difference(results[name], results[first]),
        "bit_identical": same_bits(first),
        "bit_identical_to_remat": same_bits(REMAT) if REMAT in results else None,
    }


def make_result(table: str, setting: Setting, rows: list[dict], rounds: int) -> Result:
    config = dataclasses.asdict(setting) | {"rounds": rounds, "threads": num_threads()}
    names = [row["name"] for row in rows]
    return Result(
        f"offload_{table}_{setting.layers}x{setting.width}_{setting.dtype}",
        f"language model, {table}, {setting.layers} layers, {describe(setting)}",
        config | {"reference": names[0], "ours": [name for name in names if name in OURS]},
        rows,
        notes=["On a CPU, host and device memory are the same."],
    )


def plan_depths(
    setting: Setting, names: Sequence[str], depths: Sequence[int], target: str = TARGET
) -> Result:
    """Plan whole steps by the number of layers."""
    rows = []
    for layers in depths:
        model = dataclasses.replace(setting, layers=layers)
        plans = plan_steps({name: abstract_step(model, FORMS[name]) for name in names}, target)
        rows += [{"layers": layers, "name": n} | planned_bytes(p) for n, p in plans.items()]
    config = dataclasses.asdict(setting) | {"target": target}
    del config["layers"]
    return Result(
        f"offload_{setting.optimizer}_{setting.width}_{setting.dtype}_{target}",
        f"language model, steps with {setting.optimizer} planned for {target}, {describe(setting)}",
        config | {"ours": [name for name in names if name in OURS]},
        rows,
        Curves("layers", "planned_device_bytes", "planned device memory of a step [GB]", 1e9),
    )


def describe(setting: Setting) -> str:
    return (
        f"width {setting.width}, context {setting.context}, batch {setting.batch_size}, "
        f"{setting.dtype}"
    )


def run(size: Size) -> Iterator[Result]:
    setting = TIMED[size]
    yield measure_steps(setting, [*PEERS, *(name for name in BASIC if name in OURS)])
    yield measure_gradients(setting, [IN_MEMORY, REMAT, "activations offloaded", OFFLOADED])
    need_compiler()
    if size == "published":
        yield plan_depths(PLANNED, BASIC, (4, 8, 16, 32))
        sgd = dataclasses.replace(PLANNED, optimizer="sgd")
        yield plan_depths(sgd, (IN_MEMORY, REMAT, FUSED_IN_MEMORY), (8, 32))
    else:
        yield plan_depths(
            dataclasses.replace(PLANNED, width=256), (IN_MEMORY, REMAT, FUSED), (2, 8)
        )
