"""Modelled time of a layer whose state is in host memory, and the best that its copies allow."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, offload_jit, offload_train_step
from effjax.memory import plan
from effjax.optimizers import in_float32

from .measure import need_compiler
from .results import Bars, Result, Size


class Layers(NamedTuple):
    """A stack of feed-forward layers in bfloat16, with float32 moments."""

    width: int
    hidden: int
    tokens: int


def layer(params, x, key):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def abstract_step(layers: Layers, count: int) -> tuple:
    """Return the fused training step of `count` layers and the shapes of its arguments."""
    step = offload_train_step(
        lambda others, batch, key: batch["x"],
        layer,
        lambda others, x, batch, key: jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2),
        in_float32(optax.adamw(1e-3)),
    )
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def shape(a, kind="device"):
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def on_host(tree):
        return jax.tree.map(lambda a: shape(a, "pinned_host" if a.ndim > 1 else "device"), tree)

    sizes = {"up": (layers.width, layers.hidden), "down": (layers.hidden, layers.width)}
    params = {k: jax.ShapeDtypeStruct((count, *s), jnp.bfloat16) for k, s in sizes.items()}
    state: OffloadState = jax.tree.map(shape, jax.eval_shape(step.init, on_host(params), {}))
    state = state._replace(layers=on_host(state.layers), layers_state=on_host(state.layers_state))
    x = shape(jax.ShapeDtypeStruct((layers.tokens, layers.width), jnp.bfloat16))
    return offload_jit(step.step), state, {"x": x, "y": x}


def model_layer(layers: Layers, target: str, counts: Sequence[int]) -> dict:
    """Plan two depths; return the time and the bytes that a layer adds to a step."""
    few, many = counts
    plans = [plan(*abstract_step(layers, n), target=target) for n in (few, many)]
    shallow, deep = (planned.step_time for planned in plans)

    def per_layer(name: str) -> float:
        return (getattr(deep, name) - getattr(shallow, name)) / (many - few)

    loads, writes = per_layer("to_device_bytes"), per_layer("to_host_bytes")
    best = max(
        per_layer("compute_seconds"), loads / deep.rates.to_device, writes / deep.rates.to_host
    )
    return {
        "name": f"effjax, {target}, {layers.tokens} tokens",
        "step_seconds": per_layer("seconds"),
        "best_seconds": best,
        "ratio": round(per_layer("seconds") / best, 3),
        "compute_seconds": per_layer("compute_seconds"),
        "to_device_bytes": loads,
        "to_host_bytes": writes,
        "planned_device_bytes": plans[1].peak_device_bytes,
        "planned_host_bytes": plans[1].peak_host_bytes,
    }


def measure_overlap(
    targets: Sequence[str], settings: Sequence[Layers], counts: Sequence[int]
) -> Result:
    """Model a layer for several targets and numbers of tokens."""
    rows = [model_layer(layers, target, counts) for target in targets for layers in settings]
    return Result(
        "offload_overlap",
        "a layer of an offloaded step, relative to the best that its copies and products allow",
        {
            "targets": targets,
            "layers": counts,
            "settings": [setting._asdict() for setting in settings],
            "reference": "the longest of products, copies to the device and copies to the host",
        },
        rows,
        Bars("ratio", "modelled time relative to the best possible"),
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        settings = [Layers(2048, 8192, tokens) for tokens in (4096, 32768)]
        yield measure_overlap(("h100", "gh200", "v5e"), settings, (8, 16))
    else:
        yield measure_overlap(("h100",), [Layers(512, 2048, 1024)], (4, 6))
