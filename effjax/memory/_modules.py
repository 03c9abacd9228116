"""What a step is called with: nnx modules among it, and its arrays by themselves.

flax is not imported: who has a module has imported it.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from ..ops._common.arguments import describe


def knows_modules(fun: Any) -> bool:
    """Whether it is what `nnx.jit` or `effjax.nnx.offload_jit` makes: it returns what modules
    become, and can be traced."""
    of_flax = hasattr(fun, "trace") and type(fun).__module__.partition(".")[0] == "flax"
    return of_flax or getattr(fun, "takes_modules", False)


def refuse_modules(args: Any, remedy: str) -> None:
    """Raises TypeError for nnx modules and optimizers.

    JAX gives a function copies of them: what it changes in them is dropped, and XLA removes all
    that only this needed, gradients first.
    """
    for path, value in jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_module):
        if _is_module(value):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"`args{name}` is {describe(value)}, an nnx object, and the function is not one "
                f"of nnx's: what it changes in it would be lost, and not be planned. {remedy}"
            )


def opened(args: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A pytree of all arrays, without modules, and what makes arguments of such a pytree again.

    What modules share they still share afterwards.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=_is_module)
    modules = [i for i, leaf in enumerate(leaves) if _is_module(leaf)]
    if not modules:
        return args, lambda tree: tree
    nnx: Any = sys.modules["flax.nnx"]
    graph, state = nnx.split([leaves[i] for i in modules])

    def close(tree: Any) -> Any:
        state, others = tree
        merged = dict(zip(modules, nnx.merge(graph, state), strict=True))
        return structure.unflatten([merged.get(i, leaf) for i, leaf in enumerate(others)])

    return (state, [None if _is_module(leaf) else leaf for leaf in leaves]), close


def _is_module(value: Any) -> bool:
    """A module, an optimizer, random streams: an object of nnx, but no State of one."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)
