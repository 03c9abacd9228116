"""Conversion of the weights of a network or layer from PyTorch to Flax and back."""

import math
import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import numpy as np
from flax import nnx

from .files import as_named_arrays, check_named, check_real, list_names
from .tables import (
    COUNTER,
    SAME_NAMES,
    Table,
    check_table,
    from_torch_layout,
    nnx_path,
    to_torch_layout,
    torch_names,
    update_name,
)

LINEN_COLLECTIONS = ("params", "batch_stats")


def from_torch(
    weights: Mapping[str, Any], into: Any, table: Table = SAME_NAMES, *, prefix: str = ""
) -> Any:
    """Load PyTorch's weights into a network or a single layer of Flax.

    The names must match: every parameter and running statistic of the network must be among the
    weights, and every weight below `prefix` must be used, except `num_batches_tracked`. Kernels are
    transposed from OIHW to HWIO, and linear layers from [out, in] to [in, out]. Transposed
    convolutions are not supported. Arrays take the dtypes and shardings of the network. Rounded
    values, such as float64 weights in a float32 network, cause a warning.

    Args:
        weights: a `state_dict()` as arrays or tensors by name, such as the result of
            `load_weights`.
        into: an nnx Module, or a linen module's variables, `{"params", "batch_stats"}`; may be
            abstract (from `nnx.eval_shape` or `jax.eval_shape`).
        table: the network's names: `DENSENET`, `RESNET`, `PYRAMID`, …, or your own. A single
            deformable convolution uses `DEFORM_CONV`, or `Table({"name": "offset_conv"})` if its
            offset convolution has another name. By default the names are the same in both.
        prefix: use only weights whose names begin with `prefix` and a dot, without this prefix.

    Returns:
        The updated Module, or new variables of the structure of `into`.

    Raises:
        TypeError: if `weights` or `into` has the wrong type, or weights are not real floating-point
            arrays.
        ValueError: if weights are missing, left over, of another shape, or too large for the dtype
            of the network. The message names them, and nothing is changed.

    Warns:
        UserWarning: if weights are rounded to the dtype of the network, or if the batch norms of an
            nnx network have another `epsilon` than those of `table`. Linen's variables do not
            contain it.
    """
    check_table(table)
    arrays = as_named_arrays(weights)
    given = {n: arrays[old] for n, old in current_names("weights", arrays, table, prefix).items()}
    leaves, build = _leaves("into", into)
    names = torch_names(leaves, table)
    found = {
        path: from_torch_layout(path, given[name], leaves[path].shape)
        for path, name in names.items()
        if name in given
    }
    other_shapes = [
        f"{names[path]} ({given[names[path]].shape}, not {_torch_shape(path, leaves[path])})"
        for path, array in found.items()
        if array.shape != leaves[path].shape
    ]
    hint = ""
    missing = [path for path, name in names.items() if name not in given]
    if missing and all("offset_conv" in nnx_path(path).split(".") for path in missing):
        hint = (
            " The offsets of deformable convolutions begin at zero: for the weights of a network "
            "without them, pass to_torch(into, table) | weights."
        )
    # All problems are in one error: a wrong prefix or table shows in the list as a whole.
    _check_names("weights", set(names.values()), given, prefix, other_shapes, hint)
    for path, array in found.items():
        if not _is_counter(names[path]):
            check_real(names[path], array)
    _check_epsilon(into, table)
    return build(_cast(found, leaves, names))


def to_torch(
    variables: Any,
    table: Table = SAME_NAMES,
    *,
    prefix: str = "",
    like: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Return a network's arrays with PyTorch's names and layouts, the inverse of `from_torch`.

    The names are the current ones of the source. Pass the weights that were loaded as `like` to
    keep theirs, such as `features.norm_final`, which `DENSENET` accepts for `features.norm5`.

    Args:
        variables: an nnx Module or State, or a linen module's variables. Gradients have the same
            names and are accepted too.
        table: as in `from_torch`.
        prefix: prepended to all names, followed by a dot.
        like: the weights whose names and order to keep, and their counters where the layer does not
            count. Only its names below `prefix` matter.

    Returns:
        NumPy arrays for `save_weights`, or for `load_state_dict` after `torch.from_numpy`. If the
        table has counters, running statistics come with a `num_batches_tracked`, which is 0 if the
        layer does not count.

    Raises:
        TypeError: if `variables` or `like` has the wrong type.
        ValueError: if two arrays get the same name in PyTorch, `variables` is abstract, or `like`
            has other names.
    """
    check_table(table)
    start = _start(prefix)
    found: dict[str, np.ndarray] = {}
    leaves = _leaves("variables", variables)[0]
    names = torch_names(leaves, table)
    for path, leaf in leaves.items():
        name = names[path]
        if name in found:
            raise ValueError(
                f"`table` gives two arrays the name {start}{name}, that of {path} too."
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"`variables` has no value at {path}: it is abstract.")
        found[name] = to_torch_layout(path, np.asarray(leaf))
    # An older name has the array of its current form, so the result fits the code of its time.
    if like is not None:
        check_named("like", like)
        originals = current_names("like", like, table, prefix)
        _check_names("like", {n for n in found if not _is_counter(n)}, originals, prefix)
        counters = as_named_arrays(
            {old: like[old] for new, old in originals.items() if new not in found}
        )
        return {
            old: found[new] if new in found else counters[old] for new, old in originals.items()
        }
    for name in list(found):
        module, dot, array = name.rpartition(".")
        if array == "running_mean" and table.counters:
            found.setdefault(f"{module}{dot}{COUNTER}", np.zeros((), np.int64))
    return {f"{start}{name}": array for name, array in found.items()}


def current_names(argument: str, names: Iterable[str], table: Table, prefix: str) -> dict[str, str]:
    """Map the current form of the names below the prefix, without it, to the given names."""
    start = _start(prefix)
    originals = {}
    for name in names:
        new = update_name(name, table)
        if new in originals and new.startswith(start):
            raise ValueError(
                f"`{argument}` must have one array for {new:.120}, not both {originals[new]:.120} "
                f"and {name:.120}. Remove one."
            )
        originals[new] = name
    found = {
        new.removeprefix(start): old for new, old in originals.items() if new.startswith(start)
    }
    if not found:
        raise ValueError(
            f"`{argument}` must have names that begin with {start!r}, not "
            f"{list_names(originals) or 'none'}."
        )
    return found


def _check_names(
    argument: str, wanted: Set[str], given: Mapping[str, Any], prefix: str,
    other_shapes: Iterable[str] = (), hint: str = "",
) -> None:  # fmt: skip
    """Raise ValueError unless the names of a network and the given ones match."""
    missing = wanted - given.keys()
    left_over = {name for name in given.keys() - wanted if not _is_counter(name)}
    problems = {"missing": missing, "left over": left_over, "of another shape": other_shapes}
    said = [f"{what}: {list_names(which)}" for what, which in problems.items() if which]
    if said:
        hint = _prefix_hint(missing, given, prefix) or hint
        raise ValueError(f"`{argument}` must match the network. {'; '.join(said)}.{hint}")


def _prefix_hint(missing: Set[str], given: Mapping[str, Any], prefix: str) -> str:
    """Return a hint if all missing names exist below one further prefix."""
    # As `module`, which DataParallel puts before all names, or that of a detector's backbone.
    for name in given if missing else ():
        further = name.removesuffix(min(missing))
        if further.endswith(".") and all(further + other in given for other in missing):
            return f" Pass prefix={_start(prefix) + further[:-1]!r}."
    return ""


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _check_epsilon(into: Any, table: Table) -> None:
    """Warn if batch norms of an nnx network have another epsilon than the source's."""
    if table.epsilon is None or not isinstance(into, nnx.Module):
        return
    norms = [
        layer for _, layer in nnx.iter_graph(into, graph=True) if isinstance(layer, nnx.BatchNorm)
    ]
    others = {n.epsilon for n in norms if not math.isclose(n.epsilon, table.epsilon, rel_tol=1e-6)}
    if others:
        warnings.warn(
            f"`into` has batch norms with epsilon={min(others)}, and weights of `table` come from "
            f"ones with epsilon={table.epsilon}: results will differ. Pass epsilon={table.epsilon} "
            "to the network, or if these weights have another, table._replace(epsilon=…).",
            stacklevel=3,
        )


def _start(prefix: str) -> str:
    return f"{prefix.removesuffix('.')}." if prefix else ""


def _leaves(argument: str, tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the arrays of a tree by path, and a function that rebuilds the tree."""
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

    def build(arrays: dict[str, Any]) -> Any:
        new = jax.tree_util.tree_unflatten(structure, [arrays[path] for path in leaves])
        if module is None:
            return new
        nnx.update(module, new)
        return module

    return leaves, build


def path_of(keys: tuple) -> str:
    """Return the path of a leaf, like `blocks.0.layers.1.norm1.scale`, without the collection."""
    names = [str(key.key) for key in keys if hasattr(key, "key")]  # the others: Flax's boxes
    return ".".join(names[names[0] in LINEN_COLLECTIONS :])


def _torch_shape(path: str, leaf: Any) -> tuple[int, ...]:
    return to_torch_layout(path, np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)).shape


def _cast(
    arrays: Mapping[str, np.ndarray], leaves: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, jax.Array]:
    """Return the arrays with the dtypes and shardings of the leaves."""
    cast, rounded = {}, []
    for path, array in arrays.items():
        like = leaves[path]
        dtype = jax.dtypes.canonicalize_dtype(like.dtype)
        with np.errstate(over="ignore"):
            new = array.astype(dtype)
        # Values count, not dtypes: float64 weights that were float32 before lose nothing.
        is_counter = array.dtype.kind in "iub"
        if not (is_counter or np.array_equal(new.astype(array.dtype), array, equal_nan=True)):
            change = f"{names[path]:.120} from {array.dtype} to {dtype}"
            if np.any(np.isinf(new) & np.isfinite(array)):
                raise ValueError(
                    f"`weights` must be in the range of the network's dtype: {change}."
                )
            rounded.append(change)
        cast[path] = jax.device_put(new, getattr(like, "sharding", None))
    if rounded:
        warnings.warn(
            f"`weights`: {len(rounded)} of {len(arrays)} arrays are rounded, such as {rounded[0]}. "
            "To keep all digits, build the network with a wider param_dtype (float64 needs "
            "jax_enable_x64).",
            stacklevel=3,
        )
    return cast
