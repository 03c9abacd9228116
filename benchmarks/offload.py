"""Planned memory of offloaded training steps of a language model, and of alternatives.

The peers are `jax.checkpoint`, JAX's offload policies, and the optimizer's state moved as a whole,
as MaxText does. The tables for a GH200 show how much memory models of 10.6 and 11.3 billion
parameters need, and the deepest models that host memories of several sizes hold.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from effjax.memory import max_batch_size

from .measure import TARGET, need_compiler, plan_steps
from .offload_forms import (
    FORMS,
    FUSED,
    FUSED_IN_MEMORY,
    IN_MEMORY,
    OFFLOADED,
    OURS,
    REMAT,
    STATE_MOVED,
    Setting,
    abstract_step,
    planned_bytes,
    split_params,
)
from .results import Result, Row, Size

BASIC = (IN_MEMORY, REMAT, FUSED_IN_MEMORY, "activations offloaded", OFFLOADED, FUSED)
DEPTHS = 4, 8, 16, 32
SHALLOW = Setting(width=1024, heads=16, batch_size=8, context=512)
PEER_MODEL = Setting(
    layers=24, width=2048, heads=16, context=1024, batch_size=8, dtype="bfloat16",
    vocab_size=32768,
)  # fmt: skip
PEER_FORMS = [name for name in FORMS if name != "activations offloaded"]
# Layers with as many parameters as those of Llama 3 8B and 70B. A wider MLP replaces the gate, and
# there are as many heads of keys and values as of queries.
LLAMA_8B = Setting(
    layers=44, width=4096, heads=32, mlp_width=18432, context=4096, batch_size=2,
    dtype="bfloat16", param_dtype="bfloat16", vocab_size=128256,
)  # fmt: skip
LLAMA_70B = dataclasses.replace(LLAMA_8B, width=8192, heads=64, mlp_width=35840)
BRACKET_DEPTHS = (44, 47)
BRACKET_FORMS = (REMAT, STATE_MOVED, FUSED_IN_MEMORY, FUSED)
HOST_GB: Mapping[float, Setting] = {96: LLAMA_8B, 480: LLAMA_70B, 1500: LLAMA_70B}


def plan_forms(
    table: str,
    setting: Setting,
    depths: Sequence[int],
    names: Sequence[str],
    target: str = TARGET,
) -> Result:
    """Plan whole steps by the number of layers; "ratio" is relative to the first form."""
    rows = []
    for layers in depths:
        model = dataclasses.replace(setting, layers=layers)
        plans = plan_steps({n: abstract_step(model, FORMS[n]) for n in names}, target)
        first = plans[names[0]].peak_device_bytes
        rows += [
            {"name": name, "ratio": round(plan.peak_device_bytes / first, 3)}
            | model_size(model)
            | planned_bytes(plan)
            for name, plan in plans.items()
        ]
    return make_result(table, setting, rows, target)


def plan_largest(hosts: Mapping[float, Setting], target: str) -> Result:
    """Search the deepest model for each size of host memory."""
    rows = [plan_deepest(setting, int(gb * 1e9), target) for gb, setting in hosts.items()]
    return make_result("largest", next(iter(hosts.values())), rows, target)


def plan_deepest(setting: Setting, host_bytes: int, target: str) -> Row:
    def step(layers: int) -> tuple:
        return abstract_step(dataclasses.replace(setting, layers=layers), FORMS[FUSED])

    # The host holds parameters, two moments and the input of each layer.
    layer, _ = split_params(dataclasses.replace(setting, layers=1).abstract_model)
    tokens = setting.batch_size * setting.context
    inputs = tokens * setting.width * jnp.dtype(setting.dtype).itemsize
    layer_bytes = 3 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(layer)) + inputs
    largest = max_batch_size(
        step,
        multiple_of=1,
        start=max(1, host_bytes // layer_bytes),
        progress=True,
        target=target,
        host_memory_bytes=host_bytes,
    )
    model = dataclasses.replace(setting, layers=largest.batch_size)
    return (
        {"name": FUSED, "host_bytes": host_bytes} | model_size(model) | planned_bytes(largest.plan)
    )


def model_size(setting: Setting) -> dict[str, Any]:
    sizes = {key: getattr(setting, key) for key in ("layers", "width", "heads", "mlp_width")}
    return sizes | {"parameters": setting.num_parameters}


def make_result(table: str, setting: Setting, rows: list[Row], target: str) -> Result:
    config = {k: v for k, v in dataclasses.asdict(setting).items() if k not in rows[0]}
    return Result(
        f"offload_{table}_{target}",
        f"language model, {table}, planned for {target}",
        config | {"target": target, "ours": list(OURS)},
        rows,
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "small":
        small = dataclasses.replace(SHALLOW, width=256, vocab_size=1024)
        yield plan_forms("peers", small, [4], PEER_FORMS)
        return
    yield plan_forms("depths", SHALLOW, DEPTHS, BASIC)
    yield plan_forms("peers", PEER_MODEL, [PEER_MODEL.layers], PEER_FORMS)
    yield plan_forms("bracket", LLAMA_8B, BRACKET_DEPTHS, BRACKET_FORMS, "gh200")
    yield plan_largest(HOST_GB, "gh200")
