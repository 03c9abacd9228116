"""The parts of a training step before and after the layers, one microbatch at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common.arguments import describe
from .._common.dtypes import at_least_float32
from .._common.sharding import cast_to_varying, sum_cotangent, varying_axes
from .trees import (
    Partition,
    Tree,
    check_same_shapes,
    count_row_shards,
    float_cotangents,
    float_leaves,
    fold_key,
    make_cotangent,
    merge_microbatches,
    split_microbatches,
)


class HeadResult(NamedTuple):
    """The end of the forward pass and the start of the backward pass."""

    loss: jax.Array  # the mean over the microbatches, or over the weights
    model_state: Tree
    aux: Tree  # [num_microbatches, ...]
    grads: Tree  # of the other parameters
    dy: list  # gradients of the floating-point leaves of y


def make_embed_head(
    embed: Callable, head: Callable, has_state: bool, head_has_aux: bool, weighted_loss: bool
) -> tuple[Callable, Callable]:
    """Wrap embed and head so that both take and return a model state, and head always returns aux.

    ``embed(others, model_state, batch, key) -> (x, model_state)`` and
    ``head(others, model_state, x, batch, key) -> (loss, (weight, model_state, aux))``. The weight
    is 1 without `weighted_loss`.
    """
    names = ["loss"]
    if has_state:
        names.append("model_state")
    if head_has_aux:
        names.append("aux")

    def checked_embed(others, model_state, batch, key):
        if not has_state:
            return embed(others, batch, key), model_state
        result = embed(others, model_state, batch, key)
        x, new = _check_results("embed", result, ["x", "model_state"])
        return x, _check_model_state("embed", model_state, new)

    def checked_head(others, model_state, x, batch, key):
        state_args = (others, model_state) if has_state else (others,)
        loss, *rest = _check_results("head", head(*state_args, x, batch, key), names)
        weight = 1
        if weighted_loss:
            loss, weight = _check_results("head", loss, ["loss_sum", "weight"], " as its loss")
            weight = _check_weight(weight, loss)
        is_scalar = isinstance(loss, jax.Array) and loss.shape == ()
        if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
            remedy = " Set head_has_aux or has_state for more results, or weighted_loss."
            remedy = "" if head_has_aux else remedy
            raise TypeError(f"`head` must return a scalar loss, not {describe(loss)}.{remedy}")
        new = _check_model_state("head", model_state, rest[0]) if has_state else model_state
        return loss, (weight, new, rest[-1] if head_has_aux else ())

    return checked_embed, checked_head


def run_embed(
    embed: Callable, count: int, others: Partition, model_state: Tree, batch: Any, key: Any,
    key_index: int,
) -> tuple[Tree, Tree, Callable]:  # fmt: skip
    """Run embed; return (x, model_state, vjp), where ``vjp(dx)`` are the parameters' gradients.

    Microbatch m of `count` gets the key ``fold_in(fold_in(key, key_index), m)``. After L layers
    with the indices 0 to L - 1, that of embed is L.
    """

    def run(trained):
        params = Partition(_cast_to_batch(trained, batch, key), others.frozen).merge()

        def run_microbatch(model_state, microbatch):
            rows, m = microbatch
            x, new = embed(params, model_state, rows, fold_key(key, key_index, m))
            return jax.tree.map(lax.stop_gradient, new), x

        if count == 1:
            new, x = run_microbatch(model_state, (batch, 0))
            return x, new
        row_shards = count_row_shards(batch)
        microbatches = split_microbatches(batch, count, row_shards), jnp.arange(count)
        new, x = lax.scan(run_microbatch, model_state, microbatches)
        return merge_microbatches(x, row_shards), new

    x, vjp, model_state = jax.vjp(run, others.trained, has_aux=True)

    def pull_back(dx):
        dx = [sum_cotangent(d, a) for d, a in zip(dx, float_leaves(x), strict=True)]
        return vjp(make_cotangent(x, dx))[0]

    return x, model_state, pull_back


def run_head(
    head: Callable, count: int, others: Partition, model_state: Tree, y: Tree, batch: Any,
    key: Any, key_index: int, scale: jax.Array | None, weighted_loss: bool,
) -> HeadResult:  # fmt: skip
    """Run head forward and backward with the intermediates of one microbatch at a time.

    Gradients are those of the loss times `scale`. Keys are as in `run_embed`, with `key_index`
    L + 1.
    """
    params = _cast_to_batch(others.trained, (y, batch), key)

    def apply(trained, model_state, microbatch):
        (y, rows), m = microbatch
        all_params = Partition(trained, others.frozen).merge()
        return head(all_params, model_state, y, rows, fold_key(key, key_index, m))

    def run_microbatch(model_state, microbatch, total=None):
        (y, rows), m = microbatch

        def run(trained, y):
            return apply(trained, model_state, ((y, rows), m))

        loss, vjp, (weight, new, aux) = jax.vjp(run, params, y, has_aux=True)
        total = weight if total is None else total
        if weighted_loss:
            dloss = _divide(jnp.ones_like(loss), total)
        else:
            dloss = jnp.ones_like(loss) / count
        if scale is not None:
            dloss = dloss * scale
        grads, dy = vjp(dloss.astype(loss.dtype))
        return new, grads, (loss, aux, float_cotangents(dy)), total

    if count == 1:
        model_state, grads, (loss, aux, dy), total = run_microbatch(model_state, ((y, batch), 0))
        aux = jax.tree.map(lambda a: jnp.asarray(a)[None], aux)
        if weighted_loss:
            loss = _divide(loss, total).astype(loss.dtype)
    else:
        zeros = jax.tree.map(lambda a: cast_to_varying(jnp.zeros_like(a), varying_axes(a)), params)
        row_shards = count_row_shards((y, batch))
        microbatches = split_microbatches((y, batch), count, row_shards), jnp.arange(count)

        def weigh_microbatch(model_state, microbatch):
            _, (weight, new, _) = apply(params, model_state, microbatch)
            return new, weight

        # The total must be known before the first gradient. XLA removes from this loop whatever
        # does not contribute to the weights, which usually depend on the batch alone.
        total = None
        if weighted_loss:
            _, weights = lax.scan(weigh_microbatch, model_state, microbatches)
            total = jnp.sum(weights)

        def add_microbatch(carry, microbatch):
            model_state, sums = carry
            model_state, grads, results, _ = run_microbatch(model_state, microbatch, total)
            return (model_state, jax.tree.map(jnp.add, sums, grads)), results

        start = model_state, zeros
        (model_state, grads), (losses, aux, dy) = lax.scan(add_microbatch, start, microbatches)
        if weighted_loss:
            loss = _divide(jnp.sum(at_least_float32(losses)), total).astype(losses.dtype)
        else:
            loss = jnp.mean(losses)
        dy = merge_microbatches(dy, row_shards)
    grads = jax.tree.map(sum_cotangent, grads, others.trained)
    return HeadResult(loss, model_state, aux, grads, dy)


def _divide(a: jax.Array, total: Any) -> jax.Array:
    """Divide in float32 or a wider dtype of a; return 0 for a total of 0."""
    a = at_least_float32(a)
    total = total.astype(a.dtype)
    return jnp.where(total == 0, 0, a / jnp.where(total == 0, 1, total))


def _cast_to_batch(trained: Tree, batch: Any, key: Any) -> Tree:
    # Parameters vary over the mesh axes of the batch, so that their gradients are summed over
    # devices once for all microbatches.
    axes = varying_axes((batch, key))
    return jax.tree.map(lambda a: cast_to_varying(a, axes), trained)


def _check_results(function: str, result: Any, names: list[str], place: str = "") -> tuple:
    if len(names) == 1:
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(names):
        expected = f"({', '.join(names)}){place}"
        raise TypeError(f"`{function}` must return {expected}, not {describe(result)}.")
    return result


def _check_weight(weight: Any, loss: Any) -> jax.Array:
    """Return a weight without derivative, as an integer or in at least float32."""
    if isinstance(weight, (bool, int, float, np.ndarray, np.generic)):
        weight = jnp.asarray(weight)
    is_scalar = isinstance(weight, jax.Array) and weight.shape == ()
    if not is_scalar or not jnp.isrealobj(weight):
        raise TypeError(f"`head` must return a scalar weight, not {describe(weight)}.")
    if isinstance(loss, jax.Array) and varying_axes(weight) - varying_axes(loss):
        raise ValueError(
            "In shard_map, `head` must sum the weight over the devices if it sums the loss: "
            "jax.lax.psum((loss_sum, weight), axis_name)."
        )
    if not jnp.issubdtype(weight.dtype, jnp.integer):
        weight = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    return lax.stop_gradient(weight)


def _check_model_state(function: str, before: Tree, after: Tree) -> Tree:
    after = jax.tree.map(jnp.asarray, after)
    check_same_shapes(
        "model_state", after, f"the argument of `{function}`", before, same_types=True
    )
    return after
