"""Application of an optimizer to parameters on the device, with clipping and loss scales.

Gradients are clipped by the norm of all gradients, of the previous step, or of each layer.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import as_number, check_choice
from .._common.dtypes import at_least_float32
from .._common.sharding import varying_axes
from .trees import Tree, is_key, shapes_of

ClipBy = Literal["global", "previous", "layer"]


class Optimizer(NamedTuple):
    """An optimizer, like ``optax.GradientTransformation``."""

    init: Callable  # (params) -> state
    update: Callable  # (grads, state, params) -> (updates, state)


class TransformedOptimizer(NamedTuple):
    """An optimizer without `init`."""

    update: Callable  # (grads, state, params) -> (updates, state)


class OffloadParams(NamedTuple):
    """All parameters of a training step, as its optimizer gets them.

    The optimizer updates a layer, or all of `others`, at a time, and gets None in place of all
    other parameters. Paths are those of the whole, such as ``.layers['kernel']`` of each layer of a
    stack, ``.layers[3]['kernel']`` in a list of layers, and ``.others['embedding']``.

    Attributes:
        layers: the parameters of the layers, without the axis [L] of a stack.
        others: the parameters of embed and head.
    """

    layers: Any
    others: Any


def with_full_paths(
    tx: Any,
    part: Tree,
    put_in: Callable[[Tree], OffloadParams],
    take_out: Callable[[OffloadParams], Tree],
) -> Optimizer:
    """Return `tx` for a part of all parameters, which `tx` gets with the paths of the whole.

    Args:
        tx: an optimizer of OffloadParams.
        part: the part, or its shapes.
        put_in: returns OffloadParams with a part, and None in place of all other parameters.
        take_out: returns the part of them. The entries of the state have the same parts.
    """

    def is_whole(a: Any) -> bool:
        return isinstance(a, OffloadParams)

    def take_out_all(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: take_out(a) if is_whole(a) else a, tree, is_leaf=is_whole)

    def init(params: Tree) -> Tree:
        return take_out_all(tx.init(put_in(params)))

    def update(grads: Tree, state: Tree, params: Tree, value: Any = None) -> tuple[Tree, Tree]:
        # The parts that are not taken out have no arrays. If `params` are some rows of `part`, the
        # state is that of the whole: `init` of adamw_8bit would choose another one for a few rows.
        is_part = jax.tree.structure(params) == jax.tree.structure(part)
        shapes = shapes_of(part if is_part else params)
        structure = jax.tree.structure(jax.eval_shape(tx.init, put_in(shapes)))
        state = structure.unflatten(jax.tree.leaves(state))
        new = with_value(tx, value).update(put_in(grads), state, put_in(params))
        return take_out(new[0]), take_out_all(new[1])

    return Optimizer(init, update)


def with_value(tx: Any, value: Any) -> Any:
    """Return `tx` that gets the loss as the argument `value`, if it takes this argument."""
    try:
        arguments = inspect.signature(tx.update).parameters
    except (TypeError, ValueError):
        return tx
    if "value" not in arguments and all(a.kind != a.VAR_KEYWORD for a in arguments.values()):
        return tx

    def update(grads, state, params):
        if value is not None:
            return tx.update(grads, state, params, value=value)
        try:
            return tx.update(grads, state, params)
        except TypeError as error:
            if "'value'" not in str(error):
                raise
            raise TypeError("`value` must be the loss, which `tx` needs, not None.") from error

    return TransformedOptimizer(update)


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


# Clipping.


def check_clipping(
    clip_norm: float | None,
    clip_by: str = "global",
    choices: tuple[str, ...] = ("global", "previous", "layer"),
) -> None:
    """Raise TypeError or ValueError unless both arguments are valid and fit each other."""
    check_choice("clip_by", clip_by, *choices)
    if clip_norm is not None:
        as_number("clip_norm", clip_norm, lambda norm: norm > 0, "above 0")
    elif clip_by != "global":
        raise ValueError(
            f"`clip_by` (={clip_by!r}) needs `clip_norm`, without which gradients are not clipped."
        )


def clip_factor(norm: jax.Array, clip_norm: float | jax.Array) -> jax.Array:
    """Return the factor of ``optax.clip_by_global_norm``; NaN for a norm that is NaN."""
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def make_clip(
    clip_norm: float | jax.Array, clip_by: ClipBy, norm: jax.Array | None
) -> Callable[[Tree], Tree]:
    """Return the function that clips the gradients of one layer, or all others together.

    Args:
        clip_norm: The largest norm.
        clip_by: The norm that it limits.
        norm: The norm of all gradients of this or the previous step. Unused with "layer".
    """
    if norm is None or clip_by == "layer":
        return functools.partial(clip_gradients, clip_norm=clip_norm)
    return functools.partial(scale_gradients, factor=clip_factor(norm, clip_norm))


def scale_gradients(grads: Tree, factor: jax.Array) -> Tree:
    """Multiply gradients by a factor, and keep their dtypes."""
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def clip_gradients(grads: Tree, clip_norm: float | jax.Array) -> Tree:
    """Clip gradients by their own norm."""
    return scale_gradients(grads, clip_factor(jnp.sqrt(sum_of_squares(grads)), clip_norm))


def with_clipping(tx: Any, clip: Callable[[Tree], Tree]) -> TransformedOptimizer:
    """Return `tx` that first clips the gradients it gets."""

    def update(grads, state, params):
        return tx.update(clip(grads), state, params)

    return TransformedOptimizer(update)


def next_grad_norm(old: jax.Array, norm: jax.Array) -> jax.Array:
    """Return the norm for the next step; the old one if the new one is not finite."""
    norm = norm.astype(old.dtype)
    return jnp.where(jnp.isfinite(norm), norm, old)


def sum_of_squares(tree: Tree) -> jax.Array:
    """Return the sum of the squares of all numbers, in float32 or the widest dtype of the tree.

    In shard_map, the squares of arrays that are sharded over devices are summed over them, once for
    all arrays that are sharded over the same axes.
    """
    totals: dict[tuple, Any] = {}
    for a in jax.tree.leaves(tree):
        axes = tuple(sorted(varying_axes(a)))
        squares = jnp.sum(jnp.square(at_least_float32(jnp.abs(a))))
        totals[axes] = totals.get(axes, jnp.float32(0)) + squares
    summed = [lax.psum(total, axes) if axes else total for axes, total in totals.items()]
    return sum(summed[1:], summed[0]) if summed else jnp.float32(0)


def zero_squares(tree: Tree) -> jax.Array:
    """Return a zero of the dtype of `sum_of_squares`."""
    return jnp.zeros((), jax.eval_shape(sum_of_squares, tree).dtype)


def is_finite(tree: Tree) -> jax.Array:
    """Return whether all numbers are finite, on all devices over which they are sharded.

    The sum of squares does not tell: it overflows from float32 numbers of 2e19 on.
    """
    counts: dict[tuple, Any] = {}  # of leaves that are not finite, by the axes of their shards
    for a in jax.tree.leaves(tree):
        axes = tuple(sorted(varying_axes(a)))
        bad = (~jnp.all(jnp.isfinite(a))).astype(jnp.int32)
        counts[axes] = counts.get(axes, jnp.int32(0)) + bad
    return jnp.equal(sum(lax.psum(n, axes) if axes else n for axes, n in counts.items()), 0)


def measure_squares(tx: Any) -> TransformedOptimizer:
    """Return `tx` with the state (state of tx, sum of the squares of the last gradients)."""

    def update(grads, state, params):
        updates, new = tx.update(grads, state[0], params)
        return updates, (new, sum_of_squares(grads))

    return TransformedOptimizer(update)


# Statistics of gradients, loss scales and skipped steps.


class GradientStats(NamedTuple):
    """Statistics of gradients, accumulated during the backward pass."""

    squares: jax.Array  # [], the sum of squares, float32 or wider
    finite: jax.Array  # bool []

    @classmethod
    def zero(cls, params: Tree) -> "GradientStats":
        """Return the statistics before any gradients of these parameters."""
        return cls(zero_squares(params), jnp.bool_(True))

    def add(self, grads: Tree, scale: jax.Array | None) -> "GradientStats":
        """Add gradients, which were computed from the loss times `scale`; None if it is 1."""
        grads = grads if scale is None else unscale_gradients(grads, scale)
        squares = self.squares + sum_of_squares(grads)
        return GradientStats(squares, self.finite & is_finite(grads))


def adjust_optimizer(
    tx: Any,
    finite: jax.Array,
    clip: Callable[[Tree], Tree] | None,
    scale: jax.Array | None,
) -> TransformedOptimizer:
    """Return `tx` that divides gradients by `scale`, clips them, and skips nonfinite steps."""

    def update(grads, state, params):
        if scale is not None:
            grads = unscale_gradients(grads, scale)
        if clip is not None:
            grads = clip(grads)
        updates, new = tx.update(grads, state, params)
        if scale is not None:
            # p + (-0) is p to the bit; p + 0 is not, where p is -0.
            zeros = jax.tree.map(lambda u: -jnp.zeros_like(u), updates)
            select = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
            updates, new = select((updates, new), (zeros, state))
        return updates, new

    return TransformedOptimizer(update)


def unscale_gradients(grads: Tree, scale: jax.Array) -> Tree:
    """Divide by `scale` in float32, or in the dtype of the gradients if it is wider."""

    def unscale(g: jax.Array) -> jax.Array:
        return g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale

    return jax.tree.map(unscale, grads)
