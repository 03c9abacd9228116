"""Pytrees of arrays: validation, trained and frozen leaves, cotangents, layers, microbatches."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common.arguments import describe
from .._common.sharding import explicit_axes, explicit_spec, reshape

Tree = Any


def as_array_tree(name: str, tree: Tree, allow_scalars: bool = False) -> Tree:
    """Return a pytree with every leaf as a JAX array.

    Python scalars are accepted only with `allow_scalars`.
    """
    accepted = (jax.Array, np.ndarray, np.generic)
    if allow_scalars:
        accepted += (bool, int, float, complex)

    def as_array(path: tuple, a: Any) -> jax.Array:
        try:
            if isinstance(a, accepted) or hasattr(a, "__jax_array__"):
                return jnp.asarray(a)
        except TypeError:  # NumPy arrays of strings or objects
            pass
        raise TypeError(
            f"`{name}`{jax.tree_util.keystr(path)} must be an array, not {describe(a)}. Convert it "
            "with jnp.asarray."
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)


def check_same_shapes(
    name: str, tree: Tree, other_name: str, other: Tree, same_types: bool = False
) -> None:
    """Raise ValueError unless two pytrees have the same structure and the same shapes.

    With `same_types`, dtypes and memory spaces must be the same too.
    """
    a, b = jax.tree.structure(tree), jax.tree.structure(other)
    if a != b:
        raise ValueError(
            f"`{name}` must have the structure of {other_name}, {b!s:.300}, not {a!s:.300}."
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), y in zip(leaves, jax.tree.leaves(other), strict=True):
        what, got, expected = "shape", np.shape(x), y.shape
        if same_types:
            what, got, expected = "type", jax.typeof(x), jax.typeof(y)
            if _type_key(got) == _type_key(expected):
                continue
        if got != expected:
            raise ValueError(
                f"`{name}`{jax.tree_util.keystr(path)} must have the {what} {expected}, as in "
                f"{other_name}, not {got}."
            )


def _type_key(a: Any) -> tuple:
    return a.shape, a.dtype, a.memory_space


# Trained and frozen parameters.


class Partition(NamedTuple):
    """A pytree split in two; each part has None in place of the leaves of the other."""

    trained: Tree
    frozen: Tree

    def merge(self) -> Tree:
        """Return the whole pytree."""
        return jax.tree.map(lambda a, b: b if a is None else a, *self, is_leaf=lambda a: a is None)


def partition(trainable: Any, tree: Tree) -> Partition:
    """Split parameters into trained and frozen ones.

    Args:
        trainable: ``(path, leaf) -> bool``, or a pytree of bools that is a prefix of `tree`.
        tree: the parameters.

    Raises:
        ValueError: if `trainable` is not a prefix of `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    if isinstance(trainable, Callable):
        flags = jax.tree_util.tree_map_with_path(trainable, tree)
    else:
        try:
            flags = jax.tree.broadcast(trainable, tree)
        except ValueError as error:
            raise ValueError(
                "`trainable` must be a function of a path and a leaf, or a pytree of bools that is "
                f"a prefix of the parameters: {error}"
            ) from error
    flags = jax.tree.leaves(flags)
    trained = [a if flag else None for a, flag in zip(leaves, flags, strict=True)]
    frozen = [None if flag else a for a, flag in zip(leaves, flags, strict=True)]
    return Partition(structure.unflatten(trained), structure.unflatten(frozen))


# Floating-point leaves and their cotangents. Integer leaves have float0 cotangents, which the
# rules of the operators leave out.


def is_inexact(a: Any) -> bool:
    """Return True if an array is real or complex floating-point."""
    return jnp.issubdtype(a.dtype, jnp.inexact)


def is_key(a: Any) -> bool:
    """Return True if an array has a PRNG key dtype."""
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def float_leaves(tree: Tree) -> list:
    """Return the floating-point leaves."""
    return [a for a in jax.tree.leaves(tree) if is_inexact(a)]


def replace_float_leaves(tree: Tree, floats: list) -> Tree:
    """Return `tree` with other values for ``float_leaves(tree)``."""
    rest = iter(floats)
    return jax.tree.map(lambda a: next(rest) if is_inexact(a) else a, tree)


def float_cotangents(cotangent: Tree) -> list:
    """Return the leaves of a cotangent that belong to ``float_leaves(primal)``."""
    return [d for d in jax.tree.leaves(cotangent) if d.dtype != jax.dtypes.float0]


def make_cotangent(x: Tree, dx: list) -> Tree:
    """Return the cotangent of x from the gradients of ``float_leaves(x)``."""
    rest = iter(dx)

    def cotangent(a: jax.Array) -> Any:
        return next(rest) if is_inexact(a) else np.zeros(a.shape, jax.dtypes.float0)

    return jax.tree.map(cotangent, x)


def check_differentiable(name: str, params: Tree) -> None:
    """Raise TypeError unless all parameters are floating-point."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_inexact(leaf):
            raise TypeError(
                f"`{name}`{jax.tree_util.keystr(path)} must be floating-point to be "
                f"differentiated, but its dtype is {leaf.dtype}. Close over it, pass it in `x`, or "
                "exclude it with `trainable`, where this is an option."
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def forbid_second_derivative(x: Tree, operator: str) -> Tree:
    """Return x, and raise a clear error when a backward rule is differentiated."""
    return x


@forbid_second_derivative.defjvp
def _(operator: str, *_: Any) -> NoReturn:
    raise NotImplementedError(
        f"{operator} supports first derivatives in reverse mode only. For higher derivatives, "
        "apply the layers without offload."
    )


# Dtypes.


def strip_weak_type(x: Any) -> jax.Array:
    """Return x as an array without a weak type."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype)


def cast_floats(params: Tree, dtype: Any) -> Tree:
    """Cast the real floating-point leaves; do nothing if dtype is None."""
    if dtype is None:
        return params

    def cast(a: jax.Array) -> jax.Array:
        return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(cast, params)


# Microbatches and layers as axes.


def count_row_shards(tree: Tree) -> int:
    """Return the number of devices over which a mesh with Explicit axes splits the first axis.

    Arrays that are not sharded along it do not count.
    """
    counts = {}
    for path, a in jax.tree_util.tree_leaves_with_path(tree):
        if explicit_axes(a) and jnp.ndim(a) and (names := explicit_spec(a)[0]) is not None:
            mesh = jax.typeof(a).sharding.mesh
            names = names if isinstance(names, tuple) else (names,)
            counts[math.prod(mesh.shape[name] for name in names)] = jax.tree_util.keystr(path)
    if len(counts) > 1:
        first, second, *_ = counts.items()
        raise ValueError(
            f"The first axes of all arrays of a batch must be split over the same number of "
            f"devices, but {first[1]} is split over {first[0]} and {second[1]} over {second[0]}."
        )
    return next(iter(counts), 1)


def split_microbatches(tree: Tree, m: int, row_shards: int = 1) -> Tree:
    """Reshape [B, ...] to [m, B / m, ...].

    Microbatch j is rows [j * B / m, (j + 1) * B / m). With `row_shards` from `count_row_shards` it
    is these rows of each shard, so that devices exchange no rows.
    """

    def split(a: jax.Array) -> jax.Array:
        (size, *shape), (rows, *spec) = a.shape, explicit_spec(a)
        if row_shards > 1:
            by_shard = row_shards, m, size // (row_shards * m), *shape
            a = jnp.swapaxes(reshape(a, by_shard, (rows, None, None, *spec)), 0, 1)
        return reshape(a, (m, size // m, *shape), (None, rows, *spec))

    return jax.tree.map(split, tree)


def merge_microbatches(tree: Tree, row_shards: int = 1) -> Tree:
    """Reshape [m, B / m, ...] to [B, ...], the inverse of `split_microbatches`."""

    def merge(a: jax.Array) -> jax.Array:
        if a.ndim == 1:  # scalars, which `check_microbatches` rejects
            return a
        (m, size, *shape), (_, rows, *spec) = a.shape, explicit_spec(a)
        if row_shards > 1:
            by_shard = m, row_shards, size // row_shards, *shape
            a = jnp.swapaxes(reshape(a, by_shard, (None, rows, None, *spec)), 0, 1)
        return reshape(a, (m * size, *shape), (rows, *spec))

    return jax.tree.map(merge, tree)


def merge_leading_axes(tree: Tree) -> Tree:
    """Reshape [m, n, ...] to [m * n, ...]."""
    return jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:2]), *a.shape[2:]), tree)


def fold_key(key: jax.Array | None, layer: Any, microbatch: Any) -> jax.Array | None:
    """Return the key of a layer and microbatch."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)


def count_layers(params: Tree, name: str = "stacked_params") -> int:
    """Return L of stacked parameters [L, ...]; raise ValueError if the first axes differ."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # One example for each size, so that the message stays short.
    examples = {a.shape[:1]: jax.tree_util.keystr(path) for path, a in reversed(leaves)}
    if len(examples) != 1 or () in examples or (0,) in examples:
        first = {path: size for size, path in list(reversed(examples.items()))[:4]}
        remedy = ""
        if isinstance(params, (list, tuple)) and len(params) > 1:
            remedy = " Stack a list of layers: jax.tree.map(lambda *a: jnp.stack(a), *layers)."
        raise ValueError(
            f"`{name}` must be arrays [L, ...] with the same number of layers L, but their first "
            f"axes are {first or 'none'}.{remedy}"
        )
    return next(iter(examples))[0]


def layer_shapes(params: Tree) -> Tree:
    """Return the shapes and dtypes of one layer of a stack [L, ...]."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)


def shapes_of(tree: Tree) -> Tree:
    """Return the shapes and dtypes, without memory space and sharding."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
