"""Compilation of programs with arrays in host memory: `offload_jit`."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from .backends import FASTER_OPTIONS, allow_guard, needed_options
from .placement import Space, space_of
from .trees import check_same_shapes

HOST_MEMORY_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_HOST_MEMORY = 64  # GiB, in XLA

_P = ParamSpec("_P")
_R = TypeVar("_R")


def offload_jit(fun: Callable[_P, _R], *, donate: bool = True) -> Callable[_P, _R]:
    """Compile a function of arrays in host memory; a replacement for ``jax.jit``.

    ``step(state, *args, **kwargs) -> (state, *results)``, a tuple or a NamedTuple, is compiled with
    the XLA options that offloading needs on the current backend. With `donate` the new state
    overwrites the old one: each array keeps its memory and its sharding. Warns (RuntimeWarning) if
    a GPU program needs more pinned host memory than XLA allocates: 64 GiB, or
    ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``.

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
        return lowered.compile({k: v for k, v in options.items() if k not in FASTER_OPTIONS})


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


def gibibytes(size: int) -> int:
    """Return the whole number of GiB that holds so many bytes."""
    return -(-size // 2**30)


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
            f"set {HOST_MEMORY_VARIABLE}={gibibytes(needed)} or larger before JAX starts.",
            RuntimeWarning,
            stacklevel=4,  # the caller of the function that `offload_jit` returned
        )
