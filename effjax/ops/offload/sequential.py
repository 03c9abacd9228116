"""A sequence of different layers with parameters and activations in host memory."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.arguments import as_key, check_layers
from .._common.derivatives import forbid_forward_mode
from .._common.platform import follow_arrays
from .._common.sharding import cast_to_varying, varying_axes
from . import slices
from .backends import mark_in_order, run_in_order
from .placement import MemoryName, Space, check_space, copy_shared, move, put, space_of
from .slices import (
    OffloadOptions,
    Slice,
    apply_with_policy,
    check_layer,
    check_microbatches,
    first_microbatch,
    hoist_closure,
    layer_arguments,
)
from .trees import (
    Partition,
    Tree,
    as_array_tree,
    cast_floats,
    check_differentiable,
    count_row_shards,
    float_cotangents,
    forbid_second_derivative,
    is_inexact,
    make_cotangent,
    partition,
    strip_weak_type,
)


@follow_arrays
def offload_sequential(
    layers: Sequence[Callable[..., Any]],
    params: Sequence[Tree],
    x: Tree,
    *,
    key: jax.Array | None = None,
    num_slices: int | None = None,
    num_microbatches: int = 1,
    params_in: MemoryName = "host",
    activations_in: MemoryName = "host",
    compute_dtype: Any = None,
    has_aux: bool = False,
    policy: Callable[..., Any] | None = None,
) -> Any:
    """Apply a sequence of different layers whose parameters stream from host memory.

    Computes ``x = layers[i](params[i], x, key_i) for i in range(L)``. This is `offload_scan` for
    layers that do not form a stack, such as a convolutional network or an encoder and decoder. The
    program is unrolled, and between slices x may be any pytree of any shapes. XLA may fuse across
    layers, so results can differ from those in memory in the last bit.

    The device holds the parameters of one slice, and the intermediates of one slice and one
    microbatch. Compile with `offload_jit`: by default XLA for GPUs would load all slices early. On
    TPUs each slice is a conditional that loads, computes and stores in this order, and nothing of
    it overlaps the next slice. Reverse mode only.

    Args:
        layers: ``layer(params, x, key) -> x``, or ``-> (x, aux)`` with `has_aux`.
        params: a pytree of arrays for each layer, floating-point to be differentiated. If one array
            occurs several times, its gradients are added on the device.
        x: a pytree of arrays [B, ...].
        key: a PRNG key, or None. Layer i and microbatch m get ``fold_in(fold_in(key, i), m)``.
        num_slices: the number of slices, with about the same bytes of parameters each. By default
            each layer is a slice.
        num_microbatches: as in `offload_scan`.
        params_in: the memory of `params`, "host" or "device".
        activations_in: as in `offload_scan`.
        compute_dtype: as in `offload_scan`.
        has_aux: whether layers return a second result.
        policy: as in `offload_scan`.

    Returns:
        x, or with `has_aux` (x, aux), where aux is a list of the second results of each layer,
        stacked as [num_microbatches, ...].

    Raises:
        ValueError: if `layers` and `params` do not have the same length, if `num_slices` or
            `num_microbatches` do not fit, if parameters are not in the memory `params_in`,
            or if a layer closes over a host array.
        TypeError: if an argument is not an array, a key or a dtype, if a parameter that is
            differentiated is an integer, or if a layer does not return (x, aux) with `has_aux`.
        NotImplementedError: for second derivatives, or with ``jax_scan3``.

    Kept for the backward pass: the parameters in their memory, and for each slice its input or the
    values that `policy` keeps.

    References:
        fairscale ``OffloadModel``.
    """
    check_layers(layers)
    options = OffloadOptions(
        num_slices, num_microbatches, params_in, activations_in,
        compute_dtype=compute_dtype, has_aux=has_aux, policy=policy,
    )  # fmt: skip
    params, x = as_array_tree("params", params), as_array_tree("x", x)
    return apply_sequence(layers, params, x, None if key is None else as_key("key", key), options)


def apply_sequence(
    layers: Sequence[Callable[..., Any]],
    params: Sequence[Tree],
    x: Tree,
    key: Any,
    options: OffloadOptions,
) -> Any:
    """Compute `offload_sequential` with an options object."""
    params = copy_shared([jax.tree.map(jnp.asarray, p) for p in params])
    config, slice_params, closure, x = build_sequence(
        layers, partition(True, params), x, key, options
    )
    slice_params, x = forbid_forward_mode("offload_sequential", (slice_params, x))
    results: Any = _sequence(config, slice_params, closure, x, key)
    return results if options.has_aux else results[0]


class SequenceConfig(NamedTuple):
    """Static configuration of an offloaded sequence (everything that is not an array).

    Slice j is layers ``bounds[j], ..., bounds[j + 1] - 1``.
    """

    slices: list[tuple[Slice, tuple[int, ...]]]  # and the indices of its arrays in `closure`
    bounds: list[int]
    activations_space: Space
    make_dx: Callable[..., Any]  # the cotangent of x from the gradients of its floats


def build_sequence(
    layers: Sequence[Callable[..., Any]],
    params: Partition,
    x: Tree,
    key: Any,
    options: OffloadOptions,
) -> tuple[SequenceConfig, list[Partition], list, Tree]:
    """Check the arguments of `offload_sequential`; return (config, params by slice, closure, x)."""
    all_params = params.merge()
    if len(layers) != len(all_params) or not layers:
        raise ValueError(
            f"`layers` (of length {len(layers)}) and `params` (of length {len(all_params)}) must "
            "be sequences of the same length, at least 1."
        )
    check_space("params", all_params, options.params_in)
    bounds = split_by_bytes(all_params, options.count_slices(len(layers), equal=False))
    x = move(jax.tree.map(strip_weak_type, x), Space.Device)
    axes = varying_axes((all_params, x, key))
    x = jax.tree.map(lambda a: cast_to_varying(a, axes), x)
    slice_params = [
        Partition(*p) for p in zip(*(group_by_slice(bounds, p) for p in params), strict=True)
    ]
    built, closure, x_shape = [], [], x
    for first, some_layers, w in zip(
        bounds[:-1], group_by_slice(bounds, layers), slice_params, strict=True
    ):
        check_microbatches(x_shape, options.num_microbatches)
        run = functools.partial(_apply_layers, some_layers, first, options)
        w, microbatch = jax.eval_shape(
            lambda w, x: (put(w, Space.Device), first_microbatch(x, options.num_microbatches)),
            w,
            x_shape,
        )
        w_types, x_types = jax.tree.map(functools.partial(_varying_type, axes), (w, microbatch))
        hoisted, slice_closure = hoist_closure(run, w_types, x_types, (key, jnp.int32(0)))
        apply, policy = functools.partial(_apply_hoisted, hoisted), options.policy
        with_residuals = policy and functools.partial(apply_with_policy, apply, policy)
        row_shards = count_row_shards(x_shape)
        slice_fn = Slice(apply, options.num_microbatches, with_residuals, row_shards)
        # An array that several slices close over is passed once.
        for a in slice_closure:
            if not any(a is other for other in closure):
                closure.append(a)
        indices = tuple(next(j for j, b in enumerate(closure) if a is b) for a in slice_closure)
        built.append((slice_fn, indices))
        x_shape, *_ = jax.eval_shape(
            functools.partial(slices.forward, slice_fn), w, slice_closure, x_shape, key
        )
    make_dx = functools.partial(make_cotangent, jax.eval_shape(lambda x: x, x))
    closure = [cast_to_varying(a, axes) for a in closure]
    config = SequenceConfig(built, bounds, options.activations_space, make_dx)
    return config, slice_params, closure, x


def group_by_slice(bounds: list[int], per_layer: Sequence) -> list[list]:
    """Group a sequence with an entry for each layer by slices."""
    return [list(per_layer[first:last]) for first, last in itertools.pairwise(bounds)]


def split_by_bytes(params: Sequence[Tree], num_slices: int) -> list[int]:
    """Return the num_slices + 1 bounds of slices with about the same bytes of parameters."""
    sizes = [sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(p)) for p in params]
    ends = list(itertools.accumulate(sizes))
    bounds = [0]
    for j in range(1, num_slices):
        least, most = bounds[-1] + 1, len(params) - (num_slices - j)
        target = ends[-1] * j / num_slices
        bounds.append(min(range(least, most + 1), key=lambda i: abs(ends[i - 1] - target)))
    return [*bounds, len(params)]


def _apply_layers(layers, first, options, w, x, key_and_microbatch):
    key, m = key_and_microbatch
    aux = []
    for i, (layer, params) in enumerate(zip(layers, w.merge(), strict=True), first):
        layer = check_layer(layer, options, keeps_shapes=False)
        rest = layer_arguments(options, key, i, m)
        x, layer_aux = layer(cast_floats(params, options.compute_dtype), x, rest)
        aux.append(layer_aux)
    return x, aux


def _apply_hoisted(hoisted: Callable[..., Any], w, closure, x, key, m):
    return hoisted(w, closure, x, (key, jnp.asarray(m, jnp.int32)))


def _varying_type(axes: frozenset, a: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda a: cast_to_varying(a, axes), a)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sequence(config: SequenceConfig, params, closure, x, key):
    return run_forward(config, params, closure, x, key, save_residuals=False)[:2]


@follow_arrays
def _sequence_forward(config: SequenceConfig, params, closure, x, key):
    check_differentiable("params", [w for slice_params in params for w in slice_params.trained])
    x, aux, residuals = run_forward(config, params, closure, x, key, save_residuals=True)
    return (x, aux), (params, closure, residuals, key)


@follow_arrays
def _sequence_backward(config: SequenceConfig, saved, cotangents):
    params, closure, residuals, key = saved
    dy, daux = float_cotangents(cotangents[0]), [float_cotangents(a) for a in cotangents[1]]
    params, dy, daux = forbid_second_derivative((params, dy, daux), "offload_sequential")

    def consume(first, carry, w, dw, extra):
        return carry, (dw, extra)

    no_extra = [()] * len(params)
    grads, _, dx, dclosure = run_backward(
        config, params, closure, key, residuals, dy, daux, consume, (), no_extra
    )
    # All parameters are trained: `frozen` has no arrays.
    dparams = [Partition(dw, w.frozen) for (dw, _), w in zip(grads, params, strict=True)]
    return dparams, make_cotangent(closure, dclosure), config.make_dx(dx), None


_sequence.defvjp(_sequence_forward, _sequence_backward)


def run_forward(
    config: SequenceConfig,
    params: list[Partition],
    closure: list,
    x: Tree,
    key,
    save_residuals: bool,
):
    """Run the forward pass; return (x, aux by layer, residuals by slice for `run_backward`)."""
    aux, residuals, last, order = [], [], [], mark_in_order()
    for (slice_fn, indices), w in zip(config.slices, params, strict=True):
        slice_closure = [closure[j] for j in indices]

        def run(w, x, slice_fn=slice_fn, slice_closure=slice_closure, x_in=x):
            x, slice_aux, saved = slices.forward(
                slice_fn, put(w, Space.Device), slice_closure, x, key, save_residuals
            )
            if slice_fn.apply_with_residuals is None:
                saved = x_in
            return x, slice_aux, [put(saved, config.activations_space)] if save_residuals else []

        # A slice is loaded when those before it are done and their residuals have left the device.
        result, done, order = run_in_order(run, (w, x), last, order)
        x, slice_aux, last = result
        residuals += done
        aux += slice_aux
    return x, aux, residuals + last


def run_backward(
    config: SequenceConfig, params: list[Partition], closure: list, key, residuals: list, dy: list,
    daux: list[list], consume: Callable[..., Any], carry: Any, extra: list,
) -> tuple[list, Any, list, list]:  # fmt: skip
    """Run the slices in reverse order; return (results, carry, dx, dclosure).

    ``carry, result = consume(first, carry, w, dw, extra[j])`` receives the index of the first layer
    of slice j, its trained parameters w and their gradients dw. The result has the structure of
    (w, extra[j]) and moves to their memory.
    """

    def store(j, result):
        old = params[j].trained, extra[j]
        return jax.tree.map(lambda a, b: put(b, space_of(a)), old, result)

    results, stored, result, order, dx = [], [], (), mark_in_order(), dy
    dclosure = [jnp.zeros_like(a) if is_inexact(a) else None for a in closure]
    for j in reversed(range(len(params))):
        slice_fn, indices = config.slices[j]
        first, last = config.bounds[j : j + 2]
        slice_closure = [closure[k] for k in indices]
        slice_daux = [d for a in daux[first:last] for d in a]

        def run(
            inputs, dx, key,
            slice_fn=slice_fn, slice_closure=slice_closure, slice_daux=slice_daux, carry=carry,
            first=first,
        ):  # fmt: skip
            w, saved, slice_extra = put(inputs, Space.Device)
            dw, slice_dclosure, dx = slices.backward(
                slice_fn, w, slice_closure, saved, key, dx, slice_daux
            )
            carry, result = consume(first, carry, w.trained, dw, slice_extra)
            return carry, result, slice_dclosure, dx

        def store_result(results, j=j):
            carry, result, *rest = results
            return carry, store(j, result), *rest

        # Slice j is loaded once the result of slice j + 1 has been computed and that of slice j + 2
        # has left the device. The key is an input so that XLA does not keep the random numbers of
        # the forward pass.
        inputs = params[j], residuals[j], extra[j]
        new, (result, stored), order = run_in_order(
            run, (inputs, dx, key), (result, stored), order, store_result
        )
        results += stored
        stored = [store(j + 1, result)] if j + 1 < len(params) else []
        carry, result, slice_dclosure, dx = new
        rest = iter(slice_dclosure)
        for k in indices:
            if is_inexact(closure[k]):
                dclosure[k] += next(rest)
    results += [*stored, store(0, result)]
    return results[::-1], carry, dx, [d for d in dclosure if d is not None]
