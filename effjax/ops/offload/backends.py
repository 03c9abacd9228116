"""Requirements of XLA on each platform for slices of host arrays that are streamed.

- GPUs: compiler options, an error where a program would be compiled wrong, and turns outside of a
  loop.
- TPUs: loops with two turns per iteration, conditionals that keep unrolled slices in order, and the
  layout of slices.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .._common.platform import traced_platform
from .._common.sharding import cast_to_varying, explicit_axes, explicit_spec, varying_axes
from .placement import Space, put, space_of
from .trees import Tree, is_key

# Options for GPUs.

# XLA for GPUs before this version of JAX silently reads the wrong slice of a host array if the
# index is computed from the loop counter, as in i + 1 or a reversed loop (openxla/xla#46231).
_FIRST_CORRECT_VERSION = (0, 11, 2)
_WORKAROUND = {"xla_disable_hlo_passes": "fusion-dynamic-memcpy-rewriter,dynamic-slice-annotator"}
# By default XLA allows two copies next to the matrix products. Its selective overlap makes a step
# wait longer for the copies of the optimizer's state.
_OVERLAP = {"xla_gpu_experimental_parallel_async_compute_limit": 32}
_SELECTIVE_OVERLAP = {"xla_gpu_experimental_enable_selective_memcpy_overlap": False}
# The latency-hiding scheduler would load all slices of an unrolled model at the start.
_NO_LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": False}
FASTER_OPTIONS = _OVERLAP | _SELECTIVE_OVERLAP  # they only affect speed


# The guard: a primitive without effect on values. It marks programs that offload, so that the
# options can be chosen from the traced program, and it fails to lower for GPUs where a plain
# jax.jit would compile wrong code. The platform is known only then.

_guard_p = Primitive("effjax_offload_guard")
_guard_p.def_abstract_eval(lambda x, **_: x)

_guard_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("allowed", default=False)


def mark_host_slices() -> jax.Array:
    """Return zero, to be used as the first index of a loop over slices of host arrays.

    An unused guard would be removed from the program.
    """
    return _bind_guard(in_order=False)


def mark_in_order() -> jax.Array:
    """Return zero, to be passed to the first `run_in_order` of unrolled slices."""
    zero = _bind_guard(in_order=True)
    return zero + _zero_unknown_to_compiler() if traced_platform() == "tpu" else zero


def _bind_guard(in_order: bool) -> jax.Array:
    if getattr(jax.config, "jax_scan3", False):
        raise NotImplementedError(
            "Offloading does not support jax_scan3, which moves host arrays of a loop to the "
            'device. Turn it off with jax.config.update("jax_scan3", False).'
        )
    return _guard_p.bind(jnp.int32(0), in_order=in_order)


@contextlib.contextmanager
def allow_guard() -> Iterator[None]:
    """Allow lowering for GPUs; the caller compiles with `needed_options`."""
    token = _guard_allowed.set(True)
    try:
        yield
    finally:
        _guard_allowed.reset(token)


def needed_options(jaxpr: Any) -> dict[str, Any]:
    """Return the compiler options that a program needs on a GPU; none if it does not offload."""
    guards = set(_find_guards(jaxpr))
    options = {}
    if False in guards:
        options |= _OVERLAP
        options |= _WORKAROUND if host_slices_are_wrong() else _SELECTIVE_OVERLAP
    if True in guards:
        options |= _NO_LATENCY_HIDING
    return options


def _find_guards(jaxpr: Any) -> Iterator[bool]:
    """Yield `in_order` of each guard in a program."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is _guard_p:
            yield eqn.params["in_order"]
        for inner in nested_jaxprs(eqn.params):
            yield from _find_guards(inner)


def nested_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the programs among the parameters of an equation.

    With `jax_custom_vjp3` a parameter is an operator, which has the programs as its parameters.
    """
    for value in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value
        elif isinstance(inner := getattr(value, "params", None), dict):
            yield from nested_jaxprs(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def host_slices_are_wrong() -> bool:
    """Return True if this JAX needs a workaround to compile `offload_scan` for GPUs."""
    return jax.__version_info__ < _FIRST_CORRECT_VERSION


def _refuse_guard() -> None:
    raise RuntimeError(
        f"jax {jax.__version__} compiles offload_scan incorrectly for GPUs (openxla/xla#46231). "
        "Compile with effjax.offload_jit instead of jax.jit, or install "
        f"jax >= {'.'.join(map(str, _FIRST_CORRECT_VERSION))}."
    )


def _run_guard(x, *, in_order: bool):
    if jax.default_backend() == "gpu" and host_slices_are_wrong() and not in_order:
        _refuse_guard()
    return x


def _lower_guard(ctx, x, *, in_order: bool):
    on_gpu = {"cuda", "rocm"} & set(ctx.module_context.platforms)
    if on_gpu and host_slices_are_wrong() and not in_order and not _guard_allowed.get():
        _refuse_guard()
    return [x]


_guard_p.def_impl(_run_guard)
mlir.register_lowering(_guard_p, _lower_guard)


# The order of unrolled slices.


def barrier(tree: Any) -> Any:
    """Apply ``lax.optimization_barrier`` without changing the types of arrays in shard_map.

    In jax 0.10 the arrays after a barrier vary over the mesh axes of all of them.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_barrier_p.bind(*leaves))


_barrier_p = Primitive("effjax_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_impl(lambda *arrays: list(arrays))
_barrier_p.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(_barrier_p, mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays)))
batching.primitive_batchers[_barrier_p] = lambda arrays, axes: (_barrier_p.bind(*arrays), axes)


def _bind_nonzero(tangents):
    is_zero = [isinstance(t, ad.Zero) for t in tangents]
    nonzero = iter(_barrier_p.bind(*(t for t, z in zip(tangents, is_zero, strict=True) if not z)))
    return [t if z else next(nonzero) for t, z in zip(tangents, is_zero, strict=True)]


ad.primitive_jvps[_barrier_p] = lambda x, dx: (_barrier_p.bind(*x), _bind_nonzero(dx))
ad.primitive_transposes[_barrier_p] = lambda dy, *_: _bind_nonzero(dy)


def run_in_order(
    run: Callable, inputs: tuple, pending: Tree, order: jax.Array, store: Callable | None = None
) -> tuple[Any, Tree, jax.Array]:
    """Compute ``run(*inputs)`` once `pending` and the runs before it are done.

    Without this XLA would load the host arrays of all unrolled slices at the start. On TPUs the
    results of run pass through `store`, which moves them to the host; elsewhere the caller does
    that after the next call, so that the move and that call overlap.

    Returns:
        (results, pending, order), of which the last two are for the next call.
    """
    if traced_platform() == "tpu":
        # The compiler for TPUs removes barriers, but a conditional waits for its operands.
        results, order = _run_if_zero(order, lambda *a: (store or (lambda r: r))(run(*a)), inputs)
        return results, pending, order
    inputs, pending, order = barrier((inputs, pending, order))
    return run(*inputs), pending, order


def _run_if_zero(order: jax.Array, run: Callable, inputs: tuple) -> tuple[Any, jax.Array]:
    """Return (run(*inputs), order) if `order` is 0, which it always is."""
    program, results = jax.make_jaxpr(run, return_shape=True)(*inputs)

    def skip(order, *_):
        return [_zeros(aval) for aval in program.out_avals], order + 1

    def call(order, *leaves):
        return jaxpr_as_fun(program)(*leaves), order

    leaves, order = lax.cond(order == 0, call, skip, order, *jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(results), leaves), order


def _zeros(aval: Any) -> jax.Array:
    """Return zeros of this type in its memory."""
    if is_key(aval):
        return lax.full_like(jax.ShapeDtypeStruct(aval.shape, aval.dtype), 0)
    x = jnp.zeros(aval.shape, aval.dtype, out_sharding=aval.sharding)
    return put(cast_to_varying(x, aval.manual_axis_type.varying), aval.memory_space)


def _zero_unknown_to_compiler() -> jax.Array:
    bits = lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), ())[1]
    x = lax.bitcast_convert_type(bits, jnp.float32)
    return (jnp.isnan(x) & jnp.isinf(x)).astype(jnp.int32)


# Slices of host arrays.


def read(tree: Any, i: jax.Array) -> Any:
    """Read entry i of all arrays, in their memory space."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def load(tree: Any, i: jax.Array) -> Any:
    """Read entry i of all arrays and move it to the device."""
    return jax.tree.map(
        lambda a, entry: _fix_layout(put(entry, Space.Device), space_of(a)), tree, read(tree, i)
    )


def write(tree: Any, entry: Any, i: jax.Array) -> Any:
    """Replace entry i of all arrays, in their memory space."""

    def write_array(a, entry):
        entry = put(_fix_layout(entry, space_of(a)), space_of(a))
        return lax.dynamic_update_index_in_dim(a, entry, i, 0)

    return jax.tree.map(write_array, tree, entry)


def _fix_layout(entry: jax.Array, space: Space) -> jax.Array:
    """Store an entry of an array in this space row by row, if the array is on the host.

    If an entry is transposed, XLA for TPUs transposes the whole array, on the device.
    """
    if space != Space.Host or traced_platform() != "tpu" or not entry.ndim or is_key(entry):
        return entry
    return with_layout_constraint(entry, Layout(tuple(range(entry.ndim))))


# Loops over slices.


def peels_turns(count: int, prefetch: int) -> bool:
    """Return True if the turns of a loop over `count` slices that load none are outside of it.

    XLA for GPUs uses the copy engine only for an index that is linear in the loop counter, which a
    clamped index is not. XLA for CPUs does not overlap copies, and XLA for TPUs overlaps more with
    two turns per iteration (`scan_slices`). There a slice need not be compiled several times.
    """
    return count > 1 and prefetch > 0 and traced_platform() == "cuda"


def scan_slices(
    body: Callable[..., Any], carry: Tree, xs: Tree, length: int, reverse: bool = False
) -> tuple[Tree, Tree]:
    """Compute ``lax.scan(body, carry, xs, length, reverse)``. Not differentiable.

    A turn is one call of `body`. On TPUs an iteration has two turns. The carry of a loop has one
    place in memory, and XLA for TPUs loads the next slice into the memory of the current one, after
    its last use. With two turns per iteration, each of the two slices has its own place, and one
    arrives while the other is used.
    """
    if traced_platform() != "tpu" or length == 1:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)

    def turn(state: tuple) -> tuple:
        j, carry, results = state
        carry, result = body(carry, read(xs, j))
        results = write(results, jax.tree.leaves(result), j)
        return (j - 1 if reverse else j + 1), carry, results

    def two_turns(state: tuple) -> tuple:
        j, carry, results = turn(state)
        # Without the barrier, XLA could fuse the turns, which could change the last bit.
        leaves, structure = jax.tree.flatten(carry)
        on_device = [i for i, a in enumerate(leaves) if jax.typeof(a).memory_space == Space.Device]
        for i, a in zip(on_device, barrier([leaves[i] for i in on_device]), strict=True):
            leaves[i] = a
        return turn((j, structure.unflatten(leaves), results))

    first = read(xs, jnp.int32(0))
    results, structure = allocate_results(length, lambda *a: body(*a)[1], carry, first)
    state = jnp.int32(length - 1 if reverse else 0), carry, results
    if length < 4:
        state = run_as_loop(two_turns, state)
    else:
        state, _ = lax.scan(lambda s, _: (two_turns(s), None), state, None, length=length // 2)
    _, carry, results = run_as_loop(turn, state) if length % 2 else state
    return carry, structure.unflatten(results)


def run_as_loop(turn: Callable[[Tree], Tree], state: Tree) -> Tree:
    """Compute ``turn(state)`` as a loop of one iteration.

    XLA fuses a turn outside of a loop with the code around it, which can change the last bit. It
    also inlines loops that are known to have one iteration, so it must not know that.
    """
    return lax.fori_loop(0, barrier(jnp.int32(1)), lambda _, state: turn(state), state)


def repeat_turns(
    turn: Callable[[jax.Array, Tree], Tree], state: Tree, start: jax.Array, indices: range
) -> Tree:
    """Compute ``state = turn(i, state)`` for all indices, which may descend.

    Args:
        turn: gets i and the state.
        state: the first state.
        start: the guard of the loop, zero.
        indices: the values of i.
    """
    if not indices:
        return state
    if len(indices) == 1:
        return run_as_loop(lambda state: turn(start + indices[0], state), state)

    # Each loop starts at a constant index, or XLA would not see that the index is linear. The loop
    # carries the previous index: if it carried the next one, XLA could store it over the current
    # index, and would first wait for the copies that use it.
    def body(carry, _):
        before, state = carry
        i = before + indices.step
        return (i, turn(i, state)), None

    carry = start + indices[0] - indices.step, state
    return lax.scan(body, carry, None, len(indices))[0][1]


def allocate_results(length: int, run: Callable[..., Tree], *args: Tree) -> tuple[list, Any]:
    """Allocate arrays [length, ...] for the results of ``run(*args)``; return (leaves, structure).

    In host memory XLA allocates them uninitialized, so the loop must write every slice.
    """
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    leaves, structure = jax.tree.flatten(shapes)
    avals: Any = closed.out_avals
    spaces = [a.memory_space for a in avals]
    return [_allocate(length, *kind) for kind in zip(leaves, spaces, strict=True)], structure


def _allocate(length: int, like: Any, space: Space) -> jax.Array:
    """Return an array [length, ...] for results with the type of `like`."""
    zero = jax.random.key(0, impl=like.dtype) if is_key(like) else jnp.zeros((), like.dtype)
    zero = put(cast_to_varying(zero, varying_axes(like)), space)
    sharding = None
    if explicit_axes(like):
        spec = PartitionSpec(None, *explicit_spec(like))
        sharding = NamedSharding(jax.typeof(like).sharding.mesh, spec)
    return lax.broadcast(zero, (length, *like.shape), out_sharding=sharding)
