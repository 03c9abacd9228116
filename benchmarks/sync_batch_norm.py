"""Batch norm over devices: Flax's classes with an `axis_name` and effjax's drop-in replacements.

The first table has the time of a gradient, the number of all-reduces of the compiled program and
the bytes kept for the backward pass. The second one has the error of the variance for large means.
The devices are simulated on one CPU and share its cores, so the times show the work and not the
network.
"""

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import effjax.linen
import effjax.nnx
from effjax.memory import collectives, residual_bytes

from .measure import compile_program, relative_difference, time_in_turn
from .results import Bars, Result, Size

DEVICES = (1, 2, 4, 8)
MEANS = (0.0, 1e2, 1e4)  # of inputs with standard deviation 1
# [N, H, W, C] of the whole batch; N is divided over the devices.
SHAPES: dict[Size, tuple[int, ...]] = {"small": (64, 14, 14, 32), "published": (64, 28, 28, 64)}
ROUNDS = 5
AXIS = "data"
REFERENCE = "Flax linen.BatchNorm"
# (x, scale, bias) -> (y, variance of the whole batch), mapped over the axis AXIS.
Norm = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_linen_norm(cls: type[linen.BatchNorm], **options: Any) -> Norm:
    def norm(x, scale, bias):
        # With momentum 0, the updated running variance is the variance of the batch.
        module = cls(use_running_average=False, momentum=0.0, axis_name=AXIS, **options)
        stats = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        output: Any = module.apply(variables, x, mutable=["batch_stats"])
        y, updates = output
        return y, updates["batch_stats"]["var"]

    return norm


def make_nnx_norm(cls: type[nnx.BatchNorm]) -> Norm:
    def norm(x, scale, bias):
        options: dict[str, Any] = dict(momentum=0.0, axis_name=AXIS, rngs=nnx.Rngs(0))
        module = cls(x.shape[-1], use_running_average=False, **options)
        module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
        return module(x), module.var[...]

    return norm


NORMS: dict[str, Norm] = {
    REFERENCE: make_linen_norm(linen.BatchNorm),
    "Flax nnx.BatchNorm": make_nnx_norm(nnx.BatchNorm),
    "effjax.linen.BatchNorm": make_linen_norm(effjax.linen.BatchNorm),
    "effjax.nnx.BatchNorm": make_nnx_norm(effjax.nnx.BatchNorm),
}
# A further row of the second table: Flax's variance in two passes.
STABLE_NORMS = {
    "Flax, use_fast_variance=False": make_linen_norm(linen.BatchNorm, use_fast_variance=False)
}


def shard_batch(mesh: Mesh, fn: Callable, out_specs: Any) -> Callable:
    """Map `fn(x, scale, bias, *others)` over the batch of `x` and `others`; replicate the rest."""

    def mapped(x, scale, bias, *others):
        in_specs = (P(AXIS), P(), P(), *(P(AXIS) for _ in others))
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return sharded(x, scale, bias, *others)

    return mapped


def make_gradient(norm: Norm) -> Callable:
    """Return the gradients (dx, dscale, dbias) of a weighted sum of the norm's outputs."""

    def loss(x, scale, bias, weights):
        return jnp.sum(norm(x, scale, bias)[0] * weights)

    return jax.grad(loss, argnums=(0, 1, 2))


def measure_gradients(mesh: Mesh, shape: tuple[int, ...], rounds: int) -> list[dict]:
    """Time the gradients of a batch that is sharded over the mesh; return a row per class.

    "kept" is the size of the residuals as a multiple of x.
    """
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))
    args = x, jnp.ones(shape[-1]), jnp.zeros(shape[-1]), weights
    compiled, compiler = {}, {}
    for name, norm in NORMS.items():
        step = shard_batch(mesh, make_gradient(norm), (P(AXIS), P(), P()))
        compiled[name], compiler[name] = compile_program(step, *args)
    runs = {name: functools.partial(program, *args) for name, program in compiled.items()}
    times = time_in_turn(runs, reference=REFERENCE, rounds=rounds)
    expected = runs[REFERENCE]()
    rows = []
    for name, norm in NORMS.items():
        forward = shard_batch(mesh, lambda *a, norm=norm: norm(*a)[0], P(AXIS))
        counts = collectives(compiled[name].as_text())
        rows.append(
            {
                "name": name,
                "devices": mesh.size,
                **times[name],
                "all_reduces": sum(c.count for c in counts if c.kind == "all-reduce"),
                "kept": round(residual_bytes(forward, *args[:3]).bytes / x.nbytes, 2),
                **compiler[name],
                "difference": relative_difference(runs[name](), expected),
            }
        )
    return rows


def measure_variance_errors(
    mesh: Mesh, shape: tuple[int, ...], means: Sequence[float]
) -> list[dict]:
    """Return a row per mean and class: the largest relative error of a channel's variance."""
    ones = jnp.ones(shape[-1])
    compiled = {
        name: jax.jit(shard_batch(mesh, lambda *a, norm=norm: norm(*a)[1], P()))
        for name, norm in (NORMS | STABLE_NORMS).items()
    }
    rows = []
    for mean in means:
        x = np.random.default_rng(0).normal(mean, 1, shape).astype(np.float32)
        expected = x.astype(np.float64).var((0, 1, 2))
        for name, variance in compiled.items():
            actual = np.asarray(variance(jnp.asarray(x), ones, ones), np.float64)
            error = float(np.max(np.abs(actual - expected) / expected))
            rows.append({"name": name, "mean": mean, "variance_error": float(f"{error:.1e}")})
    return rows


def make_mesh(num_devices: int) -> Mesh:
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,), devices=devices)


def measure_all(
    shape: tuple[int, ...], rounds: int, devices: Sequence[int]
) -> tuple[list[dict], list[dict]]:
    """Return the rows of both tables."""
    gradients = [row for n in devices for row in measure_gradients(make_mesh(n), shape, rounds)]
    return gradients, measure_variance_errors(make_mesh(devices[-1]), shape, MEANS)


def simulate_devices() -> None:
    """Give this process as many simulated CPU devices as DEVICES needs."""
    # The flag sets the same number. Without it, the two settings cannot contradict each other.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))


def run(size: Size, devices: Sequence[int] = DEVICES) -> Iterator[Result]:
    shape = SHAPES[size]
    # JAX fixes the number of devices when it initializes a backend, and simulated devices would
    # take threads from other benchmarks. So this one runs in a new process.
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=simulate_devices
    ) as pool:
        gradients, errors = pool.submit(measure_all, shape, ROUNDS, devices).result()
    config = {"shape": shape, "dtype": "float32"}
    yield Result(
        "sync_batch_norm",
        f"gradients of batch norm over simulated devices, {shape}",
        config | {"rounds": ROUNDS, "reference": REFERENCE},
        gradients,
        Bars("all_reduces", "all-reduces, forward and backward together", groups=["devices"]),
        [
            "kept: for the backward pass, in multiples of the input's bytes.",
            "all-reduces: of the whole program, with the sums of the gradients of scale and bias.",
            "The devices are simulated and share the cores of one CPU.",
        ],
    )
    yield Result(
        "sync_batch_norm_error",
        "relative error of the variance against float64, by the mean of the values (deviation 1)",
        config,
        errors,
        Bars("variance_error", "largest relative error of a channel", groups=["mean"], log=True),
    )
