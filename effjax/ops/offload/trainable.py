"""Which parameters are trained; the others have no gradients, no moments, and are never written."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._common.arguments import as_flag
from .trees import Tree


class Parts(NamedTuple):
    """A pytree in two, each with None in place of the other's leaves."""

    trained: Tree
    frozen: Tree

    @property
    def whole(self) -> Tree:
        """The pytree."""
        return jax.tree.map(lambda a, b: b if a is None else a, *self, is_leaf=lambda a: a is None)


def parts_of(name: str, trainable: Any, tree: Tree) -> Parts:
    """The parts of a pytree, as the argument `name` has it: see `offload_scan`."""
    leaves, structure = jax.tree.flatten(tree)
    flags = _flags(name, trainable, tree)
    split = [(a, None) if flag else (None, a) for a, flag in zip(leaves, flags, strict=True)]
    return Parts(*(structure.unflatten([pair[j] for pair in split]) for j in range(2)))


def _flags(name: str, trainable: Any, tree: Tree) -> list[bool]:
    """Of each leaf."""
    if isinstance(trainable, Callable):
        flags = jax.tree_util.tree_map_with_path(trainable, tree)
    else:
        try:
            flags = jax.tree.map(
                lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, tree
            )
        except ValueError:
            raise ValueError(
                f"`{name}` must be a function of a path and a leaf, or bools in a pytree like that "
                f"of the parameters, {jax.tree.structure(tree)!s:.300}, or one for a whole "
                f"subtree, not {jax.tree.structure(trainable)!s:.300}."
            ) from None
    found = jax.tree_util.tree_leaves_with_path(flags)
    return [as_flag(f"{name}{jax.tree_util.keystr(path)}", flag) for path, flag in found]


def trained_of(params: Tree) -> Tree:
    """What has gradients of Parts, or of a pytree without frozen leaves: all."""
    return params.trained if isinstance(params, Parts) else params


def with_trained(params: Tree, trained: Tree) -> Tree:
    """`params` with other values for `trained_of(params)`."""
    return Parts(trained, params.frozen) if isinstance(params, Parts) else trained
