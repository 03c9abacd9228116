"""Unlike layers one after the other, their parameters and activations in host memory."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.arguments import as_callable
from .._common.sharding import cast_to_varying, varying_axes
from . import residuals, slices
from .checks import as_arrays, as_key, as_sequence
from .compiled import barrier, in_order
from .options import OffloadOptions
from .placement import Space, Where, apart, check_space, moved, put, space_of
from .slices import Slice, check_layer, check_microbatches, close_over, microbatch
from .trainable import Parts, parts_of
from .trees import (
    Tree,
    as_cotangent,
    cast,
    check_floats,
    fold,
    is_float,
    strong,
    with_gradients,
)


def offload_sequential(
    layers: Sequence[Callable[..., Any]],
    params: Sequence[Tree],
    x: Tree,
    *,
    key: jax.Array | None = None,
    num_slices: int | None = None,
    num_microbatches: int = 1,
    params_in: Where = "host",
    activations: Where = "host",
    compute_dtype: Any = None,
    has_aux: bool = False,
    policy: Callable[..., Any] | None = None,
) -> Any:
    """Applies unlike layers that stream through the device, a slice of them at a time.

    ``x = layers[i](params[i], x, key_i) for i in range(L)`` with the gradients of that, as
    `offload_scan` for layers that are no stack: a convolutional network, an encoder and its
    decoder. Between two slices x may be any pytree, of any shapes. Where there is no loop XLA may
    fuse across layers, so that results can differ from those in memory in their last bit.

    The device holds the parameters of one slice and the intermediates of one slice and one
    microbatch. Compile with `offload_jit`: left to itself XLA for GPUs would load all slices
    early. Reverse mode only.

    Args:
        layers: ``layer(params, x, key) -> x``, or ``-> (x, aux)`` with `has_aux`.
        params: a pytree of arrays for each layer, floating-point to be differentiated. Where one
            array is in several places, its gradients are added on the device.
        x: a pytree of arrays [B, ...].
        key: a PRNG key, or None; layer i and microbatch m get ``fold_in(fold_in(key, i), m)``.
        num_slices: into how many slices of about the same bytes of parameters the layers are cut;
            None: every layer is one.
        params_in: "host" or "device", where the parameters are.
        num_microbatches, activations, compute_dtype, policy: as in `offload_scan`.
        has_aux: whether layers return a second result.

    Returns:
        x; with `has_aux` (x, aux), a list with the second result of every layer, stacked as
        [num_microbatches, ...].

    Raises:
        ValueError, TypeError: when it is traced, for arguments that do not fit.

    Kept for the backward pass: the parameters where they are, and of every slice its input or what
    `policy` says.

    References:
        fairscale ``OffloadModel``.
    """
    options = OffloadOptions(
        num_slices, num_microbatches, params_in, activations,
        compute_dtype=compute_dtype, has_aux=has_aux, policy=policy,
    )  # fmt: skip
    params = as_arrays("params", as_sequence("params", params))
    x, key = as_arrays("x", x), as_key("key", key)
    return apply_sequence(check_layers("layers", layers), params, x, key, options)


def check_layers(name: str, layers: Any) -> Sequence[Callable[..., Any]]:
    """A list or a tuple of functions."""
    if not as_sequence(name, layers):
        raise ValueError(f"`{name}` must not be empty: give at least one function.")
    for i, layer in enumerate(layers):
        as_callable(f"{name}[{i}]", layer)
    return layers


def apply_sequence(
    layers: Sequence[Callable[..., Any]],
    params: Sequence[Tree],
    x: Tree,
    key: Any,
    options: OffloadOptions,
) -> Any:
    """`offload_sequential`, with its options as one."""
    params = apart([jax.tree.map(jnp.asarray, p) for p in params])
    parts = parts_of("trainable", True, params)
    sequential, by_slice, shared, x = prepare(layers, parts, x, key, options)
    results: Any = _core(sequential, by_slice, shared, x, key)
    return results if options.has_aux else results[0]


class Sequential(NamedTuple):
    """All that is no array. Slice j is layers bounds[j], ..., bounds[j + 1] - 1."""

    slices: list[tuple[slices.Slice, tuple[int, ...]]]  # and what of `shared` each closes over
    bounds: list[int]
    activations: Space
    like_x: Callable[..., Any]  # the cotangent of x from the gradients of its floats


def prepare(
    layers: Sequence[Callable[..., Any]], params: Parts, x: Tree, key: Any, options: OffloadOptions
) -> tuple[Sequential, list[Parts], list, Tree]:
    """(sequential, params, shared, x) for `run_forward`; params by slice."""
    whole = params.whole
    if len(layers) != len(whole):
        raise ValueError(
            f"`layers` (of {len(layers)}) and `params` (of {len(whole)}) must be sequences of the "
            "same length."
        )
    check_space("params_in", whole, options.params_in)
    bounds = split_by_bytes(whole, options.num_slices)
    x = moved(jax.tree.map(strong, x), Space.Device)
    axes = varying_axes((whole, x, key))
    x = jax.tree.map(lambda a: cast_to_varying(a, axes), x)
    by_slice = [Parts(*p) for p in zip(*(cut(bounds, p) for p in params), strict=True)]
    found, shared, at = [], [], x
    for first, some, w in zip(bounds[:-1], cut(bounds, layers), by_slice, strict=True):
        check_microbatches(at, options.num_microbatches)
        run = functools.partial(_layers, some, first, options)
        w, part = jax.eval_shape(
            lambda w, x: (put(w, Space.Device), microbatch(x, options.num_microbatches)), w, at
        )
        types = jax.tree.map(functools.partial(_vary, axes), (w, part, (key, jnp.int32(0))))
        converted, more = close_over(run, *types)
        apply, policy = functools.partial(_apply, converted, axes), options.policy
        keep = None if policy is None else functools.partial(residuals.keep, apply, policy)
        this = Slice(apply, options.num_microbatches, keep)
        for a in more:  # once, though several layers may close over it
            if not any(a is other for other in shared):
                shared.append(a)
        found.append((this, tuple(next(j for j, b in enumerate(shared) if a is b) for a in more)))
        at, *_ = jax.eval_shape(functools.partial(slices.forward, this), w, more, at, key)
    like_x = functools.partial(as_cotangent, jax.eval_shape(lambda x: x, x))
    shared = [cast_to_varying(a, axes) for a in shared]
    return Sequential(found, bounds, options.activations_in, like_x), by_slice, shared, x


def cut(bounds: list[int], layers: Sequence) -> list[list]:
    """What belongs to the layers of each slice."""
    return [list(layers[first:last]) for first, last in itertools.pairwise(bounds)]


def split_by_bytes(params: Sequence[Tree], num_slices: int | None) -> list[int]:
    """Where slices of about the same bytes begin and end: num_slices + 1 indices of layers."""
    if num_slices is None:
        return list(range(len(params) + 1))
    if num_slices > len(params):
        raise ValueError(
            f"`num_slices` (={num_slices!r}) must be from 1 to the number of layers "
            f"(={len(params)})."
        )
    sizes = [sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(p)) for p in params]
    ends = list(itertools.accumulate(sizes))
    bounds = [0]
    for j in range(1, num_slices):
        least, most = bounds[-1] + 1, len(params) - (num_slices - j)
        wanted = ends[-1] * j / num_slices
        bounds.append(min(range(least, most + 1), key=lambda i: abs(ends[i - 1] - wanted)))
    return [*bounds, len(params)]


def _layers(layers, first, options, w, x, key):
    key, m = key
    aux = []
    for i, (layer, params) in enumerate(zip(layers, w.whole, strict=True), first):
        layer = check_layer(layer, options.has_aux, keeps=False)
        x, more = layer(cast(params, options.compute_dtype), x, fold(key, i, m))
        aux.append(more)
    return x, aux


def _apply(converted: Callable[..., Any], axes: frozenset, w, shared, x, key, m):
    # They vary as they did when the layers were traced.
    at = jax.tree.map(lambda a: cast_to_varying(a, axes), (key, jnp.asarray(m, jnp.int32)))
    return converted(w, shared, x, at)


def _vary(axes: frozenset, a: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that varies over `axes`."""
    return jax.eval_shape(lambda a: cast_to_varying(a, axes), a)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(sequential: Sequential, params, shared, x, key):
    return run_forward(sequential, params, shared, x, key, keep=False)[:2]


def _forward(sequential: Sequential, params, shared, x, key):
    check_floats("params", [w for part in params for w in part.trained])
    x, aux, kept = run_forward(sequential, params, shared, x, key, keep=True)
    return (x, aux), (params, shared, kept, key)


def _backward(sequential: Sequential, saved, cotangents):
    params, shared, kept, key = saved
    dy, daux = with_gradients(cotangents[0]), [with_gradients(a) for a in cotangents[1]]

    def consume(carry, w, dw, more):
        return carry, (dw, more)

    none = [()] * len(params)
    grads, _, dx, dshared = run_backward(
        sequential, params, shared, key, kept, dy, daux, consume, (), none
    )
    dparams = [Parts(dw, w.frozen) for (dw, _), w in zip(grads, params, strict=True)]
    return dparams, as_cotangent(shared, dshared), sequential.like_x(dx), None


_core.defvjp(_forward, _backward)


def run_forward(
    sequential: Sequential, params: list[Parts], shared: list, x: Tree, key, keep: bool
):
    """(x, aux, kept), the latter by slice for `run_backward`."""
    aux, kept, last, at = [], [], [], in_order()
    for (this, used), w in zip(sequential.slices, params, strict=True):
        before = x
        # Not loaded before the slices before it are done, or all would be on the device at once;
        # and what is kept has left it.
        w, x, last, at = barrier((w, x, last, at))
        kept += last
        closed = [shared[j] for j in used]
        x, some, found = slices.forward(this, put(w, Space.Device), closed, x, key, keep)
        last = [put(before if this.keep is None else found, sequential.activations)] if keep else []
        aux += some
    return x, aux, kept + last


def run_backward(
    sequential: Sequential, params: list[Parts], shared: list, key, kept: list, dy: list,
    daux: list[list], consume: Callable[..., Any], carry: Any, more: list,
) -> tuple[list, Any, list, list]:  # fmt: skip
    """The slices in reverse: (results, carry, dx, dshared).

    ``carry, result = consume(carry, w, dw, more[j])`` takes the gradient of slice j, like its
    trained parameters w. The result, like (w, more[j]), goes to where these are.
    """

    def store(j, result):
        home = params[j].trained, more[j]
        return jax.tree.map(lambda a, b: put(b, space_of(a)), home, result)

    results, stored, result, at, dx = [], [], (), in_order(), dy
    dshared = [jnp.zeros_like(a) if is_float(a) else None for a in shared]
    for j in reversed(range(len(params))):
        # In order, with the result of the slice before; that before it has left the device. The key
        # again: else what the forward pass has drawn from it would be kept.
        here = params[j], kept[j], more[j]
        here, result, stored, dx, at, again = barrier((here, result, stored, dx, at, key))
        results += stored
        stored = [store(j + 1, result)] if j + 1 < len(params) else []
        w, x, s = put(here, Space.Device)
        this, used = sequential.slices[j]
        first, last = sequential.bounds[j : j + 2]
        closed, some = [shared[k] for k in used], [d for a in daux[first:last] for d in a]
        dw, ds, dx = slices.backward(this, w, closed, x, again, dx, some)
        carry, result = consume(carry, w.trained, dw, s)
        rest = iter(ds)
        for k in used:
            if is_float(shared[k]):
                dshared[k] += next(rest)
    results += [*stored, store(0, result)]
    return results[::-1], carry, dx, [d for d in dshared if d is not None]
