"""Compiling functions of nnx modules with arrays on the host."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from flax import nnx

from ..ops._common.arguments import as_callable, as_flag, describe
from ..ops.offload import offload_jit as offload_jit_of_arrays

_P = ParamSpec("_P")
_R = TypeVar("_R")


def offload_jit(fun: Callable[_P, _R], *, donate: bool = True) -> Callable[_P, _R]:
    """``nnx.jit`` for programs with arrays on the host.

    ``fun(model, optimizer, *arrays)`` is compiled with the options that offloading needs where it
    runs. What it changes in the modules and optimizers among its arguments is changed, each array
    in the memory and with the sharding that it had, and, unless donate=False, written over the old
    one: what else refers to that array has lost it.

    Args:
        fun: ``fun(*args)``. Those of its arguments that are nnx modules, optimizers and streams
            come first, at least one; others are pytrees of arrays. It makes no new Variables.
        donate: whether what modules hold is overwritten. With False `fun` must not change them.

    Returns:
        The compiled function, which returns what `fun` does, a pytree of arrays or None.
        `effjax.memory.plan` takes it.

    Raises:
        TypeError: for what is no function or flag; when it is called, for arguments that are no
            arrays, or without modules.
        ValueError: when it is called, if a Variable changes its shape, dtype or memory.
    """
    as_callable("fun", fun)
    as_flag("donate", donate)
    programs: dict = {}

    def program(args: tuple) -> tuple[Callable[..., Any], tuple, tuple]:
        """(compiled function of arrays, modules, its arguments)"""
        count = next((i for i, a in enumerate(args) if not _is_module(a)), len(args))
        if not count:
            found = describe(args[0]) if args else "no arguments"
            raise TypeError(
                "a function of effjax.nnx.offload_jit takes nnx modules first, but was called "
                f"with {found}; effjax.offload_jit is for functions of arrays."
            )
        graphdef, state = nnx.split(args[:count])
        if graphdef not in programs:
            programs[graphdef] = offload_jit_of_arrays(
                functools.partial(_of_arrays, fun, graphdef, donate), donate=donate
            )
        return programs[graphdef], args[:count], (state, *args[count:])

    def call(*args: Any) -> Any:
        compiled, modules, arrays = program(args)
        found = compiled(*arrays)
        if not donate:
            return found
        state, result = found
        nnx.update(modules, state)
        return result

    wrapped: Any = functools.wraps(fun)(call)

    def trace(*args: Any) -> Any:
        compiled, _, arrays = program(args)
        return compiled.trace(*arrays)  # pyright: ignore[reportFunctionMemberAccess]

    wrapped.trace = trace
    wrapped.is_offload_jit = wrapped.takes_modules = True
    return wrapped


def _is_module(a: Any) -> bool:
    return isinstance(a, nnx.Pytree)


def _of_arrays(fun: Callable[..., Any], graphdef: Any, donate: bool, state: Any, *args: Any) -> Any:
    modules = nnx.merge(graphdef, state)
    result = fun(*modules, *args)
    return (nnx.state(modules), result) if donate else result
