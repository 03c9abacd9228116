"""A slice of a model: forward, and its gradients, one microbatch after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._parallel import as_varying, sum_to_type_of, varying
from .placement import write

Tree = Any


class Slice(NamedTuple):
    """``apply(w, shared, x, key, microbatch) -> (x, aux)``, and how many microbatches there are."""

    apply: Callable
    num_microbatches: int


def forward(this: Slice, w: Tree, shared: Tree, x: Tree, key) -> tuple[Tree, Tree]:
    """All microbatches: x, and aux [num_microbatches, ...]."""
    axes = varying_axes(x)
    w = jax.tree.map(lambda a: as_varying(a, axes), w)
    if this.num_microbatches == 1:
        x, aux = this.apply(w, shared, x, key, 0)
        return x, jax.tree.map(lambda a: a[None], aux)

    def one(_, at):
        x, m = at
        return (), this.apply(w, shared, x, key, m)

    at = split(x, this.num_microbatches), jnp.arange(this.num_microbatches)
    _, (x, aux) = _scan(one, (), at)
    return join(x), aux


def backward(this: Slice, w: Tree, shared: Tree, x: Tree, key, dy: list, daux: list):
    """The gradients (dw, dshared, dx) of `forward`, which is computed again.

    dy, daux, dshared and dx are the leaves that are no integers. Gradients are added up from the
    last microbatch to the first: the order in which autodiff adds those of a scan.
    """
    # One sum over the devices for all microbatches, and before the gradient leaves the device.
    axes = varying_axes(x)
    wide = jax.tree.map(lambda a: as_varying(a, axes), w)

    def gradients(x, m, dy, daux):
        def run(w, shared_floats, x_floats):
            at = merge(shared, shared_floats), merge(x, x_floats)
            return floats_of(this.apply(w, *at, key, m))

        _, pull = jax.vjp(run, wide, floats_of(shared), floats_of(x))
        return pull([*dy, *daux])

    if this.num_microbatches == 1:
        dw, dshared, dx = gradients(x, 0, dy, [a[0] for a in daux])
    else:

        def one(sums, at):
            *more, dx = gradients(*at)
            return jax.tree.map(jnp.add, sums, tuple(more)), dx

        sums = wide, floats_of(shared)
        start = jax.tree.map(lambda a: as_varying(jnp.zeros_like(a), axes), sums)
        start, dy = lax.optimization_barrier((start, dy))
        split_x, split_dy = (split(a, this.num_microbatches) for a in (x, dy))
        at = split_x, jnp.arange(this.num_microbatches), split_dy, daux
        (dw, dshared), dx = _scan(one, start, at, reverse=True)
        dx = join(dx)
    return jax.tree.map(sum_to_type_of, dw, w), dshared, dx


def _scan(body: Callable, carry: Tree, xs: Tree, reverse: bool = False) -> tuple[Tree, Tree]:
    """``lax.scan`` with results in arrays that are not made before xs are there.

    Those of lax.scan depend on nothing: where slices are no loop, XLA makes all of them first.
    """
    first, count = jax.tree.map(lambda a: a[0], xs), jax.tree.leaves(xs)[0].shape[0]
    zero, xs = lax.optimization_barrier((jnp.int32(0), xs))
    axes = varying_axes(xs)

    def buffer(a):
        return as_varying(lax.broadcast(zero.astype(a.dtype), (count, *a.shape)), axes)

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
    (carry, arrays), keys = lax.scan(step, (carry, arrays), at, reverse=reverse)
    arrays, keys = iter(arrays), iter(keys)
    return carry, jax.tree.map(lambda a: next(keys if is_key(a) else arrays), result)


def cast(w: Tree, dtype: Any) -> Tree:
    if dtype is None:
        return w
    return jax.tree.map(lambda a: a.astype(dtype) if is_float(a) else a, w)


def split(tree: Tree, m: int) -> Tree:
    """[B, ...] -> [m, B / m, ...]: microbatch j is rows [j * B / m, (j + 1) * B / m)."""
    return jax.tree.map(lambda a: a.reshape(m, a.shape[0] // m, *a.shape[1:]), tree)


def join(tree: Tree) -> Tree:
    """The first two axes made one."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), tree)


def fold(key: jax.Array | None, layer, microbatch) -> jax.Array | None:
    """The key of a layer and microbatch."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)


def varying_axes(tree: Tree) -> frozenset:
    """The mesh axes over which any array of a tree varies."""
    return frozenset().union(*map(varying, jax.tree.leaves(tree)))


def is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)


def is_key(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def floats_of(tree: Tree) -> list:
    """The leaves that have gradients."""
    return [a for a in jax.tree.leaves(tree) if is_float(a)]


def merge(tree: Tree, floats: list) -> Tree:
    """`tree` with other values for `floats_of(tree)`."""
    rest = iter(floats)
    return jax.tree.map(lambda a: next(rest) if is_float(a) else a, tree)


def with_gradients(cotangent: Tree) -> list:
    """The leaves of a cotangent that belong to `floats_of` its primal."""
    return [d for d in jax.tree.leaves(cotangent) if d.dtype != jax.dtypes.float0]


def as_cotangent(x: Tree, dx: list) -> Tree:
    """The cotangent of x from the gradients of `floats_of(x)`."""
    rest = iter(dx)
    zero = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    return jax.tree.map(lambda a: next(rest) if is_float(a) else zero(a), x)
