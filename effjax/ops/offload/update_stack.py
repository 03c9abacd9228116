"""Optimizers of a stack of like layers, whose state is a stack as well."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .checks import as_arrays
from .compiled import guard_host_slices
from .host_init import by_layer, state_sharding
from .loops import scan
from .optimizer import apply, check_like_init, squares, with_own_keys
from .per_leaf import check_per_leaf
from .placement import Space, put, read, space_of, write
from .trees import Tree, num_layers_of, one_layer


def checked(params: Any) -> Tree:
    """A pytree of arrays [L, ...]."""
    params = as_arrays("params", params)
    num_layers_of(params, "params")
    return params


def init(tx: Any, params: Tree) -> Tree:
    """The state of tx of each layer, [L, ...]."""
    keys = check_per_leaf(tx, one_layer(params))

    def make(w: Tree, i: jax.Array) -> Tree:
        return with_own_keys(tx.init(w), keys, i)

    space = space_of(jax.tree.leaves(params)[0])
    return by_layer(make, params, functools.partial(state_sharding, params), space, scalars=False)


def check_state(tx: Any, state: Tree, params: Tree) -> None:
    """Raises ValueError unless tx works leaf by leaf, and this is its state of the layers."""
    check_per_leaf(tx, one_layer(params))
    check_like_init("state", tx, state, params, num_layers_of(params))


def update(tx: Any, grads: Tree, state: Tree, params: Tree, scale) -> tuple[Tree, Tree]:
    """One layer after the other, the next one loaded meanwhile; gradients times `scale`."""
    num_layers = num_layers_of(params)

    def fetch(carry, i):
        i = jnp.minimum(i, num_layers - 1)
        return [put(read(tree, i), Space.Device) for tree in (*carry, grads)]

    def body(at, _):
        i, carry, (w, s, g) = at
        # What is read is read before it is written: else XLA would copy the whole.
        carry, ahead = lax.optimization_barrier((carry, fetch(carry, i + 1)))
        if scale is not None:
            g = jax.tree.map(lambda a: (a * scale).astype(a.dtype), g)
        return (i + 1, write(carry, apply(tx, w, s, g), i), ahead), None

    start = guard_host_slices()
    carry = params, state
    (_, carry, _), _ = scan(body, (start, carry, fetch(carry, start)), None, length=num_layers)
    return carry


def update_slice(tx: Any, params: Tree, state: Tree, i, w: Tree, dw: Tree) -> tuple[Tree, Tree]:
    """Slice i of params and state [num_slices, slice_size, ...], by the gradients of its layers."""
    s = put(read(state, i), Space.Device)
    return write((params, state), jax.vmap(functools.partial(apply, tx))(w, s, dw), i)


def sum_of_squares(grads: Tree) -> jax.Array:
    """That of all gradients, of which the device holds one layer's."""

    def body(at, _):
        i, total = at
        return (i + 1, total + squares(put(read(grads, i), Space.Device))), None

    (_, total), _ = scan(
        body, (guard_host_slices(), jnp.float32(0)), None, length=num_layers_of(grads)
    )
    return total
