"""Forward and backward pass over a batch that jit may have split and vmap may have doubled.

Every image is on its own, but for the gradient of the kernel, which is summed over the images. So
each device works through its own images, and one all-reduce at the end adds the kernel gradients.
Left to itself, XLA would gather the operands of a custom call, and reduce in every turn of a loop.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._parallel import manual_axes
from . import chunks
from .chunks import Static
from .guards import first_order

# Axes of examples (d) and images (n) by operand; the others are worked through whole.
_X, _OFFSET, _MASK, _OUT = "d n h w c", "d n p q s", "d n p q m", "d n p q o"


def forward(static: Static, x, offset, mask, kernel) -> jax.Array:
    """As in `chunks`: arrays [D, N, ...] and kernels [1 or D, ...]."""
    return _forward_of(static)(x, offset, mask, kernel)[0]


def backward(static: Static, x, offset, mask, kernel, dy) -> tuple:
    return _backward_of(static)(x, offset, mask, kernel, dy)


@functools.cache
def _forward_of(static: Static) -> Callable:
    def run(*args):
        return (chunks.forward(static, *args),)

    def partitioned(*args):
        rule = f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(args)} -> {_OUT}"
        return _partition(run, rule, *args)

    return _over_images(run, partitioned)


@functools.cache
def _backward_of(static: Static) -> Callable:
    run = functools.partial(chunks.backward, static)

    def partitioned(*args):
        inputs = f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(args)}, {_OUT}"
        rule = f"{inputs} -> {_X}, {_OFFSET}, {_MASK}, d i j f o"
        return _partition(run, rule, *args)

    return _over_images(run, partitioned)


def _over_images(run: Callable, partitioned: Callable) -> Callable:
    """`run` where shard_map has split the images already, `partitioned` where jit may."""
    return first_order(
        _over_examples(lambda *args: (partitioned if _can_partition(args[0]) else run)(*args))
    )


def _can_partition(x: jax.Array) -> bool:
    """Not inside shard_map; and not in float64 where only ``with jax.enable_x64`` allows it:

    XLA partitions a program in threads of its own, which know nothing of a `with`.
    """
    if manual_axes() or x.dtype != jnp.float64:
        return not manual_axes()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.dtypes.canonicalize_dtype("float64") == x.dtype).result()


def _kernel_rule(args: tuple) -> str:
    x, _, _, kernel, *_ = args
    return "d i j f o" if kernel.shape[0] == x.shape[0] else "e i j f o"


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


def _over_examples(op: Callable) -> Callable:
    """Under vmap: the new axis becomes part of D, of every operand and result. No loop."""
    mapped = custom_vmap(op)

    @mapped.def_vmap
    def _(size, batched, *args):
        examples = args[0].shape[1] if batched[0] else args[0].shape[0]

        def fold(a, is_batched, position):
            if position == 3 and not is_batched and a.shape[0] == 1:
                return a  # one kernel for all
            if not is_batched:
                a = jnp.broadcast_to(a, (size, *a.shape))
            elif position == 3 and a.shape[1] != examples:
                a = jnp.broadcast_to(a, (size, examples, *a.shape[2:]))
            return a.reshape(size * a.shape[1], *a.shape[2:])

        folded = [fold(a, b, i) for i, (a, b) in enumerate(zip(args, batched, strict=True))]
        results = mapped(*folded)
        split = tuple(r.reshape(size, examples, *r.shape[1:]) for r in results)
        return split, (True,) * len(split)

    return mapped
