"""A training step of a language model whose layers live in host memory, beside the same in device
memory, plain, recomputed by ``jax.checkpoint`` and updated in the backward pass.

Two tables: whole steps, and gradients alone, which must be equal to the bit. On a GPU
they also say what the process has held of its memory; where the GPU compiler is installed, what the
planner expects of `--target`. `--depths` times nothing: it plans steps of models so deep.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from .. import OffloadState, offload_jit, to_device
from ..memory import MemoryPlan, PlanError, check_compiler
from ..memory.compare import plan_all
from ._measure import difference, time_in_turn, write_record
from ._offload_forms import Form, Setting, forms_of, gradients_of, make_params, split, step_of

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
    """
    tokens, key = setting.batch(), jax.random.key(2)
    steps = {name: step_of(setting, form) for name, form in forms.items()}
    compiled = {name: offload_jit(found.step) for name, found in steps.items()}
    start = {n: lambda n=n: steps[n].init(*make_params(setting, forms[n].layers)) for n in forms}
    losses, peaks, states = {}, {}, {}
    for name in reversed(forms):
        state, losses[name] = start[name](), []
        for i in range(CHECKED_STEPS):
            state, loss = compiled[name](state, tokens, jax.random.fold_in(key, i))
            losses[name].append(float(loss))
        peaks[name] = _device_peak_bytes()
        del state

    # Forms that have the same state take turns with it.
    def run(name: str) -> Any:
        kind = forms[name].layers, forms[name].is_plain
        if kind not in states:
            states[kind] = start[name]()
        states[kind], loss = compiled[name](states[kind], tokens, key)
        return states[kind], loss

    runs = {name: functools.partial(run, name) for name in forms}
    times = _timed(setting, runs, rounds)
    return [
        {"name": name, **times[name], "losses": losses[name]}
        | _compared(forms, name, losses)
        | {"device_peak_bytes": peaks[name]}
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


# Header, key of the row, format, unit.
COLUMNS = (
    ("layers", "layers", ".0f", 1), ("parameters [B]", "parameters", ".2f", 1e9),
    ("step [ms]", "seconds", ".1f", 1e-3),
    ("x memory", "ratio", ".2f", 1), ("tokens/s", "tokens_per_second", ".0f", 1),
    ("difference", "difference", ".1e", 1), ("same bits", "bit_identical", ".0f", 1),
    ("as remat", "bit_identical_to_remat", ".0f", 1),
    ("peak [GB]", "device_peak_bytes", ".3f", 1e9),
    ("planned [GB]", "planned_device_bytes", ".3f", 1e9),
    ("on host [GB]", "planned_host_bytes", ".3f", 1e9),
)  # fmt: skip


def publish(title: str, config: dict, rows: list[dict], file: Path | None) -> None:
    """As a table, and as JSON where there is a file for it."""
    table = Table(title=title)
    table.add_column("program", no_wrap=True)
    columns = [column for column in COLUMNS if rows[0].get(column[1]) is not None]
    for header, *_ in columns:
        table.add_column(header, no_wrap=True, justify="right")
    for row in rows:
        cells = ((row[key], form, unit) for _, key, form, unit in columns)
        table.add_row(row["name"], *("" if v is None else f"{v / u:{f}}" for v, f, u in cells))
    Console(width=max(Console().width, 140)).print(table)
    if file:
        write_record(file, title, config, rows)


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
    config = dataclasses.asdict(setting) | {"target": target}
    size = f"width {width}, context {context}, batch {batch_size} in {microbatches}, {dtype}"
    if depths:
        del config["layers"]
        rows = plan_depths(setting, forms, depths, target)
        title = f"language model, steps with {optimizer} planned for {target}, {size}"
        name = f"offload_{optimizer}_{width}_{dtype}_{target}.json"
        publish(title, config, rows, json and json / name)
        return
    plan = plan and _can_plan()
    for table in passes:
        whole = table == "step"
        chosen = {name: form for name, form in forms.items() if whole or not form.fuse_update}
        rows = (bench_steps if whole else bench_gradients)(setting, chosen, rounds)
        if plan:
            plans = plan_forms(setting, chosen, whole, target)
            rows = [row | planned_bytes(plans[row["name"]]) for row in rows]
        title = f"language model, {table}, {layers} layers, {size}"
        name = f"offload_{table}_{layers}x{width}_{microbatches}_{dtype}.json"
        publish(title, config | {"rounds": rounds}, rows, json and json / name)


def _can_plan() -> bool:
    try:
        check_compiler()
    except PlanError:
        return False
    return True


if __name__ == "__main__":
    typer.run(main)
