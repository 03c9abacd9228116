"""Operators on batches that jit may have split and vmap may have doubled.

Every image is on its own, but for the gradients of what all of them share, which are summed over
the images. So each device works through its own images, and one all-reduce at the end adds those
gradients. Left to itself, XLA would gather the operands of a custom call, and reduce in every turn
of a loop.
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
from .sharding import manual_axes


def partition_over_images(
    run: Callable, rule: Callable[..., str], operator: str, shared: Collection[int] = ()
) -> Callable:
    """`run(*arrays) -> tuple`, on each device's images alone; a part of the named operator.

    Arrays are [D, N, ...], of D examples that vmap adds (1 without it) and N images; `run` finds
    each device's own. ``rule(*arrays)`` names the axes, "d n h w, d n r -> d n r, d i o": d and n
    are split as any operand has them, and results without n are summed over the images.

    Args:
        shared: positions of the operands that have no images, and one example where it is the same
            for all.
    """

    def partitioned(*args):
        return _partition(run, rule(*args), *args)

    def split(*args):  # shard_map has split the images already, jit may
        return (partitioned if _can_partition(args[0]) else run)(*args)

    return forbid_higher_order(_over_examples(split, shared), operator)


def add_example_axis(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[N, ...] as [D, N, ...]"""
    return tuple(a[None] for a in arrays)


def merge_example_axis(a: jax.Array) -> jax.Array:
    """[D, N, ...] as [D * N, ...]"""
    return a.reshape(math.prod(a.shape[:2]), *a.shape[2:])


def _can_partition(x: jax.Array) -> bool:
    """Not inside shard_map; and not in float64 where only ``with jax.enable_x64`` allows it:

    XLA partitions a program in threads of its own, which know nothing of a `with`.
    """
    if manual_axes() or x.dtype != jnp.float64:
        return not manual_axes()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.dtypes.canonicalize_dtype("float64") == x.dtype).result()


def _partition(run: Callable, rule: str, *args) -> tuple:
    """Runs on each device's examples and images; sums what has no axis of images over them."""
    inputs, outputs = ([a.split() for a in side.split(",")] for side in rule.split("->"))

    def partition(mesh, operands, _):
        axes = _axes_to_split(mesh, operands, inputs)

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


def _axes_to_split(mesh, operands, inputs: list) -> dict:
    """Over which mesh axes the examples (d) and the images (n) are split, as any operand has them.

    Not where they do not divide: XLA fills up the last shard with what must not be summed. And
    each mesh axis once.
    """
    axes: dict = {"d": None, "n": None}
    used = set()
    for operand, names in zip(operands, inputs, strict=True):
        spec = () if operand.sharding is None else operand.sharding.spec
        for name, axis, size in zip(names, spec, operand.shape, strict=False):
            parts = axis if isinstance(axis, tuple) else (axis,)
            if name not in axes or axes[name] is not None or axis is None or used & set(parts):
                continue
            if size % math.prod(mesh.shape[a] for a in parts) == 0:
                axes[name] = axis
                used |= set(parts)
    return axes


def _over_examples(op: Callable, shared: Collection[int]) -> Callable:
    """Under vmap: the new axis becomes part of D, of every operand and result. No loop."""
    mapped = custom_vmap(op)

    @mapped.def_vmap
    def _(size, batched, *args):
        examples = args[0].shape[1] if batched[0] else args[0].shape[0]

        def fold(a, is_batched, position):
            if position in shared and not is_batched and a.shape[0] == 1:
                return a  # one for all
            if not is_batched:
                a = jnp.broadcast_to(a, (size, *a.shape))
            elif position in shared and a.shape[1] != examples:
                a = jnp.broadcast_to(a, (size, examples, *a.shape[2:]))
            return a.reshape(size * a.shape[1], *a.shape[2:])

        folded = [fold(a, b, i) for i, (a, b) in enumerate(zip(args, batched, strict=True))]
        results = mapped(*folded)
        split = tuple(r.reshape(size, examples, *r.shape[1:]) for r in results)
        return split, (True,) * len(split)

    return mapped
