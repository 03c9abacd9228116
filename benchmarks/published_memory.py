"""Planned memory of programs beside the memory that others printed on GPUs.

JAX's notebook on host offloading prints `memory_analysis()` of five programs on a GPU. They are
planned here, and the same totals are compared: arguments, outputs and temporaries, without aliases.
The gradients of parameters in host memory are placed on the device, where the notebook's JAX left
them; newer ones leave them on the host. The notebook names neither the GPU nor the versions. Its
temporaries contain a workspace of 4 MiB of cuBLAS, which is larger on Hopper, so the plan is for an
A100.

A report of XLA has a program that ran out of memory on a GH200, with the bytes that its allocator
was asked for and those of the program.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from effjax.memory import plan

from .measure import need_compiler
from .results import Bars, Result, Size

NOTEBOOK = (
    "https://github.com/jax-ml/jax/blob/0aff2ab51e8e5c250f987ce11004a1aced56e22a/"
    "docs/notebooks/host-offloading.ipynb"
)
REPORT = "https://github.com/openxla/xla/issues/27322"
MIB, GIB = 2**20, 2**30


class Printed(NamedTuple):
    """A program, and the bytes that were printed; the notebook rounds them to two decimals."""

    name: str
    target: str
    temporaries: float
    total: float
    unit: int


PRINTED = (
    Printed("matrix products in a scan", "a100-80", 17.25, 57.50, MIB),
    Printed("… activations on the host", "a100-80", 6.50, 46.75, MIB),
    Printed("… and parameters", "a100-80", 4.75, 25.00, MIB),
    Printed("four layers, Adam", "a100-80", 2.11, 4.59, GIB),
    Printed("… moments on the host", "a100-80", 1.91, 2.87, GIB),
    Printed("16 scans", "gh200", 102432004352 / GIB, 102432320060 / GIB, GIB),
)


def programs(num_layers: int, width: int, dim: int, length: int) -> list[tuple[Any, ...]]:
    """Return the programs, ``(fun, *args)``, in the order of `PRINTED`."""
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    on_device = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    on_host = on_device.with_memory_kind("pinned_host")
    place = lambda tree, where: jax.tree.map(  # noqa: E731
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree
    )

    x = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=on_device)
    shapes = (num_layers, width, 4 * width), (num_layers, 4 * width, width)
    weights = place(tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), on_device)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return checkpoint_name(x, "x") @ w[0] @ w[1], None

    def loading_layer(x: Any, w: Any) -> tuple[Any, None]:
        return layer(x, jax.device_put(w, on_device))

    def grad_of(layer: Any) -> Any:
        return jax.jit(jax.grad(lambda w, x: jax.lax.scan(layer, x, w)[0].sum()))

    offloaded, loaded = (
        jax.remat(f, policy=policy, prevent_cse=False) for f in (layer, loading_layer)
    )

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    matrix = jax.ShapeDtypeStruct((dim, dim), jnp.float32, sharding=on_device)
    params = dict.fromkeys(("w1", "w2", "w3", "w4"), matrix)
    moments = place(jax.eval_shape(optimizer.init, params), on_device)

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))

    def loss(params: Any, inputs: Any) -> Any:
        x = inputs
        for w in params.values():
            x = gelu(x @ w)
        return ((x - inputs) ** 2).mean() + 0.001 * sum((w**2).sum() for w in params.values())

    def step(params: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss)(params, inputs)
        updates, state = optimizer.update(grads, jax.device_put(state, on_device), params)
        return optax.apply_updates(params, updates), state

    def scans(x: Any) -> Any:
        for _ in range(16):
            x, sums = jax.lax.scan(lambda a, y: (a + y, a + y), x, jnp.ones(length))
            x += sums.sum(-1)
        return x

    return [
        (grad_of(layer), weights, x),
        (grad_of(offloaded), weights, x),
        (jax.jit(grad_of(loaded), out_shardings=on_device), place(weights, on_host), x),
        (jax.jit(step, donate_argnums=(0, 1)), params, moments, matrix),
        (
            jax.jit(step, donate_argnums=0, out_shardings=(on_device, on_host)),
            params, place(moments, on_host), matrix,
        ),
        (scans, jax.ShapeDtypeStruct((length,), jnp.float32)),
    ]  # fmt: skip


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    sizes = (10, 256, 7168, 40000) if size == "published" else (2, 64, 128, 256)
    rows = []
    for printed, (fun, *args) in zip(PRINTED, programs(*sizes), strict=True):
        planned = plan(fun, *args, target=printed.target)
        total = round(printed.total * printed.unit)
        rows.append({
            "name": printed.name,
            "target": printed.target,
            "unit_bytes": printed.unit,
            "printed_temporary_bytes": round(printed.temporaries * printed.unit),
            "printed_bytes": total,
            "planned_temporary_bytes": planned.device.temporaries,
            "planned_device_bytes": planned.device.total,
            "planned_host_bytes": planned.peak_host_bytes,
            "ratio": planned.device.total / total,
        })  # fmt: skip
    yield Result(
        "published_memory",
        "planned memory of programs, and what others printed on GPUs",
        {"sources": [NOTEBOOK, REPORT]},
        rows,
        Bars("ratio", "planned device memory relative to what was printed"),
        ["The printed bytes are those of the compiler on a GPU, not of its whole memory."],
    )
