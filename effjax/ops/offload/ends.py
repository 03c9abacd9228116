"""What comes before and after the layers of a training step, a microbatch at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import describe
from .._common.sharding import cast_to_varying, sum_cotangent, varying_axes, zeros
from .checks import check_alike
from .loops import scan
from .trainable import Parts
from .trees import Tree, as_cotangent, floats_of, fold, join, split, with_gradients


class Ends(NamedTuple):
    """The functions, with a state and a second result whether or not the user's have them."""

    embed: Callable  # (others, model_state, batch, key) -> (x, model_state)
    head: Callable  # (others, model_state, x, batch, key) -> (loss, (model_state, aux))
    num_microbatches: int


class Headed(NamedTuple):
    """The end of the forward pass, and the beginning of the backward pass."""

    loss: jax.Array  # the mean over the microbatches
    model_state: Tree
    aux: Tree  # [num_microbatches, ...]
    grads: Tree  # of the other parameters
    dy: list  # the leaves that are no integers


def ends_of(
    embed: Callable, head: Callable, num_microbatches: int, has_state: bool, head_has_aux: bool
) -> Ends:
    """Of functions as `offload_train_step` takes them, with their results checked."""
    names = "loss", *(("model_state",) if has_state else ()), *(("aux",) if head_has_aux else ())

    def checked_embed(others, model_state, batch, key):
        if not has_state:
            return embed(others, batch, key), model_state
        x, new = _results("embed", embed(others, model_state, batch, key), ("x", "model_state"))
        return x, _kept("embed", model_state, new)

    def checked_head(others, model_state, x, batch, key):
        before = (others, model_state) if has_state else (others,)
        loss, *rest = _results("head", head(*before, x, batch, key), names)
        _check_loss(loss, head_has_aux)
        new = _kept("head", model_state, rest[0]) if has_state else model_state
        return loss, (new, rest[-1] if head_has_aux else ())

    return Ends(checked_embed, checked_head, num_microbatches)


def run_embed(
    ends: Ends, others: Parts, model_state: Tree, batch: Any, key: Any, number: int
) -> tuple[Tree, Tree, Callable]:
    """(x, model_state, back): ``back(dx)`` are the gradients of the other parameters.

    Microbatch m gets ``fold_in(fold_in(key, number), m)``; dx are the leaves that are no integers.
    """
    count = ends.num_microbatches

    def run(trained):
        wide = Parts(_wide(trained, batch, key), others.frozen).whole

        def one(model_state, at):
            part, m = at
            x, new = ends.embed(wide, model_state, part, fold(key, number, m))
            return jax.tree.map(lax.stop_gradient, new), x

        if count == 1:
            return one(model_state, (batch, 0))[::-1]
        at = split(batch, count), jnp.arange(count)
        new, x = scan(one, model_state, at, differentiated=True)
        _check_rows(x)
        return join(x), new

    x, pull, model_state = jax.vjp(run, others.trained, has_aux=True)

    def back(dx):
        dx = [sum_cotangent(d, a) for d, a in zip(dx, floats_of(x), strict=True)]
        return pull(as_cotangent(x, dx))[0]

    return x, model_state, back


def run_head(
    ends: Ends, others: Parts, model_state: Tree, y: Tree, batch: Any, key: Any, number: int,
    scale: jax.Array | None,
) -> Headed:  # fmt: skip
    """Forward and backward, so that what the head computes is there for one microbatch at a time.

    Gradients are those of the mean of the losses, times `scale`. Keys are as in `run_embed`.
    """
    count = ends.num_microbatches
    wide = _wide(others.trained, (y, batch), key)

    def one(model_state, at):
        (y, part), m = at

        def run(trained, y):
            whole = Parts(trained, others.frozen).whole
            return ends.head(whole, model_state, y, part, fold(key, number, m))

        loss, pull, (new, aux) = jax.vjp(run, wide, y, has_aux=True)
        dloss = jnp.ones_like(loss) / count
        if scale is not None:
            dloss = (dloss * scale).astype(loss.dtype)
        grads, dy = pull(dloss)
        return new, grads, (loss, aux, with_gradients(dy))

    def add(carry, at):
        model_state, sums = carry
        model_state, grads, results = one(model_state, at)
        return (model_state, jax.tree.map(jnp.add, sums, grads)), results

    if count == 1:
        model_state, grads, (loss, aux, dy) = one(model_state, ((y, batch), 0))
        aux = jax.tree.map(lambda a: jnp.asarray(a)[None], aux)
    else:
        start = model_state, jax.tree.map(lambda a: zeros(a.shape, a.dtype, a), wide)
        at = split((y, batch), count), jnp.arange(count)
        (model_state, grads), (losses, aux, dy) = scan(add, start, at)
        loss, dy = jnp.mean(losses), join(dy)
    grads = jax.tree.map(sum_cotangent, grads, others.trained)
    return Headed(loss, model_state, aux, grads, dy)


def _wide(trained: Tree, batch: Any, key: Any) -> Tree:
    """Parameters that vary as the batch does: one sum over the devices for all microbatches."""
    axes = varying_axes((batch, key))
    return jax.tree.map(lambda a: cast_to_varying(a, axes), trained)


def _check_rows(x: Tree) -> None:
    """Of x [num_microbatches, ...]."""
    for path, a in jax.tree_util.tree_leaves_with_path(x):
        if a.ndim == 1:
            raise ValueError(
                "`embed` must return arrays [rows, ...] with num_microbatches, but "
                f"x{jax.tree_util.keystr(path)} is a scalar."
            )


def _results(function: str, result: Any, names: tuple[str, ...]) -> tuple:
    """The results of a function that must return these."""
    if len(names) == 1:
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(names):
        raise TypeError(f"`{function}` must return ({', '.join(names)}), not {describe(result)}.")
    return result


def _kept(function: str, before: Tree, after: Tree) -> Tree:
    """The state that a function returns, which must be like the one that it got."""
    after = jax.tree.map(jnp.asarray, after)
    check_alike("model_state", after, f"what `{function}` is given", before)
    leaves = jax.tree_util.tree_leaves_with_path(after)
    for (path, a), b in zip(leaves, jax.tree.leaves(before), strict=True):
        if a.dtype != b.dtype:
            raise ValueError(
                f"`model_state`{jax.tree_util.keystr(path)} must keep its dtype, but `{function}` "
                f"made {a.dtype} of {b.dtype}; cast it."
            )
    return after


def _check_loss(loss: Any, head_has_aux: bool) -> None:
    if not isinstance(loss, jax.Array):
        hint = "" if head_has_aux else " and nothing else, unless head_has_aux or has_state is set"
        raise TypeError(f"`head` must return a scalar loss{hint}, not {describe(loss)}.")
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"`head` must return a scalar loss, not {jax.typeof(loss)}.")
