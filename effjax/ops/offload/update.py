"""Optimizers with state in host memory, applied layer by layer on the device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import describe
from .backends import (
    barrier,
    load,
    mark_host_slices,
    mark_in_order,
    run_in_order,
    scan_slices,
    write,
)
from .clipping import (
    check_clipping,
    make_clip,
    measure_squares,
    sum_of_squares,
    with_clipping,
    zero_squares,
)
from .host_init import init_by_layer, init_in_place
from .per_leaf import check_per_leaf
from .placement import Space, put, space_of
from .state_places import place_state, state_space
from .trees import (
    Tree,
    as_array_tree,
    check_same_shapes,
    count_layers,
    is_key,
    layer_shapes,
    shapes_of,
)


class StreamUpdate(NamedTuple):
    """The init and update functions of a streamed optimizer."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def stream_update(tx: Any, *, stacked: bool = True) -> StreamUpdate:
    """Make an optimizer for parameters in host memory that updates one layer at a time.

    Computes the same as ``tx`` for each layer separately, or as optax for a list of layers, except
    for random numbers. The device holds the parameters, gradients and state of two layers, for any
    number of layers. Under `offload_jit` the parameters and the state are updated in place.

    Random numbers (``optax.add_noise``, ``optax.noisy_sgd``) differ from layer to layer. The PRNG
    keys in the state of layer i, counted from 0, are ``fold_in(key, 2**32 - 1 - i)`` for each key
    of ``tx.init``. (optax would split one key among all parameters of a list.) They are part of the
    state, so that a resumed run draws the same numbers.

    Args:
        tx: an ``optax.GradientTransformation`` that treats every parameter separately: adamw, lion,
            sgd, schedules, masks, chains of them, ``optax.MultiSteps``. It gets the parameters of
            one layer.
        stacked: whether the parameters are a pytree of arrays [L, ...], as in `offload_scan`, or a
            list of pytrees, one for each layer, as in `offload_sequential`.

    Returns:
        ``init(params) -> state`` and ``update(grads, state, params, clip_norm=None,
        clip_by="global") -> (params, state)``. The state is stored with the parameters, and its
        scalars on the device; for stacked parameters it consists of arrays [L, ...], for a list of
        a state per layer. Unlike in optax, `update` returns new parameters. With `clip_norm` it
        scales the gradients as ``optax.clip_by_global_norm`` does, after another pass over them for
        the norm, which `offload_train_step` avoids. With ``clip_by="layer"`` it clips each layer by
        the norm of its own gradients, without another pass.

    Raises:
        ValueError: from both functions, if tx mixes parameters or layers (naming the entry of its
            state in which they meet), if it needs more arguments, or if it would draw the same
            random numbers in every layer; from `update`, if gradients or state do not match.
        TypeError: from both functions, if a leaf is not an array.
    """
    layers = LayerStack(tx) if stacked else LayerList(tx)

    def init(params: Tree) -> Tree:
        params = as_array_tree("params", params)
        layers.count("params", params)
        return layers.init(params)

    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        clip_norm: float | None = None,
        clip_by: Literal["global", "layer"] = "global",
    ):
        check_clipping(clip_norm, clip_by, ("global", "layer"))
        params, grads = as_array_tree("params", params), as_array_tree("grads", grads)
        layers.count("params", params)
        check_same_shapes("grads", grads, "`params`", params)
        layers.check_state("state", state, params)
        if clip_norm is None:
            return layers.update(grads, state, params)
        norm = jnp.sqrt(layers.sum_of_squares(grads)) if clip_by == "global" else None
        clipped = with_clipping(tx, make_clip(clip_norm, clip_by, norm))
        return dataclasses.replace(layers, tx=clipped).update(grads, state, params)

    return StreamUpdate(init, update)


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Optimizer for a stack of identical layers. It contains no layers, only updates them.

    Parameters and state are arrays [L, ...].
    """

    tx: Any

    def count(self, name: str, params: Tree) -> int:
        """Return the number of layers."""
        return count_layers(params, name)

    def init(self, params: Tree) -> Tree:
        """Return the state of each layer, [L, ...]."""
        keys = check_per_leaf(self.tx, layer_shapes(params))

        def make(w: Tree, i: jax.Array) -> Tree:
            return fold_state_keys(self.tx.init(w), keys, i)

        space = space_of(jax.tree.leaves(params)[0])
        return init_by_layer(
            make,
            params,
            lambda a: state_space(a.ndim, space),
            lambda shapes: place_state(shapes, params, stacked=True),
        )

    def check_state(self, name: str, state: Tree, params: Tree) -> None:
        """Raise ValueError unless `tx` is per-leaf and this is its state."""
        layer, num_layers = layer_shapes(params), count_layers(params)
        check_per_leaf(self.tx, layer)
        expected = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((num_layers, *a.shape), a.dtype),
            jax.eval_shape(self.tx.init, layer),
        )
        check_same_shapes(name, state, "the result of init", expected)

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple:
        """Update one layer while the next one is loaded."""
        num_layers = count_layers(params)

        def body(loop_state, _):
            i, carry, (w, s, g) = loop_state
            after = jnp.minimum(i + 1, num_layers - 1)
            new = apply_optimizer(self.tx, w, s, g)
            # The next layer is read before this one is written, or XLA would copy all of it. With a
            # barrier for each array, one is written while the others are still read.
            leaves, structure = jax.tree.flatten(carry)
            pairs = [barrier((a, load(a, after))) for a in leaves]
            carry, ahead = (structure.unflatten(a) for a in zip(*pairs, strict=True))
            return (i + 1, write(carry, new, i), (*ahead, load(grads, after))), None

        start = mark_host_slices()
        carry = params, state
        loop_state = start, carry, load((params, state, grads), start)
        scan = scan_slices if space_of(jax.tree.leaves(params)[0]) == Space.Host else lax.scan
        (_, carry, _), _ = scan(body, loop_state, None, num_layers)
        return carry

    def update_slice(self, w: Tree, state: Tree, dw: Tree) -> tuple:
        """Update the parameters and the state of a slice on the device, [slice_size, ...]."""
        return jax.vmap(functools.partial(apply_optimizer, self.tx))(w, state, dw)

    def sum_of_squares(self, grads: Tree) -> jax.Array:
        """Return the sum of the squares of all gradients, with one layer on the device."""

        def body(carry, _):
            i, total = carry
            return (i + 1, total + sum_of_squares(load(grads, i))), None

        start = mark_host_slices(), zero_squares(grads)
        (_, total), _ = lax.scan(body, start, None, length=count_layers(grads))
        return total

    def measure(self, run: Callable, state: Tree, params: Tree) -> tuple[Any, Tree, jax.Array]:
        """Run updates and return (result, state, sum of the squares of all gradients).

        ``run(layers, state) -> (result, state)`` updates every layer once.
        """
        squares = jnp.zeros(count_layers(params), zero_squares(params).dtype)
        layers = dataclasses.replace(self, tx=measure_squares(self.tx))
        result, (state, squares) = run(layers, (state, squares))
        return result, state, jnp.sum(squares)


@dataclasses.dataclass(frozen=True)
class LayerList:
    """Optimizer for a list of different layers. It contains no layers, only updates them.

    The state is a list with one state per layer.
    """

    tx: Any

    def count(self, name: str, params: Any) -> int:
        """Return the number of layers."""
        if not isinstance(params, Sequence):
            raise TypeError(
                f"`{name}` must be a list or a tuple, one entry per layer, not {describe(params)}."
            )
        return len(params)

    def init(self, params: Sequence[Tree]) -> list[Tree]:
        """Return the state of each layer."""
        keys = [check_per_leaf(self.tx, shapes_of(w)) for w in params]
        spaces = [space_of(next(iter(jax.tree.leaves(w)), 0)) for w in params]

        def make(i: int, w: Tree) -> Tree:
            state = jax.tree.map(jnp.asarray, self.tx.init(w))
            return fold_state_keys(state, keys[i], jnp.uint32(i))

        def store(i: int, state: Tree) -> Tree:
            return jax.tree.map(lambda a: put(a, state_space(a.ndim, spaces[i])), state)

        def place(shapes: list[Tree]) -> list[Tree]:
            # A layer without parameters has its counts on the devices of the others.
            owners = (w if jax.tree.leaves(w) else params for w in params)
            return [place_state(*layer) for layer in zip(shapes, owners, strict=True)]

        return init_in_place(lambda params: _run_in_turn(make, params, store), params, place)

    def check_state(self, name: str, state: Any, params: Sequence[Tree]) -> None:
        """Raise ValueError unless `tx` is per-leaf and this is its state."""
        for w in params:
            check_per_leaf(self.tx, shapes_of(w))
        expected = [jax.eval_shape(self.tx.init, shapes_of(w)) for w in params]
        check_same_shapes(name, state, "the result of init", expected)

    def update(self, grads: Any, state: Any, params: Sequence[Tree]) -> tuple:
        """Update the layers one at a time."""

        def run(i: int, layer: Tree) -> Tree:
            w, s, g = layer
            return apply_optimizer(self.tx, w, s, g)

        def store(i: int, new: Tree) -> Tree:
            return jax.tree.map(lambda a, b: put(b, space_of(a)), (params[i], state[i]), new)

        updated = _run_in_turn(run, list(zip(params, state, grads, strict=True)), store)
        leaves = jax.tree.leaves([w for w, _ in updated])
        return jax.tree.unflatten(jax.tree.structure(params), leaves), [s for _, s in updated]

    def update_slice(self, w: list, state: list, dw: list) -> tuple[list, list]:
        """Update the layers of a slice on the device."""
        new = [apply_optimizer(self.tx, *layer) for layer in zip(w, state, dw, strict=True)]
        return [w for w, _ in new], [s for _, s in new]

    def sum_of_squares(self, grads: Sequence[Tree]) -> jax.Array:
        """Return the sum of the squares of all gradients, with one layer on the device."""
        total, order = jnp.float32(0), mark_in_order()
        for g in grads:
            add = lambda g, total: total + sum_of_squares(put(g, Space.Device))  # noqa: E731
            total, _, order = run_in_order(add, (g, total), (), order)
        return total

    def measure(self, run: Callable, state: list, params: Sequence[Tree]) -> tuple:
        """Run updates and return (result, state, sum of the squares), as in `LayerStack`."""
        layers = dataclasses.replace(self, tx=measure_squares(self.tx))
        zeros = [zero_squares(w) for w in params]
        result, both = run(layers, list(zip(state, zeros, strict=True)))
        return result, [s for s, _ in both], sum((q for _, q in both), jnp.float32(0))


def _run_in_turn(run: Callable, layers: Sequence[Tree], store: Callable) -> list[Tree]:
    """Compute ``store(i, run(i, layers[i]))`` for all i, with one layer on the device."""
    stored, last, order = [], (), mark_in_order()
    for i, layer in enumerate(layers):

        def load_and_run(layer, i=i):
            return run(i, put(layer, Space.Device))

        # A layer is loaded after the one before is done. Its result passes run_in_order and is used
        # after it, or XLA would remove the dependency.
        result, last, order = run_in_order(
            load_and_run, (layer,), last, order, functools.partial(store, i)
        )
        if i:
            stored.append(store(i - 1, last))
        last = result
    return [*stored, store(len(layers) - 1, last)] if layers else []


def apply_optimizer(tx: Any, w: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """Return the parameters and the state after a step of `tx`, cast to their previous dtypes."""
    if w is None:  # one frozen array; None has another meaning in optax
        return w, state
    updates, new = tx.update(grads, state, w)
    w = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), w, updates)

    def cast(old: jax.Array, new: jax.Array) -> jax.Array:
        # Typed PRNG keys have no astype outside of jit.
        return new if old.dtype == new.dtype else new.astype(old.dtype)

    return w, jax.tree.map(cast, state, new)


def fold_state_keys(state: Tree, keys: set[int], i: jax.Array) -> Tree:
    """Fold the number of the layer into the leaves `keys` of an optimizer's state."""

    # With ~i instead of i, because fold_in(key, i) is entry i of split(key), from which the
    # optimizer of the other parameters draws.
    def fold(key: jax.Array) -> jax.Array:
        fold_one = lambda key: jax.random.fold_in(key, ~i.astype(jnp.uint32))  # noqa: E731
        for _ in range(key.ndim if is_key(key) else key.ndim - 1):
            fold_one = jax.vmap(fold_one)
        return fold_one(key)

    leaves, structure = jax.tree.flatten(state)
    leaves = [fold(a) if j in keys else a for j, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)
