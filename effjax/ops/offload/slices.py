"""A slice of a model: forward, and its gradients, one microbatch after the other."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._common.sharding import cast_to_varying, explicit_axes, sum_cotangent, varying_axes
from .loops import scan
from .placement import Space, space_of, write
from .trainable import trained_of, with_trained
from .trees import (
    Tree,
    floats_of,
    is_key,
    join,
    merge,
    split,
    strong,
)


class Slice(NamedTuple):
    """``apply(w, shared, x, key, microbatch) -> (x, aux)``, and how many microbatches there are.

    ``keep(w, shared, (key, microbatch), x) -> ((x, aux), Residuals)`` for slices that are not
    computed again from their input.
    """

    apply: Callable
    num_microbatches: int
    keep: Callable | None = None


def forward(this: Slice, w: Tree, shared: Tree, x: Tree, key, keep: bool = False):
    """All microbatches: (x, aux [num_microbatches, ...], kept), the latter for `backward`."""
    axes = varying_axes(x)
    w = jax.tree.map(lambda a: cast_to_varying(a, axes), w)

    def run(x, m):
        if keep and this.keep is not None:
            return this.keep(w, shared, (key, m), x)
        return this.apply(w, shared, x, key, m), ()

    if this.num_microbatches == 1:
        (y, aux), kept = run(x, 0)
        aux = jax.tree.map(lambda a: a[None], aux)
    else:
        at = split(x, this.num_microbatches), jnp.arange(this.num_microbatches)
        _, ((y, aux), kept) = _scan(lambda _, at: ((), run(*at)), (), at)
        y = join(y)
    return y, aux, x if this.keep is None else kept


def backward(this: Slice, w: Tree, shared: Tree, kept: Tree, key, dy: list, daux: list):
    """The gradients (dw, dshared, dx) of `forward`, from what it has kept.

    dy, daux, dshared and dx are the leaves that are no integers. Gradients are added up from the
    last microbatch to the first: the order in which autodiff adds those of a scan.
    """
    # One sum over the devices for all microbatches, and before the gradient leaves the device.
    axes = varying_axes((kept, dy))
    wide = jax.tree.map(lambda a: cast_to_varying(a, axes), w)

    def gradients(kept, m, dy, daux):
        if this.keep is not None:
            return kept.pull(kept.arrays, wide, shared, (key, m), [*dy, *daux])

        def run(trained, shared_floats, x_floats):
            at = with_trained(wide, trained), merge(shared, shared_floats), merge(kept, x_floats)
            return floats_of(this.apply(*at, key, m))

        _, pull = jax.vjp(run, trained_of(wide), floats_of(shared), floats_of(kept))
        return pull([*dy, *daux])

    if this.num_microbatches == 1:
        dw, dshared, dx = gradients(kept, 0, dy, [a[0] for a in daux])
    else:

        def one(sums, at):
            *more, dx = gradients(*at)
            return jax.tree.map(jnp.add, sums, tuple(more)), dx

        sums = trained_of(wide), floats_of(shared)
        start = jax.tree.map(lambda a: cast_to_varying(jnp.zeros_like(a), axes), sums)
        start, dy = lax.optimization_barrier((start, dy))
        if this.keep is None:
            kept = split(kept, this.num_microbatches)
        dy = split(dy, this.num_microbatches)
        at = kept, jnp.arange(this.num_microbatches), dy, daux
        (dw, dshared), dx = _scan(one, start, at, reverse=True)
        dx = join(dx)
    return jax.tree.map(sum_cotangent, dw, trained_of(w)), dshared, dx


def _scan(body: Callable, carry: Tree, xs: Tree, reverse: bool = False) -> tuple[Tree, Tree]:
    """``lax.scan`` with results in arrays that are not made before xs are there.

    Those of lax.scan depend on nothing: where slices are no loop, XLA makes all of them first.
    """
    first, count = jax.tree.map(lambda a: a[0], xs), jax.tree.leaves(xs)[0].shape[0]
    zero, xs = lax.optimization_barrier((jnp.int32(0), xs))
    axes = varying_axes(xs)

    def buffer(a):
        return cast_to_varying(lax.broadcast(zero.astype(a.dtype), (count, *a.shape)), axes)

    def step(state, at):
        carry, results = state
        j, x = at
        carry, result = body(carry, x)
        leaves = jax.tree.leaves(result)
        arrays = [a for a in leaves if not is_key(a)]
        return (carry, write(results, arrays, j)), [a for a in leaves if is_key(a)]

    result = jax.eval_shape(body, carry, first)[1]
    arrays = [buffer(a) for a in jax.tree.leaves(result) if not is_key(a)]
    at = jnp.arange(count), xs
    (carry, arrays), keys = scan(step, (carry, arrays), at, reverse=reverse)
    arrays, keys = iter(arrays), iter(keys)
    return carry, jax.tree.map(lambda a: next(keys if is_key(a) else arrays), result)


def check_layer(layer: Callable, has_aux: bool, keeps: bool = True) -> Callable:
    """``layer(params, x, key) -> (x, aux)`` that says what is wrong with what it returns."""

    def checked(params, x, key):
        result = layer(params, x, key)
        if not has_aux:
            result = result, ()
        elif not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"`layer` must return (x, aux) with has_aux=True, not {result!r}.")
        y, aux = jax.tree.map(strong, result)
        if keeps:
            _check_kept(x, y)
        return y, aux

    return checked


def _check_kept(x: Tree, y: Tree) -> None:
    before, after = jax.tree.structure(x), jax.tree.structure(y)
    if before != after:
        raise ValueError(f"`layer` must keep the structure of x: {before} became {after}.")
    leaves = jax.tree_util.tree_leaves_with_path(x)
    for (path, a), b in zip(leaves, jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"`layer` must keep the shapes and dtypes of x, but x{jax.tree_util.keystr(path)} "
                f"of {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}."
            )


def close_over(layer: Callable, w: Tree, x: Tree, key) -> tuple[Callable, list]:
    """(layer, shared): ``layer(params, shared, x, key)``, and what `layer` closes over.

    w and x show the types of the parameters and of a microbatch.
    """
    closed, result = jax.make_jaxpr(layer, return_shape=True)(w, x, key)
    hoisted = [isinstance(c, Tracer) for c in closed.consts]
    shared = [c for c, is_hoisted in zip(closed.consts, hoisted, strict=True) if is_hoisted]
    if any(space_of(c) == Space.Host for c in closed.consts):
        raise ValueError(
            "`layer` closes over an array in host memory; pass it in the parameters, or close over "
            "effjax.to_device of it."
        )
    axes = varying_axes(x)

    def converted(params, shared, x, key):
        rest = iter(shared)
        pairs = zip(closed.consts, hoisted, strict=True)
        consts = [next(rest) if is_hoisted else c for c, is_hoisted in pairs]
        run = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))
        return jax.tree.unflatten(
            jax.tree.structure(result), run(*jax.tree.leaves((params, x, key)))
        )

    return converted, [cast_to_varying(a, axes) for a in shared]


def microbatch(x: Tree, num_microbatches: int) -> Tree:
    """The first one."""
    if num_microbatches == 1:
        return x
    return jax.tree.map(lambda a: a[: a.shape[0] // num_microbatches], x)


def check_microbatches(x: Tree, num_microbatches: int, name: str = "x") -> None:
    if num_microbatches == 1:
        return
    if any(map(explicit_axes, jax.tree.leaves(x))):
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) over a mesh with Explicit axes: every "
            "device must split its own rows; use it inside jax.shard_map."
        )
    shapes = [
        (f"{name}{jax.tree_util.keystr(path)}", jnp.shape(a))
        for path, a in jax.tree_util.tree_leaves_with_path(x)
    ]
    wrong = [
        f"{leaf} is of shape {shape}"
        for leaf, shape in shapes
        if shape[:1] != shapes[0][1][:1] or not shape or shape[0] % num_microbatches
    ]
    if wrong or not shapes:
        beside = f", and {shapes[0][0]} of {shapes[0][1]}" if len(shapes) > len(wrong) else ""
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must divide the batch, the first axis of "
            f"all arrays of {name}, but {wrong[0] if wrong else 'there are none'}{beside}."
        )
