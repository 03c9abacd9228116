"""Planned memory of a training step of Qwen3-8B, with embedding and head on device and host.

The decoder has RMSNorm, rotary embeddings, grouped queries and SwiGLU. Parameters are bfloat16.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, linear_cross_entropy, offload_jit, offload_train_step
from effjax.memory import MemoryPlan, plan
from effjax.optimizers import adamw_8bit, in_float32

from .measure import need_compiler
from .results import Bars, Result, Size

EPSILON = 1e-6
ROPE_BASE = 1e6
RATE = 1e-5
OPTIMIZERS = {
    "float32 moments": lambda: in_float32(optax.adamw(RATE)),
    "8-bit moments": lambda: adamw_8bit(RATE),
}
MEMORIES = "device", "host"
HOST_BYTES = 480 * 10**9
LARGEST = 4  # arrays at the peak that are recorded


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder and its batch."""

    layers: int = 36
    width: int = 4096
    mlp_width: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    tied: bool = False
    batch_size: int = 1
    context: int = 4096
    dtype: str = "bfloat16"

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "norm": (self.width,), "q": (self.width, q), "k": (self.width, kv),
            "v": (self.width, kv), "q_norm": (self.head_dim,), "k_norm": (self.head_dim,),
            "out": (q, self.width), "mlp_norm": (self.width,),
            "gate": (self.width, self.mlp_width), "up": (self.width, self.mlp_width),
            "down": (self.mlp_width, self.width),
        }  # fmt: skip

    @property
    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"embedding": (self.vocab_size, self.width), "norm": (self.width,)}
        return shapes if self.tied else {**shapes, "head": (self.width, self.vocab_size)}

    @property
    def num_parameters(self) -> int:
        per_layer = sum(map(math.prod, self.layer_shapes.values()))
        return self.layers * per_layer + sum(map(math.prod, self.other_shapes.values()))


QWEN3_8B = Decoder()


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + EPSILON)
    return weight * wide.astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary embeddings to x [N, T, H, D]."""
    half = x.shape[-1] // 2
    speeds = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


attend_by_cudnn = functools.partial(
    jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
)


def apply_layer(model: Decoder, attend: Callable, w: dict, x: jax.Array, key: Any) -> jax.Array:
    """Apply a layer to x [N, T, width]."""
    y = rms_norm(x, w["norm"])
    q, k, v = ((y @ w[n]).reshape(*x.shape[:2], -1, model.head_dim) for n in "qkv")
    q, k = rotate(rms_norm(q, w["q_norm"])), rotate(rms_norm(k, w["k_norm"]))
    x = x + attend(q, k, v).reshape(*x.shape[:2], -1) @ w["out"]
    y = rms_norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def embed(others: dict, batch: dict, key: Any) -> jax.Array:
    return others["embedding"][batch["tokens"]]


def apply_head(others: dict, x: jax.Array, batch: dict, key: Any) -> jax.Array:
    kernel = others["head"] if "head" in others else others["embedding"].T
    return jnp.mean(linear_cross_entropy(rms_norm(x, others["norm"]), kernel, batch["labels"]))


def make_step(model: Decoder, attend: Callable, tx: Any, **options: Any) -> Any:
    """Return (init, step) of `effjax.offload_train_step`."""
    layer = functools.partial(apply_layer, model, attend)
    return offload_train_step(embed, layer, apply_head, tx, **options)


def abstract_step(
    model: Decoder, attend: Callable, tx: optax.GradientTransformation, others_in: str
) -> tuple:
    """Return `(fn, *args)` of the step for the planner."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, on_host: bool) -> Any:
        def one(a):
            kind = "pinned_host" if on_host and a.ndim else "device"
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    def shapes(sizes: dict, *leading: int) -> dict:
        return {n: jax.ShapeDtypeStruct((*leading, *s), model.dtype) for n, s in sizes.items()}

    layers, others = shapes(model.layer_shapes, model.layers), shapes(model.other_shapes)
    layers_state = jax.eval_shape(jax.vmap(tx.init), layers)
    # The counts of the layers [L] are on the device.
    layers_state = jax.tree.map(lambda a: place(a, a.ndim > 1), layers_state)
    on_host = others_in == "host"
    others_state = place(jax.eval_shape(tx.init, others), on_host)
    state = OffloadState(place(layers, True), place(others, on_host), layers_state, others_state)
    tokens = jax.ShapeDtypeStruct((model.batch_size, model.context), jnp.int32)
    batch = place({"tokens": tokens, "labels": tokens}, False)
    return offload_jit(make_step(model, attend, tx, others_in=others_in)[1]), state, batch


def traffic(result: MemoryPlan) -> dict[str, int]:
    """Return the bytes that a step copies in each direction."""
    return {
        f"{direction}_bytes": sum(
            t.bytes * t.count for t in result.transfers if t.direction == direction
        )
        for direction in ("to_device", "to_host")
    }


def plan_ends(model: Decoder, target: str) -> Result:
    """Plan the step with embedding and head on the device and in host memory."""
    rows = []
    small = dataclasses.replace(model, vocab_size=256)
    forms = [(f"others on the {others_in}", model, others_in) for others_in in MEMORIES]
    forms.append(("a vocabulary of 256", small, "host"))
    for (optimizer, make), (form, of, others_in) in itertools.product(OPTIMIZERS.items(), forms):
        step = abstract_step(of, attend_by_cudnn, make(), others_in)
        result = plan(*step, target=target, memory_fraction=0.95, host_memory_bytes=HOST_BYTES)
        largest = [
            {"shape": b.shape, "bytes": b.bytes, "kind": b.kind, "operation": b.operation[-60:]}
            for b in result.peak_buffers[:LARGEST]
        ]
        rows.append(
            {
                "name": f"{optimizer}, {form}",
                "parameters": of.num_parameters,
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
        dataclasses.asdict(model) | {"target": target, "ours": ours},
        rows,
        Bars("planned_device_bytes", "planned device memory of a step [GB]", unit=1e9),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    small = dataclasses.replace(
        QWEN3_8B, layers=2, width=256, mlp_width=512, heads=2, kv_heads=1, vocab_size=16384,
        context=1024,
    )  # fmt: skip
    yield plan_ends(small if size == "small" else QWEN3_8B, "h100")
