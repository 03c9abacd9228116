"""Compiling programs that read host memory: right on every JAX, in place where that is safe."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._common.arguments import as_callable, as_flag, describe
from .host_pool import warn_beyond_pool
from .placement import Space, space_of
from .trees import refuse_again

# XLA for GPUs before this JAX reads the wrong slice of a host array, without a word, where the
# index is not the loop's counter but follows from it (openxla/xla#46231).
_READS_HOST_SLICES_RIGHT = (0, 11, 2)
_WORKAROUND = {"xla_disable_hlo_passes": "fusion-dynamic-memcpy-rewriter,dynamic-slice-annotator"}
# XLA lets two copies run beside the matrix products, and in a backward pass starts them late.
_OVERLAP = {"xla_gpu_experimental_parallel_async_compute_limit": 32}
_OVERLAP_LONGER = {"xla_gpu_experimental_enable_selective_memcpy_overlap": True}
# Unrolled slices would all be loaded at once.
_IN_ORDER = {"xla_gpu_enable_latency_hiding_scheduler": False}

_P = ParamSpec("_P")
_R = TypeVar("_R")

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("allowed", default=False)


def offload_jit(fun: Callable[_P, _R], *, donate: bool = True) -> Callable[_P, _R]:
    """``jax.jit`` for programs with arrays on the host.

    ``step(state, *args) -> (state, *results)`` is compiled with the options that offloading needs
    where it runs, and, unless donate=False, so that the new state is written over the old one, each
    array in the memory and with the sharding that it had. It warns of a program for a GPU that
    needs more pinned host memory than XLA takes, see `effjax.memory.host_memory_limit`.

    Args:
        fun: the function of arrays. With donate=True its first argument and its (first) result are
            alike: a pytree of arrays whose shapes and dtypes it keeps.
        donate: whether the first argument is overwritten.

    Returns:
        The compiled function. Like what jax.jit returns it has ``trace``, and `effjax.memory.plan`
        takes it.

    Raises:
        TypeError: for what is no function or flag; when it is called, for arguments that are no
            arrays, and without a state to overwrite.
        ValueError: when it is called, if the state cannot be overwritten, with the first array that
            differs.
    """
    run: Callable[..., Any] = as_callable("fun", fun)
    as_flag("donate", donate)
    programs: dict = {}

    def jitted(*args) -> Any:
        # A function of its own: JAX keeps what it has lowered by function, guarded or not.
        if not donate:
            return jax.jit(lambda *args: run(*args))
        if not args:
            raise TypeError(
                "a function of offload_jit takes the state that it overwrites as its first "
                "argument, but was called without; pass donate=False if it has none."
            )
        shardings = jax.tree.map(_sharding, args[0])
        checked = functools.partial(_same_state, run)
        return jax.jit(checked, donate_argnums=0, out_shardings=(shardings, None))

    def call(*args) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(a, Tracer) for a in leaves):
            return run(*args)
        config = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # pyright: ignore
        types = tuple((_type_of(a, args), getattr(a, "sharding", None)) for a in leaves)
        key = structure, types, config
        if key not in programs:
            programs[key] = compile_offloaded(jitted(*args), *args)
        results = programs[key](*args)
        if not donate:
            return results
        state, rest = results
        return state if rest is None else (state, *rest)

    wrapped: Any = functools.wraps(fun)(call)
    wrapped.trace = lambda *args: jitted(*args).trace(*args)
    wrapped.is_offload_jit = True
    return wrapped


def compile_offloaded(jitted: Any, *args) -> jax.stages.Compiled:
    """Compiles for these arguments, with the options that offloading needs where it runs."""
    traced, on_gpu = jitted.trace(*args), jax.default_backend() == "gpu"
    options = needed_options(traced.jaxpr) if on_gpu else {}
    with allowed():
        lowered = traced.lower()
    program = _compile(lowered, options)
    if on_gpu:
        warn_beyond_pool(program)
    return program


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        faster = _OVERLAP | _OVERLAP_LONGER  # another XLA has other names for them
        return lowered.compile({k: v for k, v in options.items() if k not in faster})


def _same_state(fun: Callable[..., Any], state: Any, *args) -> tuple[Any, Any]:
    """(new state, other results); None for functions of which the state is all."""
    result = fun(state, *args)
    before = jax.tree.structure(state)
    if jax.tree.structure(result) == before:
        new, rest = result, None
    elif isinstance(result, tuple) and result and jax.tree.structure(result[0]) == before:
        new, rest = result[0], tuple(result[1:])
    else:
        raise ValueError(
            f"the state of structure {before} became {jax.tree.structure(result)}; it must keep "
            "it, as the only or the first result, or pass donate=False."
        )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True
    ):
        a, b = jax.typeof(a), jax.typeof(b)
        if (a.shape, a.dtype, a.memory_space) != (b.shape, b.dtype, b.memory_space):
            raise ValueError(
                f"the state{jax.tree_util.keystr(path)} was {a} and became {b}; it must stay as it "
                "is and where it is, or pass donate=False."
            )
    return new, rest


def _type_of(a: Any, args: tuple) -> Any:
    try:
        return jax.typeof(a)
    except TypeError:
        names = ((jax.tree_util.keystr(p), b) for p, b in jax.tree_util.tree_leaves_with_path(args))
        name = next(name for name, b in names if b is a)
        raise TypeError(
            f"`args{name}` of a function of offload_jit must be an array, not {describe(a)}; "
            "close over what is none."
        ) from None


def _sharding(a: Any) -> Any:
    if not isinstance(a, (jax.Array, jax.ShapeDtypeStruct)) or a.sharding is None:
        raise ValueError(f"the state must consist of arrays with shardings, not {a!r}.")
    # One that was put nowhere goes where the others are.
    free = isinstance(a, jax.Array) and not a.committed and space_of(a) == Space.Device
    return None if free else a.sharding


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Lets programs be lowered for GPUs that will be compiled with `needed_options`."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def needed_options(jaxpr: Any) -> dict[str, Any]:
    """What a program needs of XLA for GPUs: nothing, if it does not offload."""
    orders = set(_orders(jaxpr))
    late = _WORKAROUND if host_slices_are_wrong() else _OVERLAP_LONGER
    return (_OVERLAP | late if False in orders else {}) | (_IN_ORDER if True in orders else {})


def _orders(jaxpr: Any) -> Iterator[bool]:
    """The `in_order` of the guards in a program."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is _guard_p:
            yield eqn.params["in_order"]
        for inner in jaxprs_in(eqn.params):
            yield from _orders(inner)


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    """The programs among the parameters of an equation, or of an operator that is one of them.

    The latter is how an equation has them with `jax_custom_vjp3` and its like.
    """
    for value in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value
        elif isinstance(more := getattr(value, "params", None), dict):
            yield from jaxprs_in(more)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def guard_host_slices() -> jax.Array:
    """Zero, where slices of host arrays are read right; else compiling for a GPU fails."""
    return _guard_p.bind(jnp.int32(0), in_order=False)


def in_order() -> jax.Array:
    """Zero; asks for slices that are not all loaded at once."""
    return _guard_p.bind(jnp.int32(0), in_order=True)


def host_slices_are_wrong() -> bool:
    """Whether this JAX compiles `offload_scan` wrongly for GPUs, without other options."""
    return jax.__version_info__ < _READS_HOST_SLICES_RIGHT


# Known only when a program is compiled: the platform, and whether offload_jit compiles it.
_guard_p = Primitive("effjax_offload_guard")
_guard_p.def_abstract_eval(lambda x, **_: x)


def _refuse() -> None:
    raise RuntimeError(
        f"jax {jax.__version__} compiles offload_scan wrongly for GPUs (openxla/xla#46231). Use "
        "effjax.offload_jit in place of jax.jit, which works around it, or "
        f"jax >= {'.'.join(map(str, _READS_HOST_SLICES_RIGHT))}."
    )


def _run_guard(x, *, in_order: bool):
    if jax.default_backend() == "gpu" and host_slices_are_wrong() and not in_order:
        _refuse()  # outside of jit
    return x


def _lower_guard(ctx, x, *, in_order: bool):
    on_gpu = {"cuda", "rocm"} & set(ctx.module_context.platforms)
    if on_gpu and host_slices_are_wrong() and not in_order and not _allowed.get():
        _refuse()
    return [x]


_guard_p.def_impl(_run_guard)
mlir.register_lowering(_guard_p, _lower_guard)


def barrier(tree: Any) -> Any:
    """``lax.optimization_barrier`` after which arrays vary over the mesh axes that they did before.

    That of jax 0.10 makes all of them vary over the axes of any.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_barrier_p.bind(*leaves))


_barrier_p = Primitive("effjax_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_impl(lambda *arrays: list(arrays))
_barrier_p.def_abstract_eval(lambda *arrays: arrays)
ad.primitive_jvps[_barrier_p] = lambda *_: refuse_again("offload_sequential")
mlir.register_lowering(_barrier_p, mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays)))
batching.primitive_batchers[_barrier_p] = lambda arrays, axes: (_barrier_p.bind(*arrays), axes)
