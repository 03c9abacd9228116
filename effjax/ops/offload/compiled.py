"""Compilation of programs with arrays in host memory: `offload_jit` and its XLA options."""

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._common.platform import traced_platform
from .._common.sharding import cast_to_varying
from .placement import Space, put, space_of
from .trees import Tree, check_same_shapes, is_key

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

HOST_MEMORY_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_HOST_MEMORY = 64  # GiB, in XLA

_P = ParamSpec("_P")
_R = TypeVar("_R")


def offload_jit(fun: Callable[_P, _R], *, donate: bool = True) -> Callable[_P, _R]:
    """Compile a function of arrays in host memory; a replacement for ``jax.jit``.

    ``step(state, *args, **kwargs) -> (state, *results)``, a tuple or a NamedTuple, is compiled with
    the XLA options that offloading needs on the current backend. With `donate` the new state
    overwrites the old one: each array keeps its memory and its sharding. Warns (RuntimeWarning) if
    a GPU program needs more pinned host memory than XLA allocates, see
    `effjax.memory.host_memory_limit`.

    Args:
        fun: the function to compile. With `donate` its first positional argument and its first (or
            only) result are pytrees of arrays with the same structure, shapes and dtypes.
        donate: whether to overwrite the first positional argument.

    Returns:
        The compiled function. It has a ``trace`` method, as the result of ``jax.jit`` has, and
        `effjax.memory.plan` accepts it.

    Raises:
        TypeError: when it is called, if an argument is not an array.
        ValueError: when it is called, if the state cannot be overwritten, naming the first array
            that differs.
    """
    run: Callable[..., Any] = fun
    programs: dict = {}

    def jit(*args, **kwargs) -> Any:
        # Make a new function each time: JAX caches lowered programs by function, and a program
        # lowered inside `allow_guard` must not be reused outside of it.
        if not (donate and args):
            return jax.jit(lambda *args, **kwargs: run(*args, **kwargs))
        shardings = jax.tree.map(_get_sharding, args[0])
        checked = functools.partial(_run_checked, run)
        return jax.jit(checked, donate_argnums=0, out_shardings=(shardings, None))

    def call(*args, **kwargs) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(isinstance(a, Tracer) for a in leaves):
            return run(*args, **kwargs)
        config = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # pyright: ignore
        types = tuple((jax.typeof(a), getattr(a, "sharding", None)) for a in leaves)
        cache_key = structure, types, config
        if cache_key not in programs:
            programs[cache_key] = compile_offloaded(jit(*args, **kwargs), *args, **kwargs)
        results = programs[cache_key](*args, **kwargs)
        if not (donate and args):
            return results
        state, rest = results
        if rest is None:
            return state
        return rest._replace(**{rest._fields[0]: state}) if _is_named(rest) else (state, *rest)

    wrapped: Any = functools.wraps(fun)(call)
    wrapped.trace = lambda *args, **kwargs: jit(*args, **kwargs).trace(*args, **kwargs)
    wrapped.is_offload_jit = True
    return wrapped


def _run_checked(fun: Callable[..., Any], state: Any, /, *args, **kwargs) -> tuple[Any, Any]:
    """Return (new state, other results or None), after checking that the state keeps its types.

    The other results of a NamedTuple are that NamedTuple with None in place of the state.
    """
    new, rest = fun(state, *args, **kwargs), None
    is_state = jax.tree.structure(new) == jax.tree.structure(state)
    if isinstance(new, tuple) and new and not is_state:
        results: Any = new
        new = results[0]
        rest = results._replace(**{results._fields[0]: None}) if _is_named(results) else results[1:]
    # Donating a host array for a result of another type would abort the process.
    overwritten = "the first argument, which it overwrites unless donate=False"
    check_same_shapes("state", new, overwritten, state, same_types=True)
    return new, rest


def _is_named(results: tuple) -> bool:
    return hasattr(results, "_fields")


def _get_sharding(a: Any) -> Any:
    # An uncommitted array on the device follows the other arrays.
    is_free = isinstance(a, jax.Array) and not a.committed and space_of(a) == Space.Device
    return None if is_free else getattr(a, "sharding", None)


def compile_offloaded(jitted: Any, /, *args, **kwargs) -> jax.stages.Compiled:
    """Compile for these arguments, with the options that offloading needs on this backend."""
    traced, on_gpu = jitted.trace(*args, **kwargs), jax.default_backend() == "gpu"
    options = needed_options(traced.jaxpr) if on_gpu else {}
    with allow_guard():
        lowered = traced.lower()
    program = _compile(lowered, options)
    if on_gpu:
        _warn_beyond_limit(program)
    return program


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        # Other versions of XLA have other names for the options that only affect speed.
        faster = _OVERLAP | _SELECTIVE_OVERLAP
        return lowered.compile({k: v for k, v in options.items() if k not in faster})


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
    bits = lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (), jnp.uint32)[1]
    x = lax.bitcast_convert_type(bits, jnp.float32)
    return (jnp.isnan(x) & jnp.isinf(x)).astype(jnp.int32)


def host_memory_limit() -> int:
    """Return the size of XLA's pool of pinned host memory, in bytes.

    All GPUs of a process share the pool. Its size is 64 GiB unless the environment variable
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set.

    Raises:
        ValueError: if the variable is not an integer of at least 1. XLA would log an error and
            allocate 64 GiB.
    """
    value = os.environ.get(HOST_MEMORY_VARIABLE, str(_DEFAULT_HOST_MEMORY))
    if not value.strip().isdecimal() or not int(value):
        raise ValueError(
            f"{HOST_MEMORY_VARIABLE} (={value!r}) must be a whole number of GiB, at least 1. XLA "
            f"ignores other values and allocates {_DEFAULT_HOST_MEMORY} GiB."
        )
    return int(value) * 2**30


def pinned_bytes(program: jax.stages.Compiled) -> int:
    """Return the pinned host memory that a GPU program needs, over all devices of the process."""
    stats = program.memory_analysis()  # of one device; None or incomplete on some backends
    size = {
        kind: getattr(stats, f"host_{kind}_size_in_bytes", 0)
        for kind in ("argument", "output", "temp", "alias")
    }
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    devices = frozenset().union(*(sharding.addressable_devices for sharding in shardings))
    return (size["argument"] + size["output"] + size["temp"] - size["alias"]) * len(devices)


def _warn_beyond_limit(program: jax.stages.Compiled) -> None:
    needed, limit = pinned_bytes(program), host_memory_limit()
    if needed > limit:
        warnings.warn(
            f"A program needs {needed} bytes ({needed / 2**30:.1f} GiB) of pinned host memory, but "
            f"XLA allocates at most {limit / 2**30:g} GiB per process. If the machine has more, "
            f"set {HOST_MEMORY_VARIABLE} (in GiB) before JAX starts.",
            RuntimeWarning,
            stacklevel=4,  # the caller of the function that `offload_jit` returned
        )
