"""A training step of a language model whose layers live in host memory, beside the same in device
memory, plain, recomputed by ``jax.checkpoint`` and updated in the backward pass.

Two tables: whole steps, and gradients alone, which must be equal to the bit. On a GPU
they also say what the process has held of its memory; where the GPU compiler is installed, what the
planner expects of `--target`. `--depths` times nothing: it plans steps of models so deep.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import OffloadState, offload_jit, to_device
from ..memory import MemoryPlan, PlanError, check_compiler
from ..memory.compare import plan_all
from ._measure import difference, threads, time_in_turn
from ._offload_forms import (
    FUSED,
    IN_MEMORY,
    REMAT,
    Form,
    Setting,
    forms_of,
    gradients_of,
    make_params,
    peers,
    split,
    step_of,
)
from ._result import Curves, Result, Size, need_compiler, publish

PASSES = ["step", "gradients"]
CHECKED_STEPS = 3


def abstract_step(setting: Setting, form: Form, whole: bool) -> tuple:
    """`(fn, *args)` of the whole step, or of the gradients alone, for the planner."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, where: str) -> Any:
        kind = "pinned_host" if where == "host" else None
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
        )

    def place_state(tree: Any, where: str) -> Any:
        return jax.tree.map(lambda a: place(a, where if a.ndim > 1 else "device"), tree)

    layers, others = split(setting.model)
    params = place(layers, form.layers), place(others, "device")
    rest = place(setting.tokens, "device"), jax.random.key(2)
    if not whole:
        return offload_jit(gradients_of(setting, form), donate=False), *params, *rest
    step, init = offload_jit(step_of(setting, form).step), setting.tx.init
    if form.moments:
        moments = jax.eval_shape(init, (layers, others))
        return step, (params, place_state(moments, form.moments)), *rest
    states = jax.eval_shape(jax.vmap(init), layers), jax.eval_shape(init, others)
    layers_state = place_state(states[0], form.layers)
    return step, OffloadState(*params, layers_state, place(states[1], "device")), *rest


def plan_forms(setting: Setting, forms: dict[str, Form], whole: bool, target: str) -> dict:
    """Plans of the whole step, or of the gradients alone, by form."""
    steps = {name: abstract_step(setting, form, whole) for name, form in forms.items()}
    return plan_all(steps, progress=True, target=target)


def planned_bytes(plan: MemoryPlan) -> dict[str, int]:
    return {
        "planned_device_bytes": plan.peak_device_bytes,
        "planned_device_temp_bytes": plan.device.temporaries,
        "planned_host_bytes": plan.host.total,
    }


def bench_steps(setting: Setting, forms: dict[str, Form], rounds: int) -> list[dict]:
    """A row a form: whole training steps.

    "device_peak_bytes" is what the process has held on a GPU at most, read after the form's first
    steps. Forms that need least come first: it is their own, unless less than that of one before.
    "compile_seconds" is by what the first step takes longer than the second.
    """
    tokens, key = setting.batch(), jax.random.key(2)
    steps = {name: step_of(setting, form) for name, form in forms.items()}
    compiled = {name: offload_jit(found.step) for name, found in steps.items()}
    start = {n: lambda n=n: steps[n].init(*make_params(setting, forms[n].layers)) for n in forms}
    losses, peaks, states, first = {}, {}, {}, {}
    for name in reversed(forms):
        state, losses[name], ends = start[name](), [], [time.perf_counter()]
        for i in range(CHECKED_STEPS):
            state, loss = compiled[name](state, tokens, jax.random.fold_in(key, i))
            losses[name].append(float(loss))
            ends.append(time.perf_counter())
        first[name] = round((ends[1] - ends[0]) - (ends[2] - ends[1]), 2)
        peaks[name] = _device_peak_bytes()
        del state

    # Forms that have the same state take turns with it.
    def run(name: str) -> Any:
        kind = forms[name].layers, forms[name].moments
        if kind not in states:
            states[kind] = start[name]()
        states[kind], loss = compiled[name](states[kind], tokens, key)
        return states[kind], loss

    runs = {name: functools.partial(run, name) for name in forms}
    times = _timed(setting, runs, rounds)
    return [
        {"name": name, **times[name], "losses": losses[name]}
        | _compared(forms, name, losses)
        | {"device_peak_bytes": peaks[name], "compile_seconds": first[name]}
        for name in forms
    ]


def bench_gradients(setting: Setting, forms: dict[str, Form], rounds: int) -> list[dict]:
    """A row a form: loss and gradients."""
    tokens, key = setting.batch(), jax.random.key(2)
    on_host, others = make_params(setting, "host")
    layers = {"host": on_host, "device": to_device(on_host)}
    runs, results = {}, {}
    for name, form in forms.items():
        compiled = offload_jit(gradients_of(setting, form), donate=False)
        runs[name] = functools.partial(compiled, layers[form.layers], others, tokens, key)
        results[name] = jax.tree.map(np.asarray, runs[name]())
    times = _timed(setting, runs, rounds)
    return [{"name": n, **times[n]} | _compared(forms, n, results) for n in forms]


def _timed(setting: Setting, runs: dict[str, Callable], rounds: int) -> dict[str, dict]:
    """In turn, beside the first of them."""
    number = setting.batch_size * setting.context
    times = time_in_turn(runs, reference=next(iter(runs)), rounds=rounds)
    return {n: t | {"tokens_per_second": round(number / t["seconds"])} for n, t in times.items()}


def _compared(forms: dict[str, Form], name: str, results: dict[str, Any]) -> dict:
    """With the first form of the same microbatches, and so the same dropout.

    XLA may round differently what it computes again: remat and offload do so alike.
    """

    def same_bits(a: str, b: str) -> bool:
        pairs = zip(jax.tree.leaves(results[a]), jax.tree.leaves(results[b]), strict=True)
        return all(np.array_equal(x, y) for x, y in pairs)

    alike = [n for n, form in forms.items() if form.microbatches == forms[name].microbatches]
    remat = [n for n in alike if forms[n].remat]
    return {
        "compared_with": alike[0],
        "difference": float(f"{difference(results[name], results[alike[0]]):.1e}"),
        "bit_identical": same_bits(name, alike[0]),
        "bit_identical_to_remat": same_bits(name, remat[0]) if remat else None,
    }


def _device_peak_bytes() -> int | None:
    """None on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def plan_depths(
    setting: Setting, forms: dict[str, Form], depths: list[int], target: str
) -> list[dict]:
    """A row a depth and form: whole steps."""
    rows = []
    for depth in depths:
        plans = plan_forms(dataclasses.replace(setting, layers=depth), forms, True, target)
        rows += [{"layers": depth, "name": n} | planned_bytes(p) for n, p in plans.items()]
    return rows


def main(
    layers: int = Setting.layers,
    width: int = Setting.width,
    heads: int = Setting.heads,
    context: int = Setting.context,
    batch_size: int = Setting.batch_size,
    microbatches: Annotated[int, typer.Option(help="Of the offloaded forms.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the computation; parameters are float32.")] = (
        Setting.dtype
    ),
    dropout: float = Setting.dropout,
    optimizer: Literal["adam", "sgd"] = Setting.optimizer,
    only: Annotated[list[str], typer.Option(help="Names of forms; all by default.")] = [],  # noqa: B006
    passes: Annotated[list[str], typer.Option(help="The tables.")] = PASSES,
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    plan: Annotated[bool, typer.Option(help="Plan too, where the compiler is.")] = True,
    target: Annotated[str, typer.Option(help="The GPU to plan for.")] = "h200",
    depths: Annotated[list[int], typer.Option(help="Run nothing; plan steps so deep.")] = [],  # noqa: B006
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Times training steps in memory and offloaded in one run; or plans them by depth."""
    sizes = layers, width, heads, context, batch_size, microbatches, dtype, dropout
    setting = Setting(*sizes, optimizer)
    forms = forms_of(microbatches)
    for option, given, known in (("only", only, [*forms]), ("passes", passes, PASSES)):
        if unknown := set(given) - set(known):
            raise typer.BadParameter(f"--{option} {unknown.pop()!r} is not one of {known}")
    forms = {name: form for name, form in forms.items() if name in (only or forms)}
    if depths:
        publish(by_depth(setting, forms, depths, target), json)
        return
    for table in passes:
        whole = table == "step"
        chosen = {name: form for name, form in forms.items() if whole or not form.fuse_update}
        publish(bench(setting, chosen, table, rounds, target if plan else None), json)


def bench(
    setting: Setting, forms: dict[str, Form], table: str, rounds: int, target: str | None
) -> Result:
    """One table of `PASSES`, with what is planned for `target`, where its compiler is."""
    whole = table == "step"
    rows = (bench_steps if whole else bench_gradients)(setting, forms, rounds)
    if target and _can_plan():
        plans = plan_forms(setting, forms, whole, target)
        rows = [row | planned_bytes(plans[row["name"]]) for row in rows]
    config = dataclasses.asdict(setting) | {"target": target, "rounds": rounds}
    return Result(
        f"offload_{table}_{setting.layers}x{setting.width}_{setting.microbatches}_{setting.dtype}",
        f"language model, {table}, {setting.layers} layers, {size_of(setting)}",
        config
        | {"threads": threads(), "reference": next(iter(forms))}
        | {"ours": [name for name in forms if name not in peers()]},
        rows,
        notes=["The forms say which they are compared with; on a CPU host and device are one."],
    )


def size_of(setting: Setting) -> str:
    batch = f"batch {setting.batch_size} in {setting.microbatches}"
    return f"width {setting.width}, context {setting.context}, {batch}, {setting.dtype}"


SMALL = Setting(layers=4, width=64, heads=4, context=64, batch_size=4, dropout=0.0)
BY_DEPTH = Setting(width=1024, heads=16, batch_size=8, context=512, dropout=0.0)


def results(size: Size) -> Iterator[Result]:
    """Steps beside JAX's policies, gradients, and the memory by depth, where it can be planned."""
    setting = Setting() if size == "published" else SMALL
    known = forms_of(1)
    steps = peers() | {name: form for name, form in known.items() if name not in peers()}
    yield bench(setting, steps, "step", 5, None)
    gradients = {name: form for name, form in known.items() if not form.fuse_update}
    yield bench(setting, gradients, "gradients", 5, None)
    need_compiler()
    if size == "published":
        yield by_depth(BY_DEPTH, known, [4, 8, 16, 32], "h200")
    else:
        chosen = {name: known[name] for name in (IN_MEMORY, REMAT, FUSED)}
        yield by_depth(dataclasses.replace(BY_DEPTH, width=256), chosen, [2, 8], "h200")


def by_depth(setting: Setting, forms: dict[str, Form], depths: list[int], target: str) -> Result:
    """Planned memory of whole steps."""
    config = dataclasses.asdict(setting) | {"target": target}
    config |= {"ours": [name for name in forms if name not in peers()]}
    del config["layers"]
    title = f"language model, steps with {setting.optimizer} planned for {target}"
    return Result(
        f"offload_{setting.optimizer}_{setting.width}_{setting.dtype}_{target}",
        f"{title}, {size_of(setting)}",
        config,
        plan_depths(setting, forms, depths, target),
        Curves("layers", "planned_device_bytes", "planned device memory of a step [GB]", 1e9),
    )


def _can_plan() -> bool:
    try:
        check_compiler()
    except PlanError:
        return False
    return True


if __name__ == "__main__":
    typer.run(main)
