"""Pytrees of arrays: which of them have gradients, and layers and microbatches as an axis."""

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any


def strong(x: Any) -> jax.Array:
    """An array whose dtype does not depend on what it meets."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype)


def cast(w: Tree, dtype: Any) -> Tree:
    """The real floating-point leaves in this dtype; None: as they are."""
    if dtype is None:
        return w
    is_real = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: a.astype(dtype) if is_real(a) else a, w)


def split(tree: Tree, m: int) -> Tree:
    """[B, ...] -> [m, B / m, ...]: microbatch j is rows [j * B / m, (j + 1) * B / m)."""
    return jax.tree.map(lambda a: a.reshape(m, a.shape[0] // m, *a.shape[1:]), tree)


def join(tree: Tree) -> Tree:
    """The first two axes made one."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), tree)


def fold(key: jax.Array | None, layer, microbatch) -> jax.Array | None:
    """The key of a layer and microbatch."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)


def is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)


def is_key(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def floats_of(tree: Tree) -> list:
    """The leaves that have gradients."""
    return [a for a in jax.tree.leaves(tree) if is_float(a)]


def merge(tree: Tree, floats: list) -> Tree:
    """`tree` with other values for `floats_of(tree)`."""
    rest = iter(floats)
    return jax.tree.map(lambda a: next(rest) if is_float(a) else a, tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def once(x: Tree, operator: str) -> Tree:
    """The same tree, which is not differentiated: for inside a rule."""
    return x


@once.defjvp
def _(operator: str, *_: Any) -> NoReturn:
    refuse_again(operator)


def refuse_again(operator: str) -> NoReturn:
    raise NotImplementedError(
        f"{operator} has first derivatives in reverse mode only: take derivatives of its gradient "
        "on the layers themselves, without offload."
    )


def with_gradients(cotangent: Tree) -> list:
    """The leaves of a cotangent that belong to `floats_of` its primal."""
    return [d for d in jax.tree.leaves(cotangent) if d.dtype != jax.dtypes.float0]


def as_cotangent(x: Tree, dx: list) -> Tree:
    """The cotangent of x from the gradients of `floats_of(x)`."""
    rest = iter(dx)
    zero = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    return jax.tree.map(lambda a: next(rest) if is_float(a) else zero(a), x)


def check_floats(name: str, params: Tree) -> None:
    """Raises TypeError unless all parameters have gradients."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_float(leaf):
            raise TypeError(
                f"`{name}` must be floating-point to be differentiated, but {leaf.dtype} is the "
                f"dtype of {jax.tree_util.keystr(path) or 'it'}: close over what is no parameter, "
                "or pass it in `x`."
            )


def num_layers_of(params: Tree, name: str = "stacked_params") -> int:
    """L of stacked parameters [L, ...]; raises ValueError if they do not have the same one."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # One array for each first axis that there is: all of them would be a long list.
    named = {a.shape[:1]: jax.tree_util.keystr(path) for path, a in reversed(leaves)}
    if len(named) != 1 or () in named or (0,) in named:
        first = {path: size for size, path in list(reversed(named.items()))[:4]}
        hint = ""
        if isinstance(params, (list, tuple)) and len(params) > 1:
            hint = " Stack a list of layers: jax.tree.map(lambda *a: jnp.stack(a), *layers)."
        raise ValueError(
            f"`{name}` must be arrays [L, ...] with the same number of layers L, but their first "
            f"axes are {first or 'none'}.{hint}"
        )
    return next(iter(named))[0]


def one_layer(params: Tree) -> Tree:
    """The shapes of the parameters of one layer of a stack."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)


def shapes_of(tree: Tree) -> Tree:
    """Shapes and dtypes, wherever the arrays are."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
