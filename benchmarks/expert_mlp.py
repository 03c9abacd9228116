"""Planned time and memory of the gradients of a mixture of experts, and of `jax.lax.ragged_dot`.

The shapes are those of one layer of Qwen3-30B-A3B. Nothing runs on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

import effjax
from effjax.memory.devices import find_rates

from .measure import need_compiler, plan_steps
from .results import Result, Size

QWEN3_30B_A3B = dict(experts=128, experts_per_token=8, width=2048, hidden=768)
SMALL = dict(experts=4, experts_per_token=2, width=256, hidden=128)
GPUS = "h100", "rtx4090"
NOTES = [
    "All gradients in bfloat16, given that of y. products: the time of those of the forward and "
    "the backward pass without recomputation, 6 FLOPs for each parameter of an expert and each "
    "token that chooses it, at the published rate. temp: beside arguments and gradients.",
    "Modelled, not measured, for experts with equally many tokens: a kernel takes the time of its "
    "FLOPs or of its bytes, whichever is longer.",
]


def ragged_dot(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array,
    down: jax.Array,
) -> jax.Array:  # fmt: skip
    """Compute `effjax.expert_mlp` with products of a copy of the tokens, sorted by expert."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    tokens = order // experts.shape[1]
    sizes = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)

    def multiply(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, matrices, sizes, preferred_element_type=rows.dtype)

    rows = x[tokens]
    h = jax.nn.silu(multiply(rows, gate)) * multiply(rows, up)
    y = multiply(h, down) * weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[tokens].add(y.astype(jnp.float32)).astype(x.dtype)


PROGRAMS: dict[str, Callable] = {
    "jax.lax.ragged_dot": ragged_dot, "effjax.expert_mlp": effjax.expert_mlp
}  # fmt: skip


def gradient_step(program: Callable, layer: Mapping[str, int], tokens: int) -> tuple:
    """Return `(fn, *args)` of the gradients of all arguments but the numbers of the experts."""

    def step(experts, dy, *arrays):
        return jax.vjp(lambda x, *rest: program(x, experts, *rest), *arrays)[1](dy)

    def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    e, k, d, f = (layer[name] for name in SMALL)
    x, into = shape(tokens, d), shape(e, d, f)
    experts = shape(tokens, k, dtype="int32")
    return step, experts, x, x, shape(tokens, k), into, into, shape(e, f, d)


def plan_programs(
    layer: Mapping[str, int], tokens: int, target: str, names: Sequence[str] = tuple(PROGRAMS)
) -> Iterator[dict]:
    """Plan the gradients of some programs; "ratio" is relative to the time of the products."""
    _, k, d, f = (layer[name] for name in SMALL)
    flops = 6 * tokens * k * 3 * d * f
    seconds = flops / find_rates(target).flops_of("bf16")
    steps = {name: gradient_step(PROGRAMS[name], layer, tokens) for name in names}
    for name, plan in plan_steps(steps, target).items():
        time = plan.step_time
        yield {
            "name": name,
            "of": f"{tokens} tokens, {target}",
            "tokens": tokens,
            "target": target,
            "step_seconds": time.seconds,
            "product_seconds": seconds,
            "ratio": round(time.seconds / seconds, 3),
            "flops": time.total_flops,
            "product_flops": flops,
            "traffic_bytes": time.memory_bytes,
            "temp_bytes": plan.device.temporaries,
        }


def run(size: Size) -> Iterator[Result]:
    need_compiler(GPUS[0])
    layer, all_tokens = (SMALL, (512,)) if size == "small" else (QWEN3_30B_A3B, (16384, 65536))
    rows = [
        row
        for tokens in all_tokens
        for target in GPUS
        for row in plan_programs(
            layer, tokens, target, list(PROGRAMS)[tokens != all_tokens[0] :]
        )
    ]  # fmt: skip
    config = layer | {"reference": "the products"}
    yield Result("expert_mlp", "gradients of a mixture of experts, planned", config, rows, NOTES)
