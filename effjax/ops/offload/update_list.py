"""Optimizers of unlike layers, one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .checks import as_arrays, as_sequence
from .compiled import in_order
from .host_init import made_on_host, state_sharding
from .optimizer import apply, check_like_init, squares, with_own_keys
from .per_leaf import check_per_leaf
from .placement import Space, put, space_of
from .trees import Tree, shapes_of


def checked(params: Any) -> Tree:
    """A sequence of pytrees of arrays."""
    return as_arrays("params", as_sequence("params", params))


def init(tx: Any, params: Tree) -> list[Tree]:
    """The state of tx of each layer."""
    keys = [check_per_leaf(tx, shapes_of(w)) for w in params]

    def one(i: int, w: Tree) -> Tree:
        return with_own_keys(jax.tree.map(jnp.asarray, tx.init(w)), keys[i], jnp.uint32(i))

    def run(params):
        return _in_turn(one, params, lambda _, state: jax.tree.map(_to_host, state))

    return made_on_host(run, params, functools.partial(_sharding, params), lambda shape: shape)


def _to_host(a: jax.Array) -> jax.Array:
    return put(a, Space.Host) if a.ndim else a


def _sharding(params: Tree, path: tuple, shape: tuple[int, ...]) -> Any:
    (layer, *rest) = path
    return state_sharding(params[layer.idx], tuple(rest), shape)


def check_state(tx: Any, state: Any, params: Tree) -> None:
    """Raises ValueError unless tx works leaf by leaf, and these are its states of the layers."""
    as_sequence("state", state)
    if len(state) != len(params):
        raise ValueError(
            f"`state` must be the states of {len(params)} layers, as init makes it, not of "
            f"{len(state)}."
        )
    for i, (s, w) in enumerate(zip(state, params, strict=True)):
        check_per_leaf(tx, shapes_of(w))
        check_like_init(f"state[{i}]", tx, s, shapes_of(w), None)


def update(tx: Any, grads: Tree, state: Tree, params: Tree, scale) -> tuple[Tree, Tree]:
    """Of one layer after the other; gradients times `scale`."""

    def one(i: int, layer: Tree) -> Tree:
        w, s, g = layer
        if scale is not None:
            g = jax.tree.map(lambda a: (a * scale).astype(a.dtype), g)
        return apply(tx, w, s, g)

    def store(i: int, new: Tree) -> Tree:
        return jax.tree.map(lambda a, b: put(b, space_of(a)), (params[i], state[i]), new)

    updated = _in_turn(one, list(zip(params, state, grads, strict=True)), store)
    leaves = jax.tree.leaves([w for w, _ in updated])
    return jax.tree.unflatten(jax.tree.structure(params), leaves), [s for _, s in updated]


def _in_turn(run: Callable, layers: Sequence[Tree], store: Callable) -> list[Tree]:
    """``store(i, run(i, layers[i]))`` for all i; a layer is on the device only meanwhile."""
    stored, last = [], in_order()
    for i, layer in enumerate(layers):
        # Not loaded before the layer before is done, or all would be on the device at once. What
        # is done goes through the barrier too: XLA takes it away if that is not used.
        layer, last = lax.optimization_barrier((layer, last))
        if i:
            stored.append(store(i - 1, last))
        last = run(i, put(layer, Space.Device))
    return [*stored, store(len(layers) - 1, last)] if layers else []


def sum_of_squares(grads: Tree) -> jax.Array:
    """That of all gradients, of which the device holds one layer's."""
    total = jnp.float32(0)
    for g in grads:
        g, total = lax.optimization_barrier((g, total))
        total += squares(put(g, Space.Device))
    return total
