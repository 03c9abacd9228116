"""Weights of a whole network, or of one layer, from PyTorch's names and layouts and back."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from .files import as_arrays, check_real, shown
from .tables import (
    COUNTER,
    SAME_NAMES,
    Table,
    from_torch_layout,
    renewed,
    to_torch_layout,
    torch_names,
)

OF_LINEN = ("params", "batch_stats")


def from_torch(
    weights: Mapping[str, Any], into: Any, table: Table = SAME_NAMES, *, prefix: str = ""
) -> Any:
    """Puts PyTorch's weights into a network of Flax.

    Every parameter and running statistic of the network must be among the weights, and every weight
    of the network's part must have its place; only `num_batches_tracked` may be left over. Kernels
    go from OIHW to HWIO, and linear layers from [out, in] to [in, out]; transposed convolutions are
    not known. Arrays are cast to the dtypes and put where those of the network are.

    Args:
        weights: a `state_dict()` as arrays or tensors by name, such as `read` returns.
        into: an nnx Module, or a linen module's variables, `{"params", "batch_stats"}`; may be
            abstract (of `nnx.eval_shape`, `jax.eval_shape`).
        table: the network's names; `DENSENET`, `RESNET`, `PYRAMID`, … or one of your own. By
            default modules have the same names in both: a single layer's parameters, say.
        prefix: only weights whose names begin with `prefix` and a dot are looked at, without these.

    Returns:
        The Module, which is changed, or new variables, of the structure of `into`.

    Raises:
        TypeError: for an argument of another kind, and weights that are no arrays of real
            floating-point numbers.
        ValueError: for weights that are missing, left over or of another shape, by name. Nothing is
            changed then.
    """
    check_table(table)
    given = named(weights, table, prefix)
    leaves, build = _leaves("into", into)
    names = torch_names(leaves, table)
    found = {
        path: from_torch_layout(path, given[name], leaves[path].shape)
        for path, name in names.items()
        if name in given
    }
    wanted = set(names.values())
    counters = {name for name in given if name.rpartition(".")[2] == COUNTER}
    problems = {
        "missing": wanted - given.keys(),
        "left over": given.keys() - wanted - counters,
        "of another shape": [
            f"{names[path]} ({given[names[path]].shape}, not {_torch_shape(path, leaves[path])})"
            for path, array in found.items()
            if array.shape != leaves[path].shape
        ],
    }
    if said := [f"{what}: {shown(which)}" for what, which in problems.items() if which]:
        raise ValueError(f"`weights` do not fit the network. {'; '.join(said)}.")
    for path, array in found.items():
        if names[path] not in counters:
            check_real(names[path], array)
    return build({path: _placed(array, leaves[path]) for path, array in found.items()})


def to_torch(
    variables: Any, table: Table = SAME_NAMES, *, prefix: str = ""
) -> dict[str, np.ndarray]:
    """The reverse of `from_torch`: a network's arrays by PyTorch's names, in its layouts.

    Args:
        variables: an nnx Module or State, or a linen module's variables; gradients, which have
            the same names, too.
        table: as in `from_torch`.
        prefix: what all names begin with, and a dot.

    Returns:
        NumPy arrays for `load_state_dict`, in PyTorch through `torch.from_numpy`, or for `write`.
        Running statistics have a `num_batches_tracked` with them, 0 where nobody counts, unless the
        table says that there are none.

    Raises:
        TypeError: for an argument of another kind.
        ValueError: if two arrays have the same name in PyTorch, or some have no values.
    """
    check_table(table)
    start = _start(prefix)
    found: dict[str, np.ndarray] = {}
    leaves = _leaves("variables", variables)[0]
    names = torch_names(leaves, table)
    for path, leaf in leaves.items():
        name = start + names[path]
        if name in found:
            raise ValueError(f"`table` gives two arrays the name {name}, that of {path} too.")
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"`variables` has no value at {path}: it is abstract.")
        found[name] = to_torch_layout(path, np.asarray(leaf))
    for name in list(found):
        module, dot, array = name.rpartition(".")
        if array == "running_mean" and table.counters:
            found.setdefault(f"{module}{dot}{COUNTER}", np.zeros((), np.int64))
    return found


def named(weights: Any, table: Table, prefix: str) -> dict[str, np.ndarray]:
    """The weights below the prefix by their names of today."""
    start = _start(prefix)
    arrays = {renewed(name, table): array for name, array in as_arrays(weights).items()}
    found = {
        name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)
    }
    if not found:
        raise ValueError(
            f"`weights` has no name that begins with {start!r}: it has {shown(arrays) or 'none'}."
        )
    return found


def check_table(table: Any) -> None:
    if not isinstance(table, Table):
        raise TypeError(f"`table` must be a Table, not a {type(table).__name__}.")


def _start(prefix: Any) -> str:
    if not isinstance(prefix, str):
        raise TypeError(f"`prefix` must be a string, not a {type(prefix).__name__}.")
    return f"{prefix.removesuffix('.')}." if prefix else ""


def _leaves(argument: str, tree: Any) -> tuple[dict[str, Any], Any]:
    """The arrays of a tree by their paths, and what makes the tree of others."""
    module = tree if isinstance(tree, nnx.Module) else None
    if module is not None:
        tree = nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat))
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    if not isinstance(tree, Mapping):
        kind = type(tree).__name__
        raise TypeError(
            f"`{argument}` must be an nnx Module or linen's variables, not a {kind}; of a linen "
            "module, pass what its `init` returns."
        )
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_of(keys): leaf for keys, leaf in flat}
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape"):
            raise TypeError(f"`{argument}` has no array at {path}, but a {type(leaf).__name__}.")

    def build(arrays: dict[str, Any]) -> Any:
        new = jax.tree_util.tree_unflatten(structure, [arrays[path] for path in leaves])
        if module is None:
            return new
        nnx.update(module, new)
        return module

    return leaves, build


def path_of(keys: tuple) -> str:
    """`blocks.0.layers.1.norm1.scale`, or linen's own, without its collection."""
    names = [str(key.key) for key in keys if hasattr(key, "key")]  # others are Flax's boxes
    return ".".join(names[names[0] in OF_LINEN :])


def _torch_shape(path: str, leaf: Any) -> tuple[int, ...]:
    return to_torch_layout(path, np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)).shape


def _placed(array: np.ndarray, like: Any) -> jax.Array:
    return jax.device_put(array.astype(like.dtype), getattr(like, "sharding", None))
