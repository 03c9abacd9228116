"""What an optimizer does to one layer."""

from typing import Any

import jax
import jax.numpy as jnp

from .._common.arguments import as_number
from .checks import check_alike
from .trees import Tree, is_key, one_layer


def apply(tx: Any, w: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """The parameters and the state of tx after a step."""
    if w is None:  # one array that is frozen; None has another meaning for optax
        return w, state
    updates, new = tx.update(grads, state, w)
    w = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), w, updates)
    return w, jax.tree.map(lambda a, b: b.astype(a.dtype), state, new)


def with_own_keys(state: Tree, keys: set[int], i: jax.Array) -> Tree:
    """The state of layer i, in which the leaves `keys` are its own.

    Not fold_in(key, i): that is entry i of split(key), which the optimizer of the other parameters
    draws from.
    """

    def fold(key: jax.Array) -> jax.Array:
        one = lambda key: jax.random.fold_in(key, ~i.astype(jnp.uint32))  # noqa: E731
        for _ in range(key.ndim if is_key(key) else key.ndim - 1):
            one = jax.vmap(one)
        return one(key)

    leaves, structure = jax.tree.flatten(state)
    leaves = [fold(a) if j in keys else a for j, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def check_like_init(name: str, tx: Any, state: Tree, params: Tree, num_layers: int | None) -> None:
    """Raises ValueError unless this is the optimizer's state of parameters, or of their layers."""
    one = params if num_layers is None else one_layer(params)
    axes = () if num_layers is None else (num_layers,)
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((*axes, *a.shape), a.dtype), jax.eval_shape(tx.init, one)
    )
    check_alike(name, state, "what init makes", wanted)


def check_clip_norm(clip_norm: float | None) -> None:
    if clip_norm is not None:
        as_number("clip_norm", clip_norm, lambda norm: norm > 0, "above 0")


def clip_scale(sum_of_squares: jax.Array, clip_norm: float) -> jax.Array:
    """What ``optax.clip_by_global_norm`` multiplies gradients with."""
    norm = jnp.sqrt(sum_of_squares)
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def squares(tree: Tree) -> jax.Array:
    """The sum of the squares of all numbers, in float32."""
    sizes = (jnp.abs(a).astype(jnp.float32) for a in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(a)) for a in sizes), jnp.float32(0))
