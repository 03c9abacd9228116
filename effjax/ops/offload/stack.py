"""A stack of like layers whose parameters and activations live in host memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .._common.arguments import as_callable
from .._common.sharding import cast_to_varying, varying_axes
from . import slices
from .checks import as_arrays, as_key
from .compiled import guard_host_slices
from .loops import scan
from .options import OffloadOptions
from .placement import SPACES, Space, Where, check_space, moved, put, read, space_of, write
from .residuals import keep_each
from .slices import check_layer, check_microbatches, close_over, microbatch
from .trainable import Parts, parts_of
from .trees import (
    Tree,
    as_cotangent,
    cast,
    check_floats,
    floats_of,
    fold,
    join,
    num_layers_of,
    once,
    strong,
    with_gradients,
)


def offload_scan(
    layer: Callable[..., Any],
    stacked_params: Tree,
    x: Tree,
    *,
    key: jax.Array | None = None,
    num_slices: int | None = None,
    num_microbatches: int = 1,
    params_in: Where = "host",
    activations: Where = "host",
    grads: Where | None = None,
    prefetch: int = 1,
    resident_slices: int = 0,
    compute_dtype: Any = None,
    has_aux: bool = False,
    policy: Callable[..., Any] | None = None,
    trainable: Any = True,
) -> Any:
    """Applies a stack of like layers that streams through the device, a slice at a time.

    ``x = layer(params[i], x, key_i) for i in range(L)``, with the gradients of exactly that: equal
    to the bit to those of ``jax.lax.scan`` over parameters on the device, dropout included, that
    computes its layers again (``jax.checkpoint``). A scan that keeps what it has computed can
    differ in the last bit where XLA fuses that differently. The key of layer i and microbatch m is
    ``fold_in(fold_in(key, i), m)``.

    The device holds the parameters of `1 + prefetch` slices and the intermediates of one slice and
    one microbatch, whatever the depth. The backward pass streams the slices in reverse, computes
    each again from its input, and sends its gradients to where the parameters are. With a `policy`
    it streams what that keeps, too, and computes the rest again.

    Under jit over a mesh, parameters may be replicated or sharded on any axis but the first; a
    slice is gathered when it has arrived. Gradients are summed over devices before they leave
    the device. With several microbatches use it inside ``jax.shard_map`` there: jit would exchange
    rows to make microbatches. Under ``jax.pmap`` arrays from the host must stay out: there
    `params_in="device"`. Reverse mode only, and no vmap of a gradient; JAX itself cannot
    differentiate ``lax.cond`` and ``lax.scan`` around arrays of the host, nor add gradients there
    on a GPU: use parameters once.

    Args:
        layer: ``layer(params, x, key) -> x`` for one layer, or ``-> (x, aux)`` with `has_aux`. x
            keeps its structure, shapes and dtypes. What it closes over is differentiated too.
        stacked_params: a pytree of arrays [L, ...], L the number of layers, in the memory that
            `params_in` says: see `host_init`, `to_host`. Differentiable where those that are
            trained are floats.
        x: a pytree of arrays [B, ...]; integers are passed on without gradients.
        key: a PRNG key, or None: then layers get None.
        num_slices: how many slices to load; a divisor of L. None: every layer is one.
        num_microbatches: how many parts of x go through a slice before the next is loaded; a
            divisor of B. Rows [m B / M, (m + 1) B / M) are microbatch m.
        params_in: "host" or "device", where stacked_params are.
        activations: where the input of every slice, or what `policy` keeps, is kept for the
            backward pass.
        grads: where the gradients are collected, to be moved to the parameters' memory at the end
            if it is another; by default there.
        prefetch: how many slices are loaded ahead of the one that is computed.
        resident_slices: how many of the last slices stay on the device between the two passes, with
            what is kept of them, so that they are loaded once.
        compute_dtype: the floating-point dtype that real floating parameters are cast to on the
            device; their gradients have the dtype that they are stored in. None: no cast.
        has_aux: whether layers return a second result.
        policy: what else is kept, as in ``jax.checkpoint``: one of ``jax.checkpoint_policies``,
            such as dots_saveable, everything_saveable, save_only_these_names("name"). Of
            parameters, and of what follows from them alone, no copies are kept. Where a policy
            says to keep it (save_and_offload_only_these_names) does not count. None: nothing is.
        trainable: which parameters have gradients: ``(path, leaf) -> bool``, bools in a pytree like
            that of the parameters, or one for a whole subtree. The others may be integers, and take
            no work and no memory in the backward pass but their own; their gradients are zeros.

    Returns:
        x; with `has_aux` (x, aux), the second results stacked as [L, num_microbatches, ...].

    Raises:
        ValueError, TypeError: when it is traced, for arguments that do not fit.
        NotImplementedError: for vmap of a gradient.
        RuntimeError: when it is compiled for a GPU by a JAX that would compile it wrongly, without
            `offload_jit`.

    Kept for the backward pass: the parameters where they are, and of every slice its input or, for
    every microbatch, what `policy` says. On the device are those of `1 + prefetch` slices.

    References:
        fairscale ``OffloadModel``; Pudipeddi et al., 2020 (arXiv:2002.05645).
    """
    options = OffloadOptions(
        num_slices, num_microbatches, params_in, activations, grads, prefetch, resident_slices,
        compute_dtype, has_aux, policy,
    )  # fmt: skip
    as_callable("layer", layer)
    stacked_params = as_arrays("stacked_params", stacked_params)
    x, key = as_arrays("x", x), as_key("key", key)
    return apply_stack(layer, stacked_params, x, key, options, trainable)


def apply_stack(
    layer: Callable[..., Any], stacked_params: Tree, x: Tree, key: Any, options: OffloadOptions,
    trainable: Any = True,
) -> Any:  # fmt: skip
    """`offload_scan`, with its options as one."""
    parts = parts_of("trainable", trainable, stacked_params)
    stack, parts, shared, x = prepare(layer, parts, x, key, options)
    results: Any = _core(stack, parts, shared, x, key)
    return results if options.has_aux else results[0]


class Stack(NamedTuple):
    """All that is no array. Layers 0, 1, ... make slices of `slice_size`."""

    layer: Callable[..., Any]  # (params, shared, x, key) -> (x, aux)
    num_slices: int
    slice_size: int
    options: OffloadOptions

    @property
    def streamed(self) -> int:
        """How many slices are loaded again for the backward pass."""
        return self.num_slices - self.options.resident_slices

    @property
    def one_slice(self) -> slices.Slice:
        """The layers of slice i: its key is (key, i), and aux [slice_size, ...] a microbatch."""
        dtype, policy = self.options.compute_dtype, self.options.policy

        def one(w, shared, x, at, m, j):
            key, i = at
            return self.layer(w, shared, x, fold(key, i * self.slice_size + j, m))

        def apply(w, shared, x, at, m):
            w = cast(w.whole, dtype)
            if self.slice_size > 1:
                step = lambda x, pair: one(pair[0], shared, x, at, m, pair[1])  # noqa: E731
                return scan(step, x, (w, jnp.arange(self.slice_size)), differentiated=True)
            x, aux = one(jax.tree.map(lambda a: a[0], w), shared, x, at, m, 0)
            return x, jax.tree.map(lambda a: a[None], aux)

        def layer(w, *args):
            return one(cast(w.whole, dtype), *args)

        keep = None if policy is None else functools.partial(keep_each, layer, policy)
        return slices.Slice(apply, self.options.num_microbatches, keep)


def prepare(
    layer: Callable[..., Any], params: Parts, x: Tree, key: Any, options: OffloadOptions
) -> tuple[Stack, Parts, Tree, Tree]:
    """(stack, params, shared, x) for `run_forward`; arguments as `offload_scan`, checked."""
    params = jax.tree.map(jnp.asarray, params)
    stacked_params = params.whole
    check_space("params_in", stacked_params, options.params_in)
    num_layers = num_layers_of(stacked_params)
    num_slices = options.slices_of(num_layers)
    x = moved(jax.tree.map(strong, x), Space.Device)
    check_microbatches(x, options.num_microbatches)
    axes = varying_axes((stacked_params, x, key))
    x = jax.tree.map(lambda a: cast_to_varying(a, axes), x)
    one = jax.tree.map(lambda a: cast_to_varying(put(a[:1], Space.Device)[0], axes), stacked_params)
    layer, shared = close_over(
        check_layer(layer, options.has_aux),
        cast(one, options.compute_dtype),
        microbatch(x, options.num_microbatches),
        key,
    )
    return Stack(layer, num_slices, num_layers // num_slices, options), params, shared, x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(stack: Stack, params: Parts, shared: Tree, x: Tree, key) -> tuple[Tree, Tree]:
    return run_forward(stack, params, shared, x, key, keep=False)[:2]


def _forward(stack: Stack, params, shared, x, key):
    check_floats("stacked_params", params.trained)
    x, aux, kept = run_forward(stack, params, shared, x, key, keep=True)
    return (x, aux), (params, shared, key, kept)


def _backward(stack: Stack, residuals, cotangents):
    params, shared, key, kept = residuals
    trained, grads = once((params.trained, tuple(map(with_gradients, cotangents))), "offload_scan")
    params, (dy, daux) = params._replace(trained=trained), _no_vmap(grads)

    def consume(params, grads, i, w, dw):
        return params, write(grads, dw, i)

    _, grads, dx, dshared = run_backward(
        stack, params, shared, key, kept, dy, daux, consume,
        empty_slices(stack, params.trained, stack.options.grads_in),
    )  # fmt: skip
    dtrained = jax.tree.map(lambda d, p: put(d, space_of(p)), join(grads), params.trained)
    dparams = Parts(dtrained, as_cotangent(params.frozen, _zeros(stack, params.frozen)))
    dx = as_cotangent(cotangents[0], dx)  # x is like y
    return dparams, as_cotangent(shared, dshared), dx, None


_core.defvjp(_forward, _backward)


class Kept(NamedTuple):
    """For the backward pass; () where there are none."""

    streamed: Tree  # of the slices that are loaded again, [S - r, ...]: inputs or residuals
    resident: Tree  # those of the last r slices, and their parameters, on the device
    weights: Tree


def run_forward(stack: Stack, params: Parts, shared: Tree, x: Tree, key, keep: bool):
    """(x, aux, kept), the latter for `run_backward`.

    Slices are read at an index that the loop carries: XLA turns these reads into copies from the
    host, and overlaps them with the layers.
    """
    params = by_slice(params, stack)
    start, prefetch = guard_host_slices(), stack.options.prefetch

    def run(x, first, count, save):
        def body(carry, _):
            i, x, queue = carry
            w, *queue = [*queue, load(params, jnp.minimum(i + prefetch, first + count - 1))]
            y, aux, kept = slices.forward(stack.one_slice, w, shared, x, (key, i), keep)
            return (i + 1, y, queue), (aux, save(w, kept) if keep else ())

        ahead = range(first, first + prefetch)
        queue = [load(params, jnp.int32(min(i, first + count - 1))) for i in ahead]
        (_, x, _), results = scan(body, (start + first, x, queue), None, length=count)
        return x, results

    aux, kept = [], Kept((), (), ())
    if stack.streamed:
        save = lambda w, kept: put(kept, stack.options.activations_in)  # noqa: E731
        x, (more, streamed) = run(x, 0, stack.streamed, save)
        aux, kept = [more], kept._replace(streamed=streamed)
    if stack.options.resident_slices:
        save = lambda w, kept: (kept, w)  # noqa: E731
        x, (more, here) = run(x, stack.streamed, stack.options.resident_slices, save)
        aux = [*aux, more]
        if keep:
            kept = kept._replace(resident=here[0], weights=here[1])
    aux = jax.tree.map(lambda *parts: jnp.concatenate(parts) if parts[1:] else parts[0], *aux)
    return x, _by_layer(aux), kept


def run_backward(
    stack: Stack, params: Parts, shared: Tree, key, kept: Kept, dy: list, daux: list,
    consume: Callable[..., Any], carry: Any,
):  # fmt: skip
    """Streams the slices in reverse: (trained, carry, dx, dshared).

    ``trained, carry = consume(trained, carry, i, w, dw)`` takes the gradient of slice i, like its
    trained parameters w [slice_size, ...] on the device. It may write slice i of `trained`, which
    is [num_slices, slice_size, ...] there.
    """
    daux = [jnp.swapaxes(a, 1, 2) for a in by_slice(daux, stack)]
    start = guard_host_slices()

    def run(state, first, count, fetch, prefetch):
        def body(state, daux):
            i, trained, carry, dx, dshared, queue = state
            (w, kept), *queue = [*queue, fetch(trained, jnp.maximum(i - prefetch, first))]
            if not queue:
                trained, here = lax.optimization_barrier((trained, w.trained))  # as below
                w = Parts(here, w.frozen)
            at = key, i
            dw, more, dx = slices.backward(stack.one_slice, w, shared, kept, at, dx, daux)
            dshared = jax.tree.map(jnp.add, dshared, more)
            # What is read of them is read before they are written: else XLA would copy them.
            ahead = [w.trained for w, _ in queue]
            trained, ahead = lax.optimization_barrier((trained, ahead))
            queue = [(Parts(a, w.frozen), kept) for a, (w, kept) in zip(ahead, queue, strict=True)]
            trained, carry = consume(trained, carry, i, w.trained, dw)
            return (i - 1, trained, carry, dx, dshared, queue), None

        last = first + count - 1
        queue = [fetch(state[0], start + max(last - j, first)) for j in range(prefetch)]
        here = [a[first : first + count] for a in daux]
        at = start + last, *state, queue
        return scan(body, at, here, length=count, reverse=True)[0][1:-1]

    dshared = [jnp.zeros_like(a) for a in floats_of(shared)]
    trained, frozen = by_slice(params, stack)
    state = trained, carry, dy, dshared
    if stack.options.resident_slices:
        fetch = lambda _, i: load((kept.weights, kept.resident), i - stack.streamed)  # noqa: E731
        state = run(state, stack.streamed, stack.options.resident_slices, fetch, 0)
    if stack.streamed:
        fetch = lambda params, i: load((Parts(params, frozen), kept.streamed), i)  # noqa: E731
        state = run(state, 0, stack.streamed, fetch, stack.options.prefetch)
    trained, *rest = state
    return join(trained), *rest


def _by_layer(aux: Tree) -> Tree:
    """[num_slices, num_microbatches, slice_size, ...] -> [L, num_microbatches, ...]"""
    return join(jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), aux))


def load(tree: Tree, i: jax.Array) -> Tree:
    """Entry i of all arrays, on the device."""
    return put(read(tree, i), Space.Device)


def empty_slices(stack: Stack, params: Tree, space: Space) -> Tree:
    """Arrays like the parameters [num_slices, slice_size, ...] for a loop to write.

    On the host XLA allocates them, and writes nothing there.
    """

    def empty(a):
        zero = put(cast_to_varying(jnp.zeros((), a.dtype), varying_axes(a)), space)
        kind = jax.typeof(by_slice(a, stack))
        return lax.broadcast(zero, kind.shape, out_sharding=kind.sharding)

    return jax.tree.map(empty, params)


def _zeros(stack: Stack, params: Tree) -> list:
    """Gradients of `floats_of(params)`, where these are, for those who take them all the same."""

    def body(state, _):
        i, zeros = state
        return (i + 1, write(zeros, jax.tree.map(none, load(zeros, i)), i)), None

    def none(a):
        return cast_to_varying(jnp.zeros_like(a), varying_axes(a))

    zeros = empty_slices(stack, floats_of(params), SPACES[stack.options.params_in])
    if not zeros:
        return []
    return join(scan(body, (guard_host_slices(), zeros), None, length=stack.num_slices)[0][1])


def by_slice(params: Tree, stack: Stack) -> Tree:
    """[L, ...] -> [num_slices, slice_size, ...]"""
    shape = stack.num_slices, stack.slice_size
    return jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), params)


@custom_vmap
def _no_vmap(x):
    return x


@_no_vmap.def_vmap
def _(size, batched, x):
    raise NotImplementedError(
        "vmap of a gradient of offload_scan would need a gradient of the whole stack for each "
        "example: make the mapped axis part of the batch."
    )
