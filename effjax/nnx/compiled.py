"""Compilation of functions of nnx modules with arrays in host memory."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from flax import nnx

from ..ops._common.arguments import describe
from ..ops.offload import offload_jit as offload_jit_of_arrays
from ..ops.offload.placement import Space, space_of
from .offload import OffloadModel

_P = ParamSpec("_P")
_R = TypeVar("_R")


def offload_jit(fun: Callable[_P, _R], *, donate: bool = True) -> Callable[_P, _R]:
    """Compile a function of nnx modules in host memory; a replacement for ``nnx.jit``.

    ``fun(model, optimizer, *args, **kwargs)`` is compiled with the XLA options that offloading
    needs on the current backend. Its changes to the modules and optimizers take effect, and each
    array keeps its memory and its sharding. With `donate` new arrays overwrite the old ones: do not
    use other references to them.

    Args:
        fun: the function to compile. Its first positional arguments, at least one, are nnx modules,
            optimizers or streams. The others are pytrees of arrays. It creates no Variables.
        donate: whether to overwrite the arrays of the modules. With False, `fun` must not change
            them.

    Returns:
        The compiled function. It returns the result of `fun`, a pytree of arrays or None.
        `effjax.memory.plan` accepts it.

    Raises:
        TypeError: when it is called, if the first argument is not a module, if a module follows an
            array or is passed by keyword, or if another argument is not an array.
        ValueError: when it is called, if a Variable changes its shape, dtype or memory.
    """
    programs: dict = {}

    def split_arguments(args: tuple, kwargs: dict) -> tuple[Callable[..., Any], tuple, tuple]:
        """Return (compiled function of arrays, modules, the arguments of that function)."""
        is_array = (i for i, a in enumerate(args) if not _is_module(a))
        count = next(is_array, len(args))
        if not count:
            called_with = describe(args[0]) if args else "no arguments"
            raise TypeError(
                "A function compiled by effjax.nnx.offload_jit takes nnx modules first, but was "
                f"called with {called_with}. Use effjax.offload_jit for functions of arrays."
            )
        rest = args[count:], kwargs
        if any(map(_is_module, jax.tree.leaves(rest, is_leaf=_is_module))):
            raise TypeError(
                "A function compiled by effjax.nnx.offload_jit takes nnx modules as its first "
                "positional arguments. It would lose the updates of other modules."
            )
        graphdef, state = nnx.split(args[:count])
        if graphdef not in programs:
            programs[graphdef] = offload_jit_of_arrays(
                functools.partial(_call_on_arrays, fun, graphdef, donate), donate=donate
            )
        return programs[graphdef], args[:count], (state, *args[count:])

    def call(*args: Any, **kwargs: Any) -> Any:
        compiled, modules, arrays = split_arguments(args, kwargs)
        if not donate:
            return compiled(*arrays, **kwargs)
        state, result = compiled(*arrays, **kwargs)
        nnx.update(modules, state)
        return result

    def trace(*args: Any, **kwargs: Any) -> Any:
        compiled, _, arrays = split_arguments(args, kwargs)
        return compiled.trace(*arrays, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]

    wrapped: Any = functools.wraps(fun)(call)
    wrapped.trace = trace
    wrapped.is_offload_jit = wrapped.takes_modules = True
    return wrapped


def _is_module(a: Any) -> bool:
    return isinstance(a, nnx.Pytree)


def _call_on_arrays(
    fun: Callable[..., Any], graphdef: Any, donate: bool, state: Any, /, *args: Any, **kwargs: Any
) -> Any:
    modules = nnx.merge(graphdef, state)
    try:
        result = fun(*modules, *args, **kwargs)
    except ValueError as error:
        if "memory_space" in str(error) and (names := _host_params(modules)):
            error.add_note(
                f"Used outside of OffloadModel, but in host memory: {', '.join(names[:3])}. Load "
                "it there with effjax.to_device."
            )
        raise
    return (nnx.state(modules), result) if donate else result


def _host_params(modules: Any) -> list[str]:
    """Return the names of the Params in host memory that are not only in an OffloadModel."""
    ends = OffloadModel, nnx.Param
    leaves = jax.tree_util.tree_leaves_with_path(modules, is_leaf=lambda a: isinstance(a, ends))
    return [
        jax.tree_util.keystr(path[1:]).lstrip(".")
        for path, a in leaves
        if isinstance(a, nnx.Param) and space_of(a[...]) == Space.Host
    ]
