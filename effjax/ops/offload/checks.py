"""The door of offloading: pytrees of arrays, keys and optimizers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._common.arguments import describe
from .trees import Tree, is_key


def as_arrays(name: str, tree: Tree, numbers: bool = False) -> Tree:
    """A pytree of arrays as JAX's; Python's numbers are none, unless they may be among them."""
    if tree is None:
        raise TypeError(f"`{name}` must be an array or a pytree of arrays, not None.")
    taken = (jax.Array, np.ndarray, np.generic, *((bool, int, float, complex) if numbers else ()))

    def as_array(path: tuple, a: Any) -> jax.Array:
        try:
            if isinstance(a, taken) or hasattr(a, "__jax_array__"):
                return jnp.asarray(a)
        except TypeError:  # NumPy has arrays of strings and of objects
            pass
        raise TypeError(
            f"`{name}`{jax.tree_util.keystr(path)} must be an array, not {describe(a)}; see "
            "jnp.asarray."
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)


def as_key(name: str, key: Any) -> jax.Array | None:
    """One PRNG key of either style, or None."""
    return None if key is None else one_key(name, key, ", or None")


def one_key(name: str, key: Any, or_none: str = "") -> jax.Array:
    """One PRNG key of either style."""
    if _are_keys(key) and key.ndim == (0 if is_key(key) else 1):
        return jnp.asarray(key)
    found = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else describe(key)
    raise TypeError(f"`{name}` must be one key, such as jax.random.key(0){or_none}, not {found}.")


def as_keys(name: str, keys: Any) -> jax.Array:
    """[L] PRNG keys of either style."""
    if not _are_keys(keys):
        raise TypeError(
            f"`{name}` must be an array [L] of keys, such as jax.random.split(key, L), not "
            f"{describe(keys)}."
        )
    if keys.ndim != (1 if is_key(keys) else 2) or not len(keys):
        raise ValueError(
            f"`{name}` must be one key a layer, [L], such as jax.random.split(key, L), but its "
            f"shape is {keys.shape}."
        )
    return jnp.asarray(keys)


def _are_keys(a: Any) -> bool:
    return isinstance(a, (jax.Array, np.ndarray)) and (is_key(a) or a.dtype == jnp.uint32)


def as_sequence(name: str, value: Any) -> Sequence:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"`{name}` must be a list or a tuple, not {describe(value)}.")
    return value


def check_optimizer(tx: Any) -> None:
    """Raises TypeError for what is no optimizer of optax."""
    for method in ("init", "update"):
        if not callable(getattr(tx, method, None)):
            hint = "; call it" if callable(tx) else ""
            raise TypeError(
                "`tx` must be an optax.GradientTransformation, with init and update, not "
                f"{describe(tx)}{hint}."
            )


def check_alike(name: str, tree: Tree, other_name: str, other: Tree) -> None:
    """Raises ValueError unless two pytrees have the same structure, of the same shapes."""
    a, b = jax.tree.structure(tree), jax.tree.structure(other)
    if a != b:
        raise ValueError(f"`{name}` must be like {other_name}, {b!s:.300}, not {a!s:.300}.")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), y in zip(leaves, jax.tree.leaves(other), strict=True):
        if np.shape(x) != y.shape:
            raise ValueError(
                f"`{name}`{jax.tree_util.keystr(path)} must be of the shape {y.shape}, as in "
                f"{other_name}, not {np.shape(x)}."
            )
