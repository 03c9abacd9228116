"""Plans of a training step in forms that others use and in effjax's, and the largest models.

Two kinds of tables. One language model whose step is planned in memory, under `jax.checkpoint`,
with JAX's offload policies, with the optimizer's state moved as a whole as MaxText does, and in
effjax's forms. And models of a GH200: how much memory those of 10.6 and 11.3 billion parameters
need in some of these forms, and the deepest ones that host memories of several sizes hold.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from ..memory import max_batch_size
from ._offload_forms import (
    FUSED,
    FUSED_IN_MEMORY,
    IN_MEMORY,
    MOVED,
    PRODUCTS,
    REMAT,
    Form,
    Setting,
    forms_of,
    peers,
    split,
)
from ._result import Result, publish
from .offload import abstract_step, plan_forms, planned_bytes

TABLES = ["peers", "bracket", "largest"]
TARGETS = ["h200", "h100"]

MODEL = Setting(
    layers=24, width=2048, heads=16, context=1024, batch_size=8, dtype="bfloat16", dropout=0.0,
    vocab_size=32768,
)  # fmt: skip


def ours() -> dict[str, Form]:
    """In the order of what they need on the device, most first."""
    known = forms_of(1)
    fused = known[FUSED]
    return {
        FUSED_IN_MEMORY: known[FUSED_IN_MEMORY],
        f"{FUSED_IN_MEMORY}, inputs offloaded": known[FUSED_IN_MEMORY]._replace(
            options={"activations": "host"}
        ),
        "all offloaded": known["all offloaded"],
        f"{FUSED}, products kept": fused._replace(options={"policy": PRODUCTS}),
        FUSED: fused,
    }


# Layers with as many parameters as those of Llama 3 8B and 70B. In place of a gate these have a
# wider MLP, and as many heads of keys and values as of queries.
SMALL = Setting(
    layers=44, width=4096, heads=32, mlp_width=18432, context=4096, batch_size=2, dropout=0.0,
    dtype="bfloat16", param_dtype="bfloat16", vocab_size=128256,
)  # fmt: skip
LARGE = dataclasses.replace(SMALL, width=8192, heads=64, mlp_width=35840)
BRACKET = 44, 47  # layers
HOSTS = {96: SMALL, 480: LARGE, 1500: LARGE}  # by GB


def plan_peers(setting: Setting, target: str) -> list[dict]:
    """A row a form."""
    plans = plan_forms(setting, peers() | ours(), True, target)
    first = plans[IN_MEMORY].peak_device_bytes
    return [
        {"name": name, "ratio": round(plan.peak_device_bytes / first, 3)} | planned_bytes(plan)
        for name, plan in plans.items()
    ]


def plan_bracket(setting: Setting, depths: Sequence[int], target: str) -> list[dict]:
    """A row a form and depth."""
    known = peers() | ours()
    forms = {name: known[name] for name in (REMAT, MOVED, FUSED_IN_MEMORY, FUSED)}
    rows = []
    for layers in depths:
        model = dataclasses.replace(setting, layers=layers)
        found = plan_forms(model, forms, True, target)
        rows += [{"name": n} | _size(model) | planned_bytes(p) for n, p in found.items()]
    return rows


def plan_largest(setting: Setting, host_bytes: int, target: str) -> dict:
    """A row of the deepest model that a host memory holds.

    It fits by a plan of its own, and with a layer more it does not.
    """

    def step(layers: int) -> tuple:
        return abstract_step(dataclasses.replace(setting, layers=layers), ours()[FUSED], True)

    # On the host a layer has parameters, two moments and the input.
    layer, _ = split(dataclasses.replace(setting, layers=1).model)
    inputs = (
        setting.batch_size * setting.context * setting.width * jnp.dtype(setting.dtype).itemsize
    )
    needed = 3 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(layer)) + inputs
    found = max_batch_size(
        step, multiple_of=1, start=max(1, host_bytes // needed), progress=True, target=target,
        host_memory_bytes=host_bytes,
    )  # fmt: skip
    model = dataclasses.replace(setting, layers=found.batch_size)
    return {"name": FUSED, "host_bytes": host_bytes} | _size(model) | planned_bytes(found.plan)


def _size(setting: Setting) -> dict[str, Any]:
    return {
        "layers": setting.layers, "width": setting.width, "heads": setting.heads,
        "mlp_width": setting.mlp_width, "parameters": setting.num_parameters,
    }  # fmt: skip


def main(
    target: Annotated[list[str], typer.Option(help="GPUs to plan the forms for.")] = TARGETS,
    tables: Annotated[list[str], typer.Option(help="What to plan; all by default.")] = TABLES,
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Plans training steps beside those of others, and the largest models of a GH200."""
    if unknown := set(tables) - set(TABLES):
        raise typer.BadParameter(f"--tables {unknown.pop()!r} is not one of {TABLES}")

    def write(table: str, gpu: str, setting: Setting, rows: list[dict]) -> None:
        of_all = {n: v for n, v in dataclasses.asdict(setting).items() if n not in rows[0]}
        config = of_all | {"target": gpu}
        title = f"language model, {table}, planned for {gpu}"
        publish(Result(f"offload_{table}_{gpu}", title, config, rows), json)

    if "peers" in tables:
        for gpu in target:
            write("peers", gpu, MODEL, plan_peers(MODEL, gpu))
    if "bracket" in tables:
        write("bracket", "gh200", SMALL, plan_bracket(SMALL, BRACKET, "gh200"))
    if "largest" in tables:
        rows = [plan_largest(model, int(gb * 1e9), "gh200") for gb, model in HOSTS.items()]
        write("largest", "gh200", SMALL, rows)


if __name__ == "__main__":
    typer.run(main)
