"""The core of the sampling operators, which read images at computed positions.

An operator has a function for the forward pass and one for the backward pass. Between them only its
inputs are kept. This module makes it differentiable, in reverse mode only; lets jit shard its
batch; and lets vmap extend it.

The images of a batch are independent of each other, except that the gradients of shared operands
(such as a kernel) are sums over the images. Each device processes its own images, and one
all-reduce adds these gradients at the end. XLA's partitioner would instead gather the operands of a
custom call, and all-reduce in every iteration of a loop.
"""

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._common.derivatives import forbid_higher_order, reverse_mode_only
from .._common.platform import follow_arrays, traced_platform
from .._common.sharding import manual_axes


def differentiable(
    forward: Callable,
    backward: Callable,
    derivatives_error: str,
    kept: int | None = None,
    complete: Callable = lambda gradients, residuals, dy: gradients,
    barrier: bool = True,
) -> Callable:
    """Return ``op(*arrays) -> y`` for arrays [N, ...].

    Args:
        forward: From `partition_over_images`; its result is (y,).
        backward: From `partition_over_images`; ``backward(*residuals, dy) -> gradients``.
        derivatives_error: The error for forward-mode and second derivatives.
        kept: How many of the arrays the backward pass reads, the first ones. None for all.
        complete: ``complete(gradients, residuals, dy)`` returns a gradient for each array.
        barrier: Whether XLA must compute again what both passes need, instead of keeping it.
    """

    @jax.custom_vjp
    def op(*arrays):
        return forward(*_add_example_axis(arrays))[0][0]

    @follow_arrays
    def op_forward(*arrays):
        return forward(*_add_example_axis(arrays))[0][0], arrays[:kept]

    @follow_arrays
    def op_backward(residuals, dy):
        if barrier:
            residuals, dy = lax.optimization_barrier((residuals, dy))
        gradients = backward(*_add_example_axis((*residuals, dy)))
        # Gradients are summed in a wider dtype.
        gradients = [d[0].astype(a.dtype) for d, a in zip(gradients, residuals, strict=False)]
        return tuple(complete(gradients, residuals, dy))

    op.defvjp(op_forward, op_backward)
    return lambda *arrays: op(*reverse_mode_only(derivatives_error, *arrays))


def merge_examples(run: Callable) -> Callable:
    """Return a function of arrays [D, N, ...] that runs `run` on [D * N, ...].

    Its result is a tuple, also if that of `run` is one array.
    """

    def merged(*args):
        results = run(*map(merge_example_axis, args))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(r.reshape(*args[0].shape[:2], *r.shape[1:]) for r in results)

    return merged


def partition_over_images(
    run: Callable,
    rule: str | Callable[..., str],
    derivatives_error: str,
    shared: Collection[int] = (),
) -> Callable:
    """Return `run` such that each device processes its own images.

    vmap extends the examples, without a loop. Derivatives of the result are errors.

    Args:
        run: ``run(*arrays) -> tuple of arrays``. Arrays are [D, N, ...]: D examples (the axis that
            vmap adds; 1 without vmap) of N images.
        rule: The axes of operands and results, such as "d n h w, d n r -> d n r, d i o", or a
            function of the operands that returns them. d and n are sharded as in the operands.
            Results without n are summed over the images.
        derivatives_error: the error for second derivatives.
        shared: positions of the operands without images, such as a kernel. vmap does not repeat
            them if they are the same for all examples (D = 1).
    """

    def partitioned(*args):
        return _partition(run, rule(*args) if callable(rule) else rule, *args)

    def dispatch(*args):
        return (partitioned if _can_partition(args[0]) else run)(*args)

    return forbid_higher_order(_merge_vmap_axis(dispatch, shared), derivatives_error)


def _add_example_axis(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    # [N, ...] -> [1, N, ...]
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
