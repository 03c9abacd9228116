"""Batch norm and ReLU on one device, and batch norm over several, effjax's and Flax's.

The first tables have the time of a step and the bytes kept for the backward pass. The last one has
the all-reduces of the compiled program. Its devices are simulated on one CPU and share its cores,
so the times show the work and not the network.
"""

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import effjax.linen
import effjax.nnx
from effjax.memory import collectives, residual_bytes

from .measure import compile_program, relative_difference, time_in_turn, time_steps
from .results import Result, Row, Size

REFERENCE = "Flax BatchNorm"
DEVICES = (1, 2, 4, 8)
# [N, H, W, C] of the whole batch; N is divided over the devices.
SHARDED: dict[Size, tuple[int, ...]] = {"small": (64, 14, 14, 32), "published": (64, 28, 28, 64)}
ROUNDS = 5
AXIS = "data"
KEPT = "kept: for the backward pass, in multiples of the input's bytes."
Norm = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of x, scale and bias


def linen_norm(cls: type[linen.BatchNorm] = linen.BatchNorm, **options: Any) -> Norm:
    def norm(x, scale, bias):
        module = cls(use_running_average=False, dtype=x.dtype, **options)
        variables = {"params": {"scale": scale, "bias": bias}}
        output: Any = module.apply(variables, x, mutable=["batch_stats"])
        return output[0]

    return norm


def nnx_norm(cls: type[nnx.BatchNorm] = nnx.BatchNorm, **options: Any) -> Norm:
    def norm(x, scale, bias):
        module = cls(
            x.shape[-1], use_running_average=False, dtype=x.dtype, rngs=nnx.Rngs(0), **options
        )
        module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
        return module(x)

    return norm


def with_relu(norm: Norm) -> Norm:
    return lambda *args: jax.nn.relu(norm(*args))


def effjax_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return effjax.sync_batch_norm(x, scale, bias, activation="relu")[0]


NORMS: dict[str, Norm] = {
    REFERENCE: with_relu(linen_norm()),
    "Flax BatchNorm, use_fast_variance=False": with_relu(linen_norm(use_fast_variance=False)),
    "Flax nnx.BatchNorm": with_relu(nnx_norm()),
    "effjax.sync_batch_norm": effjax_norm,
}
SHARDED_NORMS: dict[str, Norm] = {
    "Flax linen.BatchNorm": linen_norm(axis_name=AXIS),
    "Flax nnx.BatchNorm": nnx_norm(axis_name=AXIS),
    "effjax.linen.BatchNorm": linen_norm(effjax.linen.BatchNorm, axis_name=AXIS),
    "effjax.nnx.BatchNorm": nnx_norm(effjax.nnx.BatchNorm, axis_name=AXIS),
}


def make_gradient(norm: Norm) -> Callable:
    """Return the gradients (dx, dscale, dbias) of a weighted sum of the norm's outputs."""

    def loss(x, scale, bias, weights):
        return jnp.sum((norm(x, scale, bias) * weights).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2))


def make_arguments(shape: tuple[int, ...], dtype: str = "float32") -> tuple[jax.Array, ...]:
    x, weights = (jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype)) for i in (0, 1))
    return x, jnp.ones(shape[-1]), jnp.zeros(shape[-1]), weights


def measure_norms(shape: tuple[int, ...], dtype: str, rounds: int) -> Result:
    """Time all norms, and count the bytes autodiff keeps between forward and backward pass."""
    args = make_arguments(shape, dtype)
    result = time_steps(
        f"batch_norm_{dtype}",
        f"batch norm + ReLU, {shape}, {dtype}",
        {"shape": shape, "dtype": dtype, "relu": True},
        {name: make_gradient(norm) for name, norm in NORMS.items()},
        args,
        reference=REFERENCE,
        rounds=rounds,
        notes=[KEPT],
    )
    for row in result.rows:
        kept = residual_bytes(NORMS[row["name"]], *args[:3]).bytes
        row["kept"] = round(kept / args[0].nbytes, 2)
    return result


def shard_batch(mesh: Mesh, fn: Callable, out_specs: Any) -> Callable:
    """Map `fn(x, scale, bias, *others)` over the batch of `x` and `others`; replicate the rest."""

    def mapped(x, scale, bias, *others):
        in_specs = (P(AXIS), P(), P(), *(P(AXIS) for _ in others))
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return sharded(x, scale, bias, *others)

    return mapped


def measure_sharded(num_devices: int, shape: tuple[int, ...], rounds: int) -> list[Row]:
    """Time the gradients of a sharded batch and count their all-reduces; return a row per class."""
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,), devices=devices)
    args = make_arguments(shape)
    compiled, compiler = {}, {}
    for name, norm in SHARDED_NORMS.items():
        step = shard_batch(mesh, make_gradient(norm), (P(AXIS), P(), P()))
        compiled[name], compiler[name] = compile_program(step, *args)
    runs = {name: functools.partial(program, *args) for name, program in compiled.items()}
    reference = next(iter(runs))
    times = time_in_turn(runs, reference=reference, rounds=rounds)
    expected = runs[reference]()
    rows = []
    for name, norm in SHARDED_NORMS.items():
        forward = shard_batch(mesh, norm, P(AXIS))
        counts = collectives(compiled[name].as_text())
        rows.append(
            {
                "name": name,
                "devices": num_devices,
                **times[name],
                "all_reduces": sum(c.count for c in counts if c.kind == "all-reduce"),
                "kept": round(residual_bytes(forward, *args[:3]).bytes / args[0].nbytes, 2),
                **compiler[name],
                "difference": relative_difference(runs[name](), expected),
            }
        )
    return rows


def simulate_devices() -> None:
    """Give this process as many simulated CPU devices as DEVICES needs."""
    # The flag sets the same number. Without it, the two settings cannot contradict each other.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))


def measure_devices(shape: tuple[int, ...], devices: Sequence[int] = DEVICES) -> Result:
    # JAX fixes the number of devices when it initializes a backend, and simulated devices would
    # take threads from other benchmarks. So this table is measured in a new process.
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=simulate_devices
    ) as pool:
        rows = [
            row for n in devices for row in pool.submit(measure_sharded, n, shape, ROUNDS).result()
        ]
    return Result(
        "sync_batch_norm",
        f"gradients of batch norm over simulated devices, {shape}",
        {"shape": shape, "rounds": ROUNDS},
        rows,
        [KEPT, "all-reduces: of the whole program, with the gradients of scale and bias."],
    )


def run(size: Size) -> Iterator[Result]:
    shape, rounds = ((32, 56, 56, 64), 10) if size == "published" else ((8, 28, 28, 64), 7)
    for dtype in ("float32", "bfloat16"):
        yield measure_norms(shape, dtype, rounds)
    yield measure_devices(SHARDED[size])
