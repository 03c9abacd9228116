"""A training step of a language model whose layers live in host memory, beside the same in device
memory, plain and recomputed by ``jax.checkpoint``.

Two tables: whole steps with Adam, and gradients alone, which must be equal to the bit. On a GPU
they also say what the process has held of its memory; where the GPU compiler is installed, what the
planner expects of `--target`. `--depths` times nothing: it plans steps of models so deep.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from .. import OffloadState, host_init, offload_jit, offload_scan, offload_train_step, to_device
from ..memory import MemoryPlan, PlanError, check_compiler
from ..memory.compare import plan_all
from ..models import TransformerLM, scan_layers
from ..ops.offload.train_step import TrainStep
from ..train.lm.steps import lm_parts
from ._measure import difference, time_in_turn, write_record

IN_MEMORY = "in memory"
REMAT = "in memory, remat"
FUSED = "all offloaded, fused update"
PASSES = ["step", "gradients"]
CHECKED_STEPS = 3
ADAM = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model and its batch."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    context: int = 256
    batch_size: int = 8
    microbatches: int = 1
    dtype: str = "float32"
    dropout: float = 0.1

    @property
    def model(self) -> TransformerLM:
        """Its shapes."""
        return nnx.eval_shape(
            lambda: TransformerLM(
                num_layers=self.layers, width=self.width, num_heads=self.heads,
                dropout_rate=self.dropout, dtype=jnp.dtype(self.dtype), rngs=nnx.Rngs(0),
            )
        )  # fmt: skip

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """The last one of a row is predicted only."""
        return jax.ShapeDtypeStruct((self.batch_size, self.context + 1), jnp.int32)

    def batch(self) -> jax.Array:
        """Tokens, the same every time."""
        return jax.random.randint(jax.random.key(1), self.tokens.shape, 0, 256)


class Form(NamedTuple):
    """layers: where their parameters are; apply: as of `TransformerLM`."""

    layers: str
    apply: Callable
    microbatches: int = 1
    remat: bool = False
    fuse_update: bool = False


def forms_of(microbatches: int) -> dict[str, Form]:
    """All of them, in the order of what they need on the device, most first."""

    def offloaded(params_in: Any) -> Callable:
        return lambda layer, layers, x, key: offload_scan(
            layer, layers, x, key=key, params_in=params_in, num_microbatches=microbatches
        )

    in_memory: Any = functools.partial(Form, "device")
    remat = functools.partial(scan_layers, remat=True)
    forms = {IN_MEMORY: in_memory(scan_layers), REMAT: in_memory(remat, remat=True)}
    if microbatches > 1:
        for name, form in list(forms.items()):
            apply = functools.partial(scan_microbatches, number=microbatches, remat=form.remat)
            forms[f"{name}, microbatches"] = in_memory(apply, microbatches, form.remat)
    return forms | {
        "activations offloaded": in_memory(offloaded("device"), microbatches),
        "all offloaded": Form("host", offloaded("host"), microbatches),
        FUSED: Form("host", offloaded("host"), microbatches, fuse_update=True),
    }


def scan_microbatches(
    layer: Callable, layers: Any, x: Any, key: Any, *, number: int, remat: bool
) -> Any:
    """`scan_layers` with the keys of `offload_scan` for several microbatches."""
    one = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def body(x, at):
        w, i = at

        def microbatch(_, at):
            part, m = at
            return None, one(w, part, jax.random.fold_in(jax.random.fold_in(key, i), m))

        parts = x.reshape(number, -1, *x.shape[1:])
        _, parts = jax.lax.scan(microbatch, None, (parts, jnp.arange(number)))
        return parts.reshape(x.shape), None

    return jax.lax.scan(body, x, (layers, jnp.arange(jax.tree.leaves(layers)[0].shape[0])))[0]


def gradients_of(setting: Setting, form: Form) -> Callable:
    """``(layers, others, tokens, key) -> (loss, gradients of both)``"""
    parts = lm_parts(setting.model)

    def loss(layers, others, tokens, key):
        x = form.apply(parts.layer, layers, parts.embed(others, tokens, key), key)
        return parts.head(others, x, tokens, key)

    return jax.value_and_grad(loss, argnums=(0, 1))


def step_of(setting: Setting, form: Form) -> TrainStep:
    """Gradients and Adam's update; its init takes the layers on the host."""
    if form.layers == "host":
        options: dict[str, Any] = dict(num_microbatches=form.microbatches)
        return offload_train_step(
            *lm_parts(setting.model), ADAM, fuse_update=form.fuse_update, **options
        )
    gradients = gradients_of(setting, form)

    def init(layers, others):
        params = to_device(layers), others
        return params, ADAM.init(params)

    def step(state, tokens, key):
        params, adam = state
        loss, grads = gradients(*params, tokens, key)
        updates, adam = ADAM.update(grads, adam, params)
        return (optax.apply_updates(params, updates), adam), loss

    return TrainStep(init, step)


def make_params(setting: Setting) -> tuple[Any, Any]:
    """(layers on the host, others), the same every time."""
    model, key = setting.model, jax.random.key(0)

    @jax.jit
    def others():
        # The parameters of its layers are not used, and so not made.
        options: dict[str, Any] = dict(num_layers=1, width=setting.width, num_heads=setting.heads)
        made: Any = TransformerLM(**options, rngs=nnx.Rngs(1))
        return _split(made)[1]

    return host_init(model.init_layer, model.layer_keys(key)), others()


def _split(model: TransformerLM) -> tuple[Any, Any]:
    """(layers, others)"""
    params: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params.pop("blocks"), params


def plan_forms(setting: Setting, forms: dict[str, Form], whole: bool, target: str) -> dict:
    """Plans of the whole step, or of the gradients alone, by form."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, where: str) -> Any:
        kind = "pinned_host" if where == "host" else None
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
        )

    def arguments(form: Form) -> tuple:
        layers, others = _split(setting.model)
        params = place(layers, form.layers), place(others, "device")
        if not whole:
            return params
        if form.layers == "device":
            return ((params, place(jax.eval_shape(ADAM.init, params), "device")),)
        states = jax.eval_shape(jax.vmap(ADAM.init), layers), jax.eval_shape(ADAM.init, others)
        layers_state = jax.tree.map(
            lambda a: place(a, "host" if a.ndim > 1 else "device"), states[0]
        )
        return (OffloadState(*params, layers_state, place(states[1], "device")),)

    steps = {}
    for name, form in forms.items():
        fun = step_of(setting, form).step if whole else gradients_of(setting, form)
        rest = place(setting.tokens, "device"), jax.random.key(2)
        steps[name] = offload_jit(fun, donate=whole), *arguments(form), *rest
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
    losses, peaks, states = {}, {}, {}
    for name in reversed(forms):
        states.pop(forms[name].layers, None)
        state, losses[name] = steps[name].init(*make_params(setting)), []
        for i in range(CHECKED_STEPS):
            state, loss = compiled[name](state, tokens, jax.random.fold_in(key, i))
            losses[name].append(float(loss))
        peaks[name] = _device_peak_bytes()
        states[forms[name].layers] = state
        del state

    # Forms with layers in the same place have the same state, and take turns with it.
    def run(name: str) -> Any:
        where = forms[name].layers
        states[where], loss = compiled[name](states[where], tokens, key)
        return states[where], loss

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
    on_host, others = make_params(setting)
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
    ("layers", "layers", ".0f", 1), ("step [ms]", "seconds", ".1f", 1e-3),
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
    only: Annotated[list[str], typer.Option(help="Names of forms; all by default.")] = [],  # noqa: B006
    passes: Annotated[list[str], typer.Option(help="The tables.")] = PASSES,
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    plan: Annotated[bool, typer.Option(help="Plan too, where the compiler is.")] = True,
    target: Annotated[str, typer.Option(help="The GPU to plan for.")] = "h200",
    depths: Annotated[list[int], typer.Option(help="Run nothing; plan steps so deep.")] = [],  # noqa: B006
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Times training steps in memory and offloaded in one run; or plans them by depth."""
    setting = Setting(layers, width, heads, context, batch_size, microbatches, dtype, dropout)
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
        title = f"language model, steps with Adam planned for {target}, {size}"
        publish(title, config, rows, json and json / f"offload_{width}_{dtype}_{target}.json")
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
