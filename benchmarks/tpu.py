"""Planned memory and all-reduces of programs on a TPU, in plain JAX and with effjax.

XLA's compiler for TPUs compiles all programs on this machine. Nothing runs on a TPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import MemoryPlan

from . import batch_norm, batch_norm_layers, cross_entropy, dense_block
from .measure import add_gradients, need_compiler, plan_steps
from .results import Bars, Result, Size
from .transformer import TransformerLM

TARGET = "v5e"
CHIPS = 4  # of synchronized batch norm
SYNCHRONIZED: dict[Size, tuple[int, ...]] = {
    "small": (8, 8, 8, 128),
    "published": (64, 28, 28, 128),
}
NOTE = "Planned by XLA's compiler for TPUs. Nothing ran on a TPU."
PLAIN, CHECKPOINT, OURS = "plain JAX", "jax.checkpoint", "effjax"
PASSES = {"forward": False, "forward+backward": True}  # with gradients
Steps = Mapping[str, tuple]  # `(fn, *args)` by name


def float32(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def dense_block_steps(layers: int, batch_size: int) -> Steps:
    params, x, weights = dense_block.step_shapes(layers, batch_size)
    blocks = {
        PLAIN: dense_block.plain,
        CHECKPOINT: dense_block.checkpoint_pass_through("conv2"),
        OURS: dense_block.effjax_block("features"),
    }
    return {n: (dense_block.train_step(block), params, x, weights) for n, block in blocks.items()}


def batch_norm_steps(layers: int, shape: tuple[int, ...]) -> Steps:
    features = shape[-1]
    shapes = {"kernel": (3, 3, features, features), "scale": (features,), "bias": (features,)}
    stack = {name: float32(layers, *shape) for name, shape in shapes.items()}
    norms = {PLAIN: batch_norm.NORMS[batch_norm.REFERENCE], OURS: batch_norm.effjax_norm}

    def gradients(norm):
        return jax.grad(batch_norm_layers.scanned(batch_norm_layers.make_layer(norm)))

    return {name: (gradients(norm), stack, float32(*shape)) for name, norm in norms.items()}


def sync_batch_norm_steps(shape: tuple[int, ...], backward: bool) -> Steps:
    """Return batch norm and ReLU of a batch that is sharded over several chips."""
    mesh = AbstractMesh((CHIPS,), ("data",), axis_types=(AxisType.Auto,))
    split, replicated = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    x, p = float32(*shape, sharding=split), float32(shape[-1], sharding=replicated)
    norms = {PLAIN: batch_norm.NORMS[batch_norm.REFERENCE], OURS: batch_norm.effjax_norm}
    return {name: (add_gradients(norm, backward), x, p, p, x) for name, norm in norms.items()}


def cross_entropy_steps(config: Mapping[str, Any], batch_size: int, context: int) -> Steps:
    model = nnx.eval_shape(lambda: TransformerLM(**config, rngs=nnx.Rngs(0)))
    losses = {
        PLAIN: cross_entropy.whole_logits,
        CHECKPOINT: cross_entropy.scan_time,
        OURS: cross_entropy.effjax_loss,
    }
    return {
        name: cross_entropy.gradient_steps(model, loss, batch_size, context)["head"]
        for name, loss in losses.items()
    }


def make_programs(size: Size) -> dict[str, Steps]:
    vocabulary = dict(num_layers=1, width=512, num_heads=8, vocab_size=32768, dtype="bfloat16")
    if size == "published":
        return {
            "dense block of 24 layers": dense_block_steps(24, 64),
            "8 layers with batch norm in a scan": batch_norm_steps(8, (64, 56, 56, 64)),
            "cross entropy of 16384 tokens": cross_entropy_steps(vocabulary, 16, 1024),
        }
    vocabulary |= dict(width=128, num_heads=4)
    return {
        "dense block of 1 layer": dense_block_steps(1, 8),
        "2 layers with batch norm in a scan": batch_norm_steps(2, (8, 16, 16, 32)),
        "cross entropy of 256 tokens": cross_entropy_steps(vocabulary, 2, 128),
    }


def compare_memory(
    name: str, plans: Mapping[str, Mapping[str, MemoryPlan]], target: str = TARGET
) -> Result:
    """Return the memory of the plans of each program; "ratio" is relative to plain JAX."""
    rows = [
        {
            "name": step,
            "of": program,
            "peak_bytes": plan.peak_device_bytes,
            "temp_bytes": plan.device.temporaries,
            "planned_host_bytes": plan.host.total,
            "fits": plan.fits,
            "ratio": round(plan.peak_device_bytes / steps[PLAIN].peak_device_bytes, 4),
        }
        for program, steps in plans.items()
        for step, plan in steps.items()
    ]
    return Result(
        f"{name}_{target}",
        f"programs on one chip, planned for {target}",
        {"target": target},
        rows,
        Bars("peak_bytes", "peak of a program [MB]", ("of",), log=True, unit=1e6),
        [NOTE],
    )


def plan_collectives(
    shape: tuple[int, ...], target: str = TARGET, all_passes: Sequence[str] = tuple(PASSES)
) -> Result:
    """Count the all-reduces of batch norm over several chips, and their bytes."""
    rows = []
    for passes in all_passes:
        steps = sync_batch_norm_steps(shape, PASSES[passes])
        for name, plan in plan_steps(steps, target).items():
            assert {c.kind for c in plan.collectives} == {"all-reduce"}
            reduced = sum(c.bytes * c.count for c in plan.collectives)
            count = sum(c.count for c in plan.collectives)
            row = {"name": name, "passes": passes, "all_reduces": count}
            rows.append(row | {"reduced_bytes": reduced})
    return Result(
        f"tpu_sync_batch_norm_{target}",
        f"batch norm over {CHIPS} chips, planned for {target}",
        {"target": target, "chips": CHIPS},
        rows,
        Bars("all_reduces", "all-reduces", ("passes",)),
        [NOTE],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler(TARGET)
    yield plan_collectives(SYNCHRONIZED[size])
    programs = make_programs(size)
    yield compare_memory(
        "tpu_memory", {name: plan_steps(p, TARGET) for name, p in programs.items()}
    )
