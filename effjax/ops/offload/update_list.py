"""Optimizers of unlike layers, one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .checks import as_arrays, as_sequence
from .compiled import barrier, in_order
from .host_init import made_on_host, state_sharding
from .optimizer import apply, check_like_init, squares, with_own_keys
from .per_leaf import check_per_leaf
from .placement import Space, put, space_of
from .trees import Tree, shapes_of


def checked(params: Any) -> Sequence[Tree]:
    """A sequence of pytrees of arrays."""
    return as_arrays("params", as_sequence("params", params))


def number_of(name: str, params: Sequence[Tree]) -> int:
    """How many layers these are; raises ValueError or TypeError for what is none."""
    return len(as_sequence(name, params))


def init(tx: Any, params: Sequence[Tree]) -> list[Tree]:
    """The state of tx of each layer."""
    keys = [check_per_leaf(tx, shapes_of(w)) for w in params]
    spaces = [space_of(next(iter(jax.tree.leaves(w)), 0)) for w in params]

    def one(i: int, w: Tree) -> Tree:
        return with_own_keys(jax.tree.map(jnp.asarray, tx.init(w)), keys[i], jnp.uint32(i))

    def run(params):
        return _in_turn(one, params, store)

    def store(i, state):
        return jax.tree.map(lambda a: put(a, spaces[i]) if a.ndim else a, state)

    def is_on_host(path, shape):
        return spaces[path[0].idx] == Space.Host and len(shape) > 0

    return made_on_host(run, params, functools.partial(_sharding, params), is_on_host)


def _sharding(params: Tree, path: tuple, shape: tuple[int, ...]) -> Any:
    layer, *rest = path
    own = params[layer.idx]  # or none: then on all devices
    return state_sharding(own if jax.tree.leaves(own) else params, tuple(rest), shape)


def check_state(name: str, tx: Any, state: Any, params: Sequence[Tree]) -> None:
    """Raises ValueError unless tx works leaf by leaf, and these are its states of the layers."""
    as_sequence(name, state)
    if len(state) != len(params):
        raise ValueError(
            f"`{name}` must be the states of {len(params)} layers, as init makes it, not of "
            f"{len(state)}."
        )
    for i, (s, w) in enumerate(zip(state, params, strict=True)):
        check_per_leaf(tx, shapes_of(w))
        check_like_init(f"{name}[{i}]", tx, s, shapes_of(w), None)


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
        layer, last = barrier((layer, last))
        if i:
            stored.append(store(i - 1, last))
        last = run(i, put(layer, Space.Device))
    return [*stored, store(len(layers) - 1, last)] if layers else []


def sum_of_squares(grads: Tree) -> jax.Array:
    """That of all gradients, of which the device holds one layer's."""
    total = jnp.float32(0)
    for g in grads:
        g, total = barrier((g, total))
        total += squares(put(g, Space.Device))
    return total
