"""Batch norm over devices: Flax's two classes with an `axis_name`, and effjax's drop-ins for them.

How often the devices wait for each other (all-reduces in the compiled program), what is kept for
the backward pass, and how far the variance is off where the mean is large. On a CPU the devices are
simulated, and share its cores: their times say what the work costs, and nothing of a network.
"""

import functools
import json as json_of
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import linen, nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import linen as our_linen
from .. import nnx as our_nnx
from ..memory import collectives, residual_bytes
from ._measure import compile_step, difference, time_in_turn
from ._result import Bars, Result, Size, publish

DEVICES = 1, 2, 4, 8
MEANS = 0.0, 1e2, 1e4
SIZES = {"small": (64, 14, 14, 32), "published": (64, 28, 28, 64)}
AXIS = "data"
REFERENCE = "Flax linen.BatchNorm"
# (x, scale, bias) -> (y, variance), on one device of the axis.
Norm = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def linen_norm(cls: type[linen.BatchNorm], **options: Any) -> Norm:
    def norm(x, scale, bias):
        module = cls(use_running_average=False, momentum=0.0, axis_name=AXIS, **options)
        stats = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        found: Any = module.apply(variables, x, mutable=["batch_stats"])
        y, new = found
        return y, new["batch_stats"]["var"]

    return norm


def nnx_norm(cls: type[nnx.BatchNorm]) -> Norm:
    def norm(x, scale, bias):
        options: dict[str, Any] = dict(momentum=0.0, axis_name=AXIS, rngs=nnx.Rngs(0))
        module = cls(x.shape[-1], use_running_average=False, **options)
        module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
        return module(x), module.var[...]

    return norm


NORMS: dict[str, Norm] = {
    REFERENCE: linen_norm(linen.BatchNorm),
    "Flax nnx.BatchNorm": nnx_norm(nnx.BatchNorm),
    "effjax.linen.BatchNorm": linen_norm(our_linen.BatchNorm),
    "effjax.nnx.BatchNorm": nnx_norm(our_nnx.BatchNorm),
}
STABLE = {"Flax, use_fast_variance=False": linen_norm(linen.BatchNorm, use_fast_variance=False)}


def over(mesh: Mesh, fn: Callable, out_specs: Any) -> Callable:
    """fn of a shard of the batch, and of what is the same on all devices."""

    def step(x, scale, bias, *others):
        in_specs = (P(AXIS), P(), P(), *(P(AXIS) for _ in others))
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(
            x, scale, bias, *others
        )

    return step


def train_step(norm: Norm) -> Callable:
    def loss(x, scale, bias, weights):
        return jnp.sum(norm(x, scale, bias)[0] * weights)

    return jax.grad(loss, argnums=(0, 1, 2))


def bench_devices(mesh: Mesh, shape: tuple[int, ...], rounds: int) -> list[dict]:
    """A row a class: gradients of a batch that the devices of the mesh share."""
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))
    args = x, jnp.ones(shape[-1]), jnp.zeros(shape[-1]), weights
    programs, rows = {}, []
    for name, norm in NORMS.items():
        programs[name] = compile_step(over(mesh, train_step(norm), (P(AXIS), P(), P())), *args)
    runs = {name: functools.partial(found["run"], *args) for name, found in programs.items()}
    times, want = time_in_turn(runs, reference=REFERENCE, rounds=rounds), runs[REFERENCE]()
    for name, found in programs.items():
        alike = collectives(found["run"].as_text())
        forward = over(mesh, lambda *a, n=name: NORMS[n](*a)[0], P(AXIS))
        rows.append(
            {"name": name, "devices": mesh.size}
            | times[name]
            | {
                "all_reduces": sum(c.count for c in alike if c.kind == "all-reduce"),
                "kept": round(residual_bytes(forward, *args[:3]).bytes / x.nbytes, 2),
                "temp_bytes": found["temp_bytes"],
                "compile_seconds": found["compile_seconds"],
                "difference": float(f"{difference(runs[name](), want):.1e}"),
            }
        )
    return rows


def variance_errors(mesh: Mesh, shape: tuple[int, ...], means: Sequence[float]) -> list[dict]:
    """A row a mean and class: the largest relative error of a channel's variance, which is 1."""
    rows = []
    norms = NORMS | STABLE
    ones = jnp.ones(shape[-1])
    compiled = {
        name: jax.jit(over(mesh, lambda *a, n=norm: n(*a)[1], P())) for name, norm in norms.items()
    }
    for mean in means:
        x = np.random.default_rng(0).normal(mean, 1, shape).astype(np.float32)
        want = x.astype(np.float64).var((0, 1, 2))
        for name, variance in compiled.items():
            got = np.asarray(variance(jnp.asarray(x), ones, ones), np.float64)
            error = float(np.max(np.abs(got - want) / want))
            rows.append({"name": name, "mean": mean, "variance_error": float(f"{error:.1e}")})
    return rows


def meshes(devices: Sequence[int]) -> list[Mesh]:
    """Of the first devices that there are."""
    found = jax.devices()
    return [
        jax.make_mesh((n,), (AXIS,), (AxisType.Auto,), devices=found[:n])
        for n in devices
        if n <= len(found)
    ]


def measure_all(shape: tuple[int, ...], devices: Sequence[int], rounds: int) -> dict[str, Any]:
    """Rows of both tables."""
    found = meshes(devices)
    return {
        "devices": [row for mesh in found for row in bench_devices(mesh, shape, rounds)],
        "errors": variance_errors(found[-1], shape, MEANS),
    }


def tables(rows: dict[str, Any], shape: tuple[int, ...], rounds: int) -> list[Result]:
    config = {"shape": shape, "dtype": "float32", "rounds": rounds, "reference": REFERENCE}
    over_devices = Result(
        "sync_batch_norm",
        f"gradients of batch norm over simulated devices, {shape}",
        config,
        rows["devices"],
        Bars("all_reduces", "all-reduces, forward and backward together", groups=["devices"]),
        [
            "kept: for the backward pass, in multiples of the input's bytes. all-reduces: of the "
            "whole program, the sums of the gradients of scale and bias included. The devices are "
            "simulated and share the cores of one CPU."
        ],
    )
    errors = Result(
        "sync_batch_norm_error",
        "relative error of the variance against float64, by the mean of the values (deviation 1)",
        {"shape": shape, "dtype": "float32"},
        rows["errors"],
        Bars("variance_error", "largest relative error of a channel", groups=["mean"], log=True),
    )
    return [over_devices, errors]


def results(size: Size) -> Iterator[Result]:
    """In a process of its own: the number of devices is that of a process, and takes threads."""
    shape, rounds = SIZES[size], 5
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        shown = [str(n) for n in shape]
        command = [sys.executable, "-m", __name__, "--shape", *shown, "--rows", str(file)]
        flags = os.environ.get("XLA_FLAGS", "").split()
        flags = [f for f in flags if "xla_force_host_platform_device_count" not in f]
        source = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, source)),
        }  # fmt: skip
        subprocess.run([*command, "--rounds", str(rounds)], check=True, env=environment)
        rows = json_of.loads(file.read_text())
    yield from tables(rows, shape, rounds)


def main(
    shape: Annotated[tuple[int, int, int, int], typer.Option(help="N, H, W and C.")] = (
        SIZES["published"]
    ),
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    rows: Annotated[Path | None, typer.Option(help="Print nothing; write the rows here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Counts, times and compares batch norm over 1, 2, 4 and 8 simulated devices."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))  # before a backend starts
    found = measure_all(shape, DEVICES, rounds)
    if rows:
        rows.write_text(json_of.dumps(found))
        return
    for result in tables(found, shape, rounds):
        publish(result, json)


if __name__ == "__main__":
    typer.run(main)
