"""Unlike layers one after the other, their parameters and activations in host memory."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arguments import as_callable
from .._parallel import as_varying, sum_to_type_of
from . import residuals, slices
from .checks import as_arrays, as_key, as_sequence
from .compiled import in_order
from .options import OffloadOptions
from .placement import Space, Where, apart, check_space, moved, put, space_of
from .slices import Slice, check_layer, check_microbatches, close_over, microbatch
from .trees import (
    Tree,
    as_cotangent,
    cast,
    check_floats,
    fold,
    is_float,
    strong,
    varying_axes,
    with_gradients,
)


def offload_sequential(
    layers: Sequence[Callable],
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
    policy: Callable | None = None,
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
    for i, layer in enumerate(as_sequence("layers", layers)):
        as_callable(f"layers[{i}]", layer)
    params = as_arrays("params", as_sequence("params", params))
    x, key = as_arrays("x", x), as_key("key", key)
    return apply_sequence(layers, params, x, key, options)


def apply_sequence(
    layers: Sequence[Callable],
    params: Sequence[Tree],
    x: Tree,
    key: Any,
    options: OffloadOptions,
) -> Any:
    """`offload_sequential`, with its options as one."""
    if len(layers) != len(params) or not layers:
        raise ValueError(
            f"`layers` (of {len(layers)}) and `params` (of {len(params)}) must be sequences of the "
            "same length, of at least 1."
        )
    params = apart([jax.tree.map(jnp.asarray, p) for p in params])
    check_space("params_in", params, options.params_in)
    bounds = split_by_bytes(params, options.num_slices)
    x = moved(jax.tree.map(strong, x), Space.Device)
    axes = varying_axes((params, x, key))
    x = jax.tree.map(lambda a: as_varying(a, axes), x)
    static, shared = _groups(layers, bounds, params, x, key, options)
    shared = [as_varying(a, axes) for a in shared]
    by_slice = [params[first:last] for first, last in itertools.pairwise(bounds)]
    results: Any = _core(static, by_slice, shared, x, key)
    x, aux = results
    return (x, [a for some in aux for a in some]) if options.has_aux else x


def _groups(
    layers: Sequence[Callable], bounds: list[int], params: Sequence[Tree], x: Tree, key: Any,
    options: OffloadOptions,
) -> tuple[tuple, list]:  # fmt: skip
    """(static, shared) for `_core`: slices with the indices of what they share, and that."""
    axes = varying_axes((params, x, key))
    groups, shared, used, at = [], [], [], x
    for first, last in itertools.pairwise(bounds):
        check_microbatches(at, options.num_microbatches)
        run = functools.partial(_layers, layers, first, last, options)
        w, part = jax.eval_shape(
            lambda w, x: (put(w, Space.Device), microbatch(x, options.num_microbatches)),
            params[first:last],
            at,
        )
        types = jax.tree.map(functools.partial(_vary, axes), (w, part, (key, jnp.int32(0))))
        converted, more = close_over(run, *types)
        apply, policy = functools.partial(_apply, converted, axes), options.policy
        keep = None if policy is None else functools.partial(residuals.keep, apply, policy)
        this = Slice(apply, options.num_microbatches, keep)
        groups.append(this)
        for a in more:  # once, though several layers may close over it
            if not any(a is other for other in shared):
                shared.append(a)
        used.append(tuple(next(j for j, b in enumerate(shared) if a is b) for a in more))
        at, *_ = jax.eval_shape(functools.partial(slices.forward, this), w, more, at, key)
    like_x = functools.partial(as_cotangent, jax.eval_shape(lambda x: x, x))
    return (tuple(zip(groups, used, strict=True)), options.activations_in, like_x), shared


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


def _layers(layers, first, last, options, w, x, key):
    key, m = key
    aux = []
    for i in range(first, last):
        layer = check_layer(layers[i], options.has_aux, keeps=False)
        x, more = layer(cast(w[i - first], options.compute_dtype), x, fold(key, i, m))
        aux.append(more)
    return x, aux


def _apply(converted: Callable, axes: frozenset, w, shared, x, key, m):
    # A barrier may have made one of them vary, and not the other.
    at = jax.tree.map(lambda a: as_varying(a, axes), (key, jnp.asarray(m, jnp.int32)))
    return converted(w, shared, x, at)


def _vary(axes: frozenset, a: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that varies over `axes`."""
    return jax.eval_shape(lambda a: as_varying(a, axes), a)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(static, params, shared, x, key):
    return _run_forward(static, params, shared, x, key, False)[0]


def _forward(static, params, shared, x, key):
    check_floats("params", params)
    return _run_forward(static, params, shared, x, key, True)


def _run_forward(static, params, shared, x, key, is_kept):
    groups, activations, _ = static
    aux, kept, at = [], [], in_order()
    for (this, used), w in zip(groups, params, strict=True):
        more = [shared[j] for j in used]
        before = x
        # Not loaded before the slices before it are done, or all would be on the device at once.
        w, x, at = lax.optimization_barrier((w, x, at))
        x, some, found = slices.forward(this, put(w, Space.Device), more, x, key, is_kept)
        kept.append(put(before if this.keep is None else found, activations))
        aux.append(some)
    return (x, aux), (params, shared, kept, key)


def _backward(static, saved, cotangents):
    groups, _, like_x = static
    params, shared, kept, key = saved
    dy, daux = cotangents
    dx, at = with_gradients(dy), in_order()
    dparams, dshared = [], [jnp.zeros_like(a) if is_float(a) else None for a in shared]
    # In order, and again: else what the forward pass has drawn from the key would be kept.
    for (this, used), w, x, some in reversed(list(zip(groups, params, kept, daux, strict=True))):
        more = [shared[j] for j in used]
        host, x, dx, at, again = lax.optimization_barrier((w, x, dx, at, key))
        here, x = put((host, x), Space.Device)
        dw, ds, dx = slices.backward(this, here, more, x, again, dx, with_gradients(some))
        dw = jax.tree.map(sum_to_type_of, dw, w)  # the barrier made w vary as x does
        dparams.append(jax.tree.map(lambda d, p: put(d, space_of(p)), dw, w))
        ds = iter(ds)
        for j in used:
            if is_float(shared[j]):
                dshared[j] += next(ds)
    dshared = as_cotangent(shared, [d for d in dshared if d is not None])
    return dparams[::-1], dshared, like_x(dx), None


_core.defvjp(_forward, _backward)
