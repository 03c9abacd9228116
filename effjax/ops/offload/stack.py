"""A stack of identical layers with parameters and activations in host memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .._common.arguments import as_key
from .._common.derivatives import forbid_forward_mode
from .._common.platform import follow_arrays
from .._common.sharding import cast_to_varying, varying_axes
from . import slices
from .backends import (
    allocate_results,
    barrier,
    host_slices_are_wrong,
    load,
    mark_host_slices,
    peels_turns,
    read,
    repeat_turns,
    scan_slices,
    write,
)
from .placement import SPACES, MemoryName, Space, check_space, move, put, space_of
from .slices import (
    OffloadOptions,
    check_layer,
    check_microbatches,
    first_microbatch,
    hoist_closure,
    scan_with_policy,
)
from .trees import (
    Partition,
    Tree,
    as_array_tree,
    cast_floats,
    check_differentiable,
    count_layers,
    count_row_shards,
    float_cotangents,
    float_leaves,
    forbid_second_derivative,
    is_key,
    make_cotangent,
    merge_leading_axes,
    partition,
    strip_weak_type,
)


@follow_arrays
def offload_scan(
    layer: Callable[..., Any],
    stacked_params: Tree,
    x: Tree,
    *,
    key: jax.Array | None = None,
    num_slices: int | None = None,
    num_microbatches: int = 1,
    params_in: MemoryName = "host",
    activations_in: MemoryName = "host",
    grads_in: MemoryName | None = None,
    prefetch: int = 1,
    resident_slices: int = 0,
    compute_dtype: Any = None,
    has_aux: bool = False,
    policy: Callable[..., Any] | None = None,
    trainable: Any = True,
) -> Any:
    """Apply a stack of identical layers whose parameters stream from host memory.

    Computes ``x = layer(params[i], x, key_i) for i in range(L)``. The key of layer i and microbatch
    m is ``fold_in(fold_in(key, i), m)``. Gradients, dropout included, are bit-identical to
    ``jax.lax.scan`` over parameters on the device with ``jax.checkpoint`` around each layer. A scan
    without recomputation can differ in the last bit where XLA fuses it differently.

    The device holds the parameters of ``1 + prefetch`` slices, and the intermediates of one slice
    and one microbatch, for any number of layers. The backward pass streams the slices in reverse
    order, recomputes each from its input, and sends its gradients to the memory of the parameters.
    With a `policy` the residuals that it keeps stream too.

    Under jit over a mesh, parameters are replicated or sharded along any axis except the first.
    Gradients are summed over devices before they leave the device. Use several microbatches over a
    mesh with Explicit axes, or inside ``jax.shard_map``: there each device splits its own rows.
    Over a mesh with Auto axes, splitting the batch would exchange rows between devices.

    Limitations: ``jax.pmap`` takes no arrays in host memory, so pass ``params_in="device"`` there.
    Reverse mode only, without vmap of a gradient. JAX cannot differentiate ``lax.cond`` and
    ``lax.scan`` around host arrays. XLA cannot add host gradients on a GPU, so use parameters once.

    Args:
        layer: ``layer(params, x, key) -> x`` for one layer, or ``-> (x, aux)`` with `has_aux`. x
            keeps its structure, shapes and dtypes. Arrays that it closes over get gradients.
        stacked_params: a pytree of arrays [L, ...] for L layers, in the memory
            `params_in`; see `host_init` and `to_host`. Trained parameters are floating-point.
        x: a pytree of arrays [B, ...]. Integers have no gradients.
        key: a PRNG key. If None, the layers get None.
        num_slices: the number of slices, a divisor of L. By default each layer is a slice.
        num_microbatches: the number M of microbatches that go through a slice before the next one
            is loaded, a divisor of B. Microbatch m is rows [m B / M, (m + 1) B / M). If the rows
            are sharded along Explicit axes, it is those of each device's rows.
        params_in: the memory of `stacked_params`, "host" or "device".
        activations_in: the memory of the residuals: the input of each slice, or the values that
            `policy` keeps.
        grads_in: the memory in which gradients are collected, before they are moved to that of the
            parameters; by default the same.
        prefetch: the number of slices to load ahead of the current one, at most all of them.
        resident_slices: the number of slices at the end that stay on the device between the two
            passes, with their residuals, so that they are loaded once.
        compute_dtype: the floating-point dtype to which real floating-point parameters are cast on
            the device. Gradients have the dtype of the parameters. If None, no cast.
        has_aux: whether layers return a second result.
        policy: the values kept for the backward pass in addition to the inputs, a policy of
            ``jax.checkpoint_policies`` such as dots_saveable, everything_saveable or
            save_only_these_names("name"). Parameters, and values that depend on them only, are
            never copied. The destination in an offloading policy is ignored. If None, everything is
            recomputed.
        trainable: the parameters with gradients, as ``(path, leaf) -> bool`` or a pytree of bools
            that is a prefix of the parameters. The others may be integers. They have zero
            gradients, computed only where they are used.

    Returns:
        x, or with `has_aux` (x, aux), where aux is stacked as [L, num_microbatches, ...].

    Raises:
        ValueError: if `num_slices`, `resident_slices` or `num_microbatches` do not fit the model,
            if parameters are not in the memory `params_in`, if `layer` changes the shapes
            of x, or if it closes over a host array.
        TypeError: if an argument is not an array, a key or a dtype, if a trained parameter is an
            integer, or if `layer` does not return (x, aux) with `has_aux`.
        NotImplementedError: under vmap of a gradient, for second derivatives, or with
            ``jax_scan3``.
        RuntimeError: if it is compiled for a GPU without `offload_jit` by a version of JAX that
            needs a workaround.

    Kept for the backward pass: the parameters in their memory, and for each slice its input, or for
    each of its microbatches the values that `policy` keeps.

    References:
        fairscale ``OffloadModel``; Pudipeddi et al., 2020 (arXiv:2002.05645).
    """
    options = OffloadOptions(
        num_slices, num_microbatches, params_in, activations_in, grads_in, prefetch,
        resident_slices, compute_dtype, has_aux, policy,
    )  # fmt: skip
    stacked_params = as_array_tree("stacked_params", stacked_params)
    x, key = as_array_tree("x", x), None if key is None else as_key("key", key)
    return apply_stack(layer, stacked_params, x, key, options, trainable)


def apply_stack(
    layer: Callable[..., Any], stacked_params: Tree, x: Tree, key: Any, options: OffloadOptions,
    trainable: Any = True,
) -> Any:  # fmt: skip
    """Compute `offload_scan` with an options object."""
    params = partition(trainable, stacked_params)
    config, params, closure, x = build_stack(layer, params, x, key, options)
    params, x = forbid_forward_mode("offload_scan", (params, x))
    results: Any = _stack(config, params, closure, x, key)
    return results if options.has_aux else results[0]


class StackConfig(NamedTuple):
    """Static configuration of an offloaded layer stack (everything that is not an array).

    Slice i is layers ``i * slice_size, ..., (i + 1) * slice_size - 1``.
    """

    layer: Callable[..., Any]  # (params, closure, x, rest) -> (x, aux), as from `hoist_closure`
    num_slices: int
    slice_size: int
    options: OffloadOptions
    row_shards: int  # of `split_microbatches`

    @property
    def num_streamed(self) -> int:
        """The number of slices that are loaded again for the backward pass."""
        return self.num_slices - self.options.resident_slices

    @property
    def prefetch(self) -> int:
        """The number of slices to load ahead."""
        return min(self.options.prefetch, self.num_slices)

    @property
    def slice(self) -> slices.Slice:
        """The layers of slice i; its key is (key, i), its aux [slice_size, ...]."""
        dtype, policy = self.options.compute_dtype, self.options.policy

        def apply_layer(w, closure, x, slice_key, m, j):
            key, i = slice_key
            rest = slices.layer_arguments(self.options, key, i * self.slice_size + j, m)
            return self.layer(w, closure, x, rest)

        def apply(w, closure, x, slice_key, m):
            w = cast_floats(w.merge(), dtype)
            if self.slice_size > 1:
                return lax.scan(
                    lambda x, wj: apply_layer(wj[0], closure, x, slice_key, m, wj[1]),
                    x,
                    (w, jnp.arange(self.slice_size)),
                )
            w = jax.tree.map(lambda a: a[0], w)
            x, aux = apply_layer(w, closure, x, slice_key, m, 0)
            return x, jax.tree.map(lambda a: a[None], aux)

        def apply_one(w, *args):
            return apply_layer(cast_floats(w.merge(), dtype), *args)

        if policy is None:
            with_residuals = None
        else:
            with_residuals = functools.partial(scan_with_policy, apply_one, policy)
        count = self.options.num_microbatches
        return slices.Slice(apply, count, with_residuals, self.row_shards)


def build_stack(
    layer: Callable[..., Any], params: Partition, x: Tree, key: Any, options: OffloadOptions
) -> tuple[StackConfig, Partition, Tree, Tree]:
    """Check the arguments of `offload_scan`; return (config, params, closure, x)."""
    params = jax.tree.map(jnp.asarray, params)
    stacked_params = params.merge()
    check_space("stacked_params", stacked_params, options.params_in)
    num_layers = count_layers(stacked_params)
    num_slices = options.count_slices(num_layers, equal=True)
    x = move(jax.tree.map(strip_weak_type, x), Space.Device)
    check_microbatches(x, options.num_microbatches)
    axes = varying_axes((stacked_params, x, key))
    x = jax.tree.map(lambda a: cast_to_varying(a, axes), x)
    first = jax.tree.map(
        lambda a: cast_to_varying(put(a[:1], Space.Device)[0], axes), stacked_params
    )
    layer, closure = hoist_closure(
        check_layer(layer, options),
        cast_floats(first, options.compute_dtype),
        first_microbatch(x, options.num_microbatches),
        slices.layer_arguments(options, key, 0, 0),
    )
    slice_size = num_layers // num_slices
    config = StackConfig(layer, num_slices, slice_size, options, count_row_shards(x))
    return config, params, closure, x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(config: StackConfig, params: Partition, closure: Tree, x: Tree, key):
    return run_forward(config, params, closure, x, key, save_residuals=False)[:2]


@follow_arrays
def _stack_forward(config: StackConfig, params, closure, x, key):
    check_differentiable("stacked_params", params.trained)
    x = _forbid_vmap(x)  # before residuals of a mapped x are written to host memory
    x, aux, residuals = run_forward(config, params, closure, x, key, save_residuals=True)
    return (x, aux), (params, closure, key, residuals)


@follow_arrays
def _stack_backward(config: StackConfig, saved, cotangents):
    params, closure, key, residuals = saved
    trained, grads = forbid_second_derivative(
        (params.trained, tuple(map(float_cotangents, cotangents))), "offload_scan"
    )
    params, (dy, daux) = params._replace(trained=trained), _forbid_vmap(grads)

    def compute(_, w, dw, entry):
        return (), None, dw

    grads = allocate_slices(config, params.trained, config.options.grads_space)
    _, grads, _, dx, dclosure = run_backward(
        config, params, closure, key, residuals, dy, daux, Consumer(compute, grads)
    )
    dtrained = jax.tree.map(
        lambda d, p: put(d, space_of(p)), merge_leading_axes(grads), params.trained
    )
    dfrozen = make_cotangent(params.frozen, _zero_gradients(config, params.frozen))
    dx = make_cotangent(cotangents[0], dx)  # x has the dtypes of y
    return Partition(dtrained, dfrozen), make_cotangent(closure, dclosure), dx, None


_stack.defvjp(_stack_forward, _stack_backward)


class StackResiduals(NamedTuple):
    """Residuals of a stack of S slices, of which r are resident; () if there are none."""

    streamed: Tree  # [S - r, ...], inputs or residuals of the slices that are loaded again
    resident: Tree  # [r, ...], those of the resident slices, on the device
    weights: Tree  # [r, ...], the parameters of the resident slices, on the device


def run_forward(
    config: StackConfig, params: Partition, closure: Tree, x: Tree, key, save_residuals: bool
):
    """Run the forward pass; return (x, aux, residuals for `run_backward`)."""
    params = split_slices(params, config)
    start, prefetch = mark_host_slices(), config.prefetch

    space, policy = config.options.activations_space, config.options.policy

    def apply(i, w, x, streams):
        x, aux, residuals = slices.forward(config.slice, w, closure, x, (key, i), save_residuals)
        if not save_residuals:
            return x, (aux, ())
        return x, (aux, put(residuals, space) if streams else (residuals, w))

    # XLA turns reads at a loop-carried index into asynchronous copies from the host, which overlap
    # with the layers. It does not do so for an index from a scanned jnp.arange.
    def run_in_turn(x, first, count, streams) -> tuple[Tree, Any]:
        def body(carry, _):
            i, x, queue = carry
            w, *queue = [*queue, load(params, jnp.minimum(i + prefetch, first + count - 1))]
            x, result = apply(i, w, x, streams)
            return (i + 1, x, queue), result

        ahead = range(first, first + prefetch)
        queue = [load(params, jnp.int32(min(i, first + count - 1))) for i in ahead]
        scan = scan_slices if prefetch else lax.scan
        (_, x, _), results = scan(body, (start + first, x, queue), None, count)
        return x, results

    # A second loop runs the last turns, which load nothing.
    def run_pipeline(x, first, count, streams) -> tuple[Tree, Any]:
        ahead = min(prefetch, count)
        copies = save_residuals and streams and policy is None and space == Space.Host

        def turn(loads, i, state):
            x, queue, results = state
            w, *queue = [*queue, load(params, i + ahead)] if loads else [*queue, queue[0]]
            if copies:
                # Without the barrier, XLA could make the copy when it makes the result.
                w, leaving = barrier((w, _copy_input(x, i)))
            x, (aux, saved) = apply(i, w, x, streams)
            result = aux, put(leaving, space) if copies else saved
            return x, queue, write(results, jax.tree.leaves(result), i - first)

        queue = [load(params, start + first + j) for j in range(ahead)]
        results, structure = allocate_results(
            count, lambda i, w, x: apply(i, w, x, streams)[1], start, queue[0], x
        )
        state, end = (x, queue, results), first + count
        state = repeat_turns(functools.partial(turn, True), state, start, range(first, end - ahead))
        state = repeat_turns(functools.partial(turn, False), state, start, range(end - ahead, end))
        x, _, results = state
        return x, structure.unflatten(results)

    def run(x, first, count, streams):
        run = run_pipeline if peels_turns(count, prefetch) else run_in_turn
        return run(x, first, count, streams)

    aux, residuals = [], StackResiduals((), (), ())
    if config.num_streamed:
        x, (aux_here, streamed) = run(x, 0, config.num_streamed, True)
        aux, residuals = [aux_here], residuals._replace(streamed=streamed)
    if config.options.resident_slices:
        resident = config.options.resident_slices
        x, (aux_here, saved) = run(x, config.num_streamed, resident, False)
        aux = [*aux, aux_here]
        if save_residuals:
            residuals = residuals._replace(resident=saved[0], weights=saved[1])
    aux = jax.tree.map(lambda *a: jnp.concatenate(a) if a[1:] else a[0], *aux)
    # [num_slices, num_microbatches, slice_size, ...] -> [L, num_microbatches, ...]
    aux = merge_leading_axes(jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), aux))
    return x, aux, residuals


def _copy_input(x: Tree, i: jax.Array) -> Tree:
    """Return a copy of the input of slice i, which leaves the device.

    XLA for GPUs writes the result of a slice into the place of its input. So without a copy, the
    last products of the slice would wait until the input has arrived on the host.
    """

    def copy(a):
        if is_key(a):
            return a
        # XLA would remove a plain copy. It does not know the sign of the index.
        zeros = cast_to_varying(lax.full_like(a, 0), varying_axes(a))
        return lax.select(i >= 0, a, zeros)

    return jax.tree.map(copy, x)


class Consumer(NamedTuple):
    """A use of the gradients of each slice in the backward pass.

    ``accumulated, params, entry = compute(accumulated, w, dw, entry)`` gets the trained parameters
    w [slice_size, ...] of a slice on the device, their gradients dw, and with `reads_arrays` the
    slice's entry of `arrays`. It returns what replaces the parameters (ignored unless
    `writes_params`) and the entry.
    """

    compute: Callable[..., Any]
    arrays: Tree  # [num_slices, slice_size, ...], such as the optimizer's state or gradients
    accumulated: Any = ()  # on the device, such as statistics of the gradients
    reads_arrays: bool = False
    writes_params: bool = False

    def write(self, host: tuple, new: Any, i: jax.Array) -> tuple:
        """Write the new parameters and the new entry of slice i to (parameters, arrays)."""
        params, arrays = host
        if self.writes_params:
            params = write(params, new[0], i)
        return params, write(arrays, new[1], i)


def run_backward(
    config: StackConfig, params: Partition, closure: Tree, key, residuals: StackResiduals,
    dy: list, daux: list, consumer: Consumer,
):  # fmt: skip
    """Stream the slices in reverse order; return (trained, arrays, accumulated, dx, dclosure)."""
    daux = [jnp.swapaxes(a, 1, 2) for a in split_slices(daux, config)]
    start = mark_host_slices()

    def differentiate(i, w, saved, dx, dclosure, daux):
        dw, dclosure_here, dx = slices.backward(config.slice, w, closure, saved, (key, i), dx, daux)
        return dw, dx, jax.tree.map(jnp.add, dclosure, dclosure_here)

    def run_in_turn(state, first, count, fetch, prefetch):
        # A host array must be read before it is written in an iteration, or XLA would copy all of
        # it. The barriers order the reads of `trained` before its writes: the second one the reads
        # ahead, the first one that of w, which with prefetch=0 was read in this iteration.
        def body(state, daux):
            i, (trained, arrays), accumulated, dx, dclosure, queue = state
            (w, saved), *queue = [*queue, fetch(trained, jnp.maximum(i - prefetch, first))]
            if not queue:
                trained, w_trained = barrier((trained, w.trained))
                w = Partition(w_trained, w.frozen)
            dw, dx, dclosure = differentiate(i, w, saved, dx, dclosure, daux)
            ahead = [w.trained for w, _ in queue]
            trained, ahead = barrier((trained, ahead))
            queue = [
                (Partition(a, w.frozen), saved) for a, (w, saved) in zip(ahead, queue, strict=True)
            ]
            entry = load(arrays, i) if consumer.reads_arrays else ()
            accumulated, *new = consumer.compute(accumulated, w.trained, dw, entry)
            host = consumer.write((trained, arrays), new, i)
            return (i - 1, host, accumulated, dx, dclosure, queue), None

        last = first + count - 1
        queue = [fetch(state[0][0], start + max(last - j, first)) for j in range(prefetch)]
        daux_here = [a[first : first + count] for a in daux]
        state = start + last, *state, queue
        scan = scan_slices if prefetch else lax.scan
        return scan(body, state, daux_here, count, reverse=True)[0][1:-1]

    dclosure = [jnp.zeros_like(a) for a in float_leaves(closure)]
    trained, frozen = split_slices(params, config)
    state = (trained, consumer.arrays), consumer.accumulated, dy, dclosure
    if config.options.resident_slices:
        resident = residuals.weights, residuals.resident
        state = run_in_turn(
            state, config.num_streamed, config.options.resident_slices,
            lambda _, i: load(resident, i - config.num_streamed), 0,
        )  # fmt: skip
    if peels_turns(config.num_streamed, config.prefetch):
        state = _run_pipeline(
            start, config.num_streamed, min(config.prefetch, config.num_streamed), state,
            (frozen, residuals.streamed), [a[: config.num_streamed] for a in daux], differentiate,
            consumer,
        )  # fmt: skip
    elif config.num_streamed:
        state = run_in_turn(
            state, 0, config.num_streamed,
            lambda trained, i: load((Partition(trained, frozen), residuals.streamed), i),
            config.prefetch,
        )  # fmt: skip
    (trained, arrays), *rest = state
    return merge_leading_axes(trained), arrays, *rest


def _run_pipeline(
    start: jax.Array, count: int, prefetch: int, state: tuple, read_only: Tree, daux: list,
    differentiate: Callable[..., Any], consumer: Consumer,
) -> tuple:  # fmt: skip
    """Run the backward pass of several slices while the copies of others are under way.

    While a slice is differentiated, the results of the turn before leave the device. Its entry of
    `consumer.arrays`, and the parameters of the slice `prefetch` turns ahead, arrive.

    Args:
        start: the guard of the loop, zero.
        count: the number of slices, at least 2.
        prefetch: the number of slices to load ahead, at least 1.
        state: ((trained, arrays), accumulated, dx, dclosure).
        read_only: arrays [count or more, ...] that are loaded with the trained parameters: the
            frozen ones, and the residuals.
        daux: [count, ...].
        differentiate: returns (dw, dx, dclosure) of a slice.
        consumer: what happens with dw.

    Returns:
        The new `state`.
    """
    # The first turn, which has nothing to write, and the last ones, which have nothing to load, are
    # outside of the main loop. So all indices are linear in its counter (`peels_turns`).
    host, accumulated, dx, dclosure = state

    def turn(i, state, writes=True, loads=True):
        (trained, arrays), accumulated, dx, dclosure, queue, new = state
        # XLA cannot read and write one array at the same time. So read the parameters ahead before
        # writing those of the previous turn, and write the entry of the previous turn in `arrays`
        # before reading that of this one.
        (w, (frozen, saved)), *rest = queue
        queue = [*rest, queue[0]]
        if loads:
            trained, ahead = barrier((trained, load(trained, i - prefetch)))
            queue[-1] = ahead, load(read_only, i - prefetch)
        if writes:
            trained, arrays = consumer.write((trained, arrays), new, i + 1)
        entry = load(arrays, i) if consumer.reads_arrays else ()
        dw, dx, dclosure = differentiate(
            i, Partition(w, frozen), saved, dx, dclosure, read(daux, i)
        )
        accumulated, *new = consumer.compute(accumulated, w, dw, entry)
        if not consumer.writes_params:
            new[0] = None
        if loads and consumer.writes_params and not host_slices_are_wrong():
            # Store each parameter of the next slice after the update of the current one, or XLA
            # makes a copy of the current one in each turn. Older versions often make none, and
            # their schedule would become slower.
            ahead, rest = queue[-1]
            pairs = [barrier(a) for a in zip(*map(jax.tree.leaves, (ahead, new[0])), strict=True)]
            ahead, new[0] = map(jax.tree.structure(ahead).unflatten, zip(*pairs, strict=True))
            queue[-1] = ahead, rest
        return (trained, arrays), accumulated, dx, dclosure, queue, tuple(new)

    def repeat(state, first, length, **options):
        indices = range(first + length - 1, first - 1, -1)
        return repeat_turns(functools.partial(turn, **options), state, start, indices)

    queue = [load((host[0], read_only), start + count - 1 - j) for j in range(prefetch)]
    # Zeros, which the first turn does not write.
    new = queue[0][0] if consumer.writes_params else None, load(host[1], start)
    new = jax.tree.map(lambda a: cast_to_varying(jnp.zeros_like(a), varying_axes(a)), new)
    state = host, accumulated, dx, dclosure, queue, new
    state = repeat(state, count - 1, 1, writes=False, loads=prefetch < count)
    if count - 1 > prefetch:
        state = repeat(state, prefetch, count - 1 - prefetch)
    state = repeat(state, 0, min(prefetch, count - 1), loads=False)
    host, accumulated, dx, dclosure, _, new = state
    return consumer.write(host, new, start), accumulated, dx, dclosure


def split_slices(params: Tree, config: StackConfig) -> Tree:
    """Reshape [L, ...] to [num_slices, slice_size, ...]."""
    shape = config.num_slices, config.slice_size
    return jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), params)


def allocate_slices(config: StackConfig, params: Tree, space: Space) -> Tree:
    """Allocate arrays [num_slices, slice_size, ...] like the parameters, for a loop to write.

    In host memory XLA allocates them uninitialized, so the loop must write every slice.
    """

    def allocate(a):
        zero = put(cast_to_varying(jnp.zeros((), a.dtype), varying_axes(a)), space)
        kind = jax.typeof(split_slices(a, config))
        return lax.broadcast(zero, kind.shape, out_sharding=kind.sharding)

    return jax.tree.map(allocate, params)


def _zero_gradients(config: StackConfig, params: Tree) -> list:
    """Return zeros like ``float_leaves(params)``, in the memory of the parameters.

    XLA removes unused ones.
    """

    def body(state, _):
        i, grads = state
        return (i + 1, write(grads, jax.tree.map(zeros, load(grads, i)), i)), None

    def zeros(a):
        return cast_to_varying(jnp.zeros_like(a), varying_axes(a))

    grads = allocate_slices(config, float_leaves(params), SPACES[config.options.params_in])
    if not grads:
        return []
    (_, grads), _ = lax.scan(body, (mark_host_slices(), grads), None, length=config.num_slices)
    return merge_leading_axes(grads)


@custom_vmap
def _forbid_vmap(x):
    return x


@_forbid_vmap.def_vmap
def _(size, batched, x):
    raise NotImplementedError(
        "offload_scan does not support vmap of a gradient, which would need a gradient of the "
        "whole stack for each example. Make the mapped axis part of the batch."
    )
