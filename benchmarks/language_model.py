"""Planned memory of a training step of Qwen3-8B, with embedding and head on device and host."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, offload_jit, offload_train_step
from effjax.memory import MemoryPlan, plan
from effjax.models import DecoderConfig, decoder_functions, decoder_shapes
from effjax.optimizers import adamw_8bit, in_float32
from effjax.train.optimizers import is_adamw

from .measure import need_compiler
from .results import Bars, Result, Size

RATE = 1e-5
OPTIMIZERS = {
    "float32 moments": lambda: in_float32(optax.adamw(RATE)),
    "8-bit moments": lambda: adamw_8bit(RATE),
}
MEMORIES = "device", "host"
HOST_BYTES = 480 * 10**9
LARGEST = 4  # arrays at the peak that are recorded
BATCH = 1, 4096  # sequences and their tokens
QWEN3_8B = DecoderConfig(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    rope_theta=1e6, dtype="bfloat16",
)  # fmt: skip


def make_step(config: DecoderConfig, tx: Any, **options: Any) -> Any:
    """Return (init, step) of `effjax.offload_train_step`."""
    return offload_train_step(*decoder_functions(config), tx, weighted_loss=True, **options)


def count_parameters(config: DecoderConfig) -> int:
    return sum(math.prod(a.shape) for tree in decoder_shapes(config) for a in tree.values())


def abstract_step(
    config: DecoderConfig, tx: optax.GradientTransformation, others_in: str, batch: tuple[int, int]
) -> tuple:
    """Return `(fn, *args)` of the step for the planner."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, on_host: bool) -> Any:
        def one(a):
            kind = "pinned_host" if on_host and a.ndim else "device"
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    layers, others = decoder_shapes(config)
    layers_state = jax.eval_shape(jax.vmap(tx.init), layers)
    # The counts of the layers [L] are on the device.
    layers_state = jax.tree.map(lambda a: place(a, a.ndim > 1), layers_state)
    on_host = others_in == "host"
    others_state = place(jax.eval_shape(tx.init, others), on_host)
    state = OffloadState(place(layers, True), place(others, on_host), layers_state, others_state)
    tokens = jax.ShapeDtypeStruct(batch, jnp.int32)
    update_rows = is_adamw if on_host else None
    step = offload_jit(make_step(config, tx, others_in=others_in, update_rows=update_rows)[1])
    return step, state, place({"tokens": tokens, "labels": tokens}, False)


def traffic(result: MemoryPlan) -> dict[str, int]:
    """Return the bytes that a step copies in each direction."""
    return {
        f"{direction}_bytes": sum(
            t.bytes * t.count for t in result.transfers if t.direction == direction
        )
        for direction in ("to_device", "to_host")
    }


def plan_ends(
    config: DecoderConfig,
    target: str,
    batch: tuple[int, int] = BATCH,
    names: Sequence[str] | None = None,
) -> Result:
    """Plan the step with embedding and head on the device and in host memory.

    `names` are the rows to plan, by default all.
    """
    rows = []
    small = dataclasses.replace(config, vocab_size=256)
    forms = [(f"others on the {others_in}", config, others_in) for others_in in MEMORIES]
    forms.append(("a vocabulary of 256", small, "host"))
    for (optimizer, make), (form, of, others_in) in itertools.product(OPTIMIZERS.items(), forms):
        name = f"{optimizer}, {form}"
        if names is not None and name not in names:
            continue
        step = abstract_step(of, make(), others_in, batch)
        result = plan(*step, target=target, memory_fraction=0.95, host_memory_bytes=HOST_BYTES)
        largest = [
            {"shape": b.shape, "bytes": b.bytes, "kind": b.kind, "operation": b.operation[-60:]}
            for b in result.peak_buffers[:LARGEST]
        ]
        rows.append(
            {
                "name": name,
                "parameters": count_parameters(of),
                "planned_device_bytes": result.peak_device_bytes,
                "planned_device_temp_bytes": result.device.temporaries,
                "planned_host_bytes": result.host.total,
                **traffic(result),
                "largest": largest,
            }
        )
    ours = [row["name"] for row in rows if row["name"].endswith("host")]
    return Result(
        f"language_model_{target}",
        f"training step of a decoder, planned for {target}",
        config.to_json() | {"batch": list(batch), "target": target, "ours": ours},
        rows,
        Bars("planned_device_bytes", "planned device memory of a step [GB]", unit=1e9),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    small = dataclasses.replace(
        QWEN3_8B, vocab_size=16384, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    config, batch = (small, (1, 1024)) if size == "small" else (QWEN3_8B, BATCH)
    yield plan_ends(config, "h100", batch)
