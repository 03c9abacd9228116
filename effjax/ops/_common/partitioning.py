"""Operators whose batch may be sharded by jit and extended by vmap.

The images of a batch are independent of each other, except that the gradients of shared operands
(such as a kernel) are sums over the images. Each device processes its own images, and one
all-reduce adds these gradients at the end. XLA's partitioner would instead gather the operands of a
custom call, and all-reduce in every iteration of a loop.
"""

import math
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .derivatives import forbid_higher_order
from .platform import traced_platform
from .sharding import manual_axes


def partition_over_images(
    run: Callable, rule: Callable[..., str], derivatives_error: str, shared: Collection[int] = ()
) -> Callable:
    """Return `run` such that each device processes its own images.

    Args:
        run: ``run(*arrays) -> tuple of arrays``. Arrays are [D, N, ...]: D examples (the axis that
            vmap adds; 1 without vmap) of N images.
        rule: ``rule(*arrays)`` names the axes of operands and results, such as
            "d n h w, d n r -> d n r, d i o". d and n are sharded as in the operands. Results
            without n are summed over the images.
        derivatives_error: the error for second derivatives.
        shared: positions of the operands without images, such as a kernel. vmap does not repeat
            them if they are the same for all examples (D = 1).
    """

    def partitioned(*args):
        return _partition(run, rule(*args), *args)

    def dispatch(*args):
        return (partitioned if _can_partition(args[0]) else run)(*args)

    return forbid_higher_order(_merge_vmap_axis(dispatch, shared), derivatives_error)


def add_example_axis(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reshape [N, ...] to [1, N, ...]."""
    return tuple(a[None] for a in arrays)


def merge_example_axis(a: jax.Array) -> jax.Array:
    """Reshape [D, N, ...] to [D * N, ...]."""
    return a.reshape(math.prod(a.shape[:2]), *a.shape[2:])


def _can_partition(x: jax.Array) -> bool:
    # Inside shard_map the batch is local already.
    if manual_axes():
        return False
    # The compiler for TPUs cannot call the rule (jax-ml/jax#38196). It partitions `run` instead.
    # `lax.platform_dependent` would leave a conditional in the programs for CPUs and GPUs.
    if traced_platform() == "tpu":
        return False
    if x.dtype != jnp.float64:
        return True
    # XLA calls the partitioning rule from its own threads, where `with jax.enable_x64()` has no
    # effect: float64 works there only if it is enabled globally, which a new thread shows.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.dtypes.canonicalize_dtype("float64") == x.dtype).result()


def _partition(run: Callable, rule: str, *args) -> tuple:
    inputs, outputs = ([a.split() for a in side.split(",")] for side in rule.split("->"))

    def partition(mesh, operands, _):
        axes = _mesh_axes(mesh, operands, inputs)

        def local(*args):
            results = run(*args)
            if axes["n"] is None:
                return results
            return tuple(
                r if "n" in names else lax.psum(r, axes["n"])
                for r, names in zip(results, outputs, strict=True)
            )

        def shardings(sides):
            specs = (PartitionSpec(*(axes.get(name) for name in names)) for names in sides)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, local, shardings(outputs), shardings(inputs)

    parallel = custom_partitioning(run)
    parallel.def_partition(partition=partition, sharding_rule=rule)
    return parallel(*args)


def _mesh_axes(mesh, operands, inputs: list) -> dict:
    """Return the mesh axes that shard the examples (d) and the images (n), from the operands."""
    axes: dict = {"d": None, "n": None}
    used = set()  # a spec may name each mesh axis once
    for operand, names in zip(operands, inputs, strict=True):
        spec = () if operand.sharding is None else operand.sharding.spec
        for name, axis, size in zip(names, spec, operand.shape, strict=False):
            if name not in axes or axes[name] is not None or axis is None:
                continue
            mesh_axes = axis if isinstance(axis, tuple) else (axis,)
            # XLA pads the last shard if the size does not divide; sums would include the padding.
            divides = size % math.prod(mesh.shape[a] for a in mesh_axes) == 0
            if divides and not used & set(mesh_axes):
                axes[name] = axis
                used |= set(mesh_axes)
    return axes


def _merge_vmap_axis(op: Callable, shared: Collection[int]) -> Callable:
    """Return `op` such that vmap extends the examples D of operands and results, without a loop."""
    mapped = custom_vmap(op)

    @mapped.def_vmap
    def _(size, batched, *args):
        examples = args[0].shape[1] if batched[0] else args[0].shape[0]

        def fold(a, is_batched, position):
            if position in shared and not is_batched and a.shape[0] == 1:
                return a
            if not is_batched:
                a = jnp.broadcast_to(a, (size, *a.shape))
            elif position in shared and a.shape[1] != examples:
                a = jnp.broadcast_to(a, (size, examples, *a.shape[2:]))
            return a.reshape(size * a.shape[1], *a.shape[2:])

        folded = [fold(a, b, i) for i, (a, b) in enumerate(zip(args, batched, strict=True))]
        results = mapped(*folded)
        unfolded = tuple(r.reshape(size, examples, *r.shape[1:]) for r in results)
        return unfolded, (True,) * len(unfolded)

    return mapped
