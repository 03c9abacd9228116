"""A training step of a stack of layers: gradients and updates in one program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arguments import as_callable, as_flag, described
from .checks import as_arrays, as_key, check_optimizer
from .host_init import state_sharding
from .options import OffloadOptions
from .per_leaf import check_per_leaf
from .placement import check_space, write
from .stack import Stack, by_slice, empty_slices, prepare, run_backward, run_forward
from .trees import (
    Tree,
    as_cotangent,
    check_floats,
    floats_of,
    fold,
    join,
    num_layers_of,
    one_layer,
    with_gradients,
)
from .update import (
    apply,
    check_clip_norm,
    check_state,
    clip_scale,
    squares,
    stream_update,
    update_layers,
    update_slice,
)


class OffloadState(NamedTuple):
    """What is trained, and the optimizer's state of it."""

    layers: Tree  # [L, ...], where params_in says
    others: Tree  # parameters before and after the layers, on the device
    layers_state: Tree  # [L, ...], where the layers are; counts [L] on the device
    others_state: Tree


class TrainStep(NamedTuple):
    """``init(layers, others) -> OffloadState``, and ``step(state, batch, key)``."""

    init: Callable
    step: Callable


def offload_train_step(
    embed: Callable,
    layer: Callable,
    head: Callable,
    tx: Any,
    *,
    fuse_update: bool = True,
    clip_norm: float | None = None,
    has_aux: bool = False,
    **options: Any,
) -> TrainStep:
    """A training step for ``loss = head(others, layers(embed(others, batch)), batch)``.

    With fuse_update every slice is updated as soon as its gradient is there, inside the backward
    pass: no full gradient exists anywhere. Else gradients go to where the layers are, and a second
    loop over the layers updates them, scaled by the norm that the backward pass has added up.

    With params_in="device" nothing is offloaded: parameters and the optimizer's state stay on the
    device, and by default what the backward pass needs does too. Fused, the step saves the
    gradients.

    Compile the step with `offload_jit`, which writes the new state over the old one: `layers` that
    were given to init are gone after the first step. Of `others` init keeps a copy.

    Args:
        embed: ``embed(others, batch, key) -> x``.
        layer: ``layer(params, x, key) -> x``, or ``-> (x, aux)`` with has_aux; see `offload_scan`.
        head: ``head(others, x, batch, key) -> loss``, a scalar. In ``jax.shard_map``: the mean over
            the devices.
        tx: an ``optax.GradientTransformation`` that treats every parameter on its own. What it
            draws differs from layer to layer, see `stream_update`.
        fuse_update: whether to update inside the backward pass; not with clip_norm, whose norm is
            known after it only.
        clip_norm: the largest global norm of the gradients, above 0; as
            ``optax.clip_by_global_norm``.
        has_aux: whether layers return a second result.
        **options: of `offload_scan`: num_slices, num_microbatches, params_in, activations (by
            default where params_in is), prefetch, resident_slices, compute_dtype.

    Returns:
        ``init(layers, others) -> OffloadState``, for layers in the memory that params_in says, such
        as `host_init` makes them, and other parameters on the device, all floating-point; and
        ``step(state, batch, key)``, which returns (state, loss), or (state, loss, aux). `key` may
        be None; embed and head get it folded with L and L + 1.

    Raises:
        ValueError: fuse_update with clip_norm; a tx that `stream_update` refuses; and as
            `offload_scan`.
        TypeError: for what is no function, array, key or state; for parameters that are integers.
    """
    for name, function in (("embed", embed), ("layer", layer), ("head", head)):
        as_callable(name, function)
    check_optimizer(tx)
    checked = _check_options(fuse_update, clip_norm, has_aux, options)

    def init(layers: Tree, others: Tree) -> OffloadState:
        layers, others = as_arrays("layers", layers), as_arrays("others", others)
        check_space("params_in", layers, checked.params_in)
        check_space("others", others, "device")
        num_layers_of(layers, "layers")
        check_floats("layers", layers)
        check_floats("others", others)
        # They are small, and the first step overwrites them: others are the caller's, and the
        # state can hold what belongs to tx, such as its key.
        copied = functools.partial(jax.tree.map, functools.partial(jnp.array, copy=True))
        others = copied(others)
        others_state = jax.tree_util.tree_map_with_path(
            lambda path, a: jax.device_put(a, state_sharding(others, path, a.shape)),
            copied(tx.init(others)),
        )
        return OffloadState(layers, others, stream_update(tx).init(layers), others_state)

    def step(state: OffloadState, batch: Any, key: jax.Array | None = None):
        key = as_key("key", key)
        num_layers = _check_state(tx, state)
        first, last = (fold(key, num_layers + j, 0) for j in range(2))
        x, embed_back = jax.vjp(lambda others: embed(others, batch, first), state.others)
        stack, layers, shared, x = prepare(layer, state.layers, x, key, checked)
        y, aux, kept = run_forward(stack, layers, shared, x, key, keep=True)
        loss, head_back = jax.vjp(lambda others, y: head(others, y, batch, last), state.others, y)
        _check_loss(loss)
        from_head, dy = head_back(jnp.ones_like(loss))
        daux = [jnp.zeros_like(a) for a in floats_of(aux)]
        backward = functools.partial(
            run_backward, stack, layers, shared, key, kept, with_gradients(dy), daux
        )
        grads, total, scale = None, jnp.float32(0), None
        if fuse_update:
            layers, layers_state, dx = _update_meanwhile(tx, stack, state.layers_state, backward)
        else:
            grads, total, dx = _collect(stack, layers, backward)
        (from_embed,) = embed_back(as_cotangent(x, dx))
        grads_others = jax.tree.map(jnp.add, from_head, from_embed)
        if clip_norm is not None:
            scale = clip_scale(total + squares(grads_others), clip_norm)
            grads_others = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads_others)
        if not fuse_update:
            layers, layers_state = update_layers(tx, grads, state.layers_state, layers, scale)
        others, others_state = apply(tx, state.others, state.others_state, grads_others)
        state = OffloadState(layers, others, layers_state, others_state)
        return (state, loss, aux) if has_aux else (state, loss)

    return TrainStep(init, step)


def _check_state(tx: Any, state: OffloadState) -> int:
    """The number of layers of a state that fits."""
    if not isinstance(state, OffloadState):
        raise TypeError(
            f"`state` must be an OffloadState, as init makes it, not {described(state)}."
        )
    as_arrays("state", state)
    num_layers = num_layers_of(state.layers, "state.layers")
    check_floats("state.layers", state.layers)
    check_floats("state.others", state.others)
    check_per_leaf(tx, one_layer(state.layers))
    check_state("state.layers_state", tx, state.layers_state, state.layers, num_layers)
    check_state("state.others_state", tx, state.others_state, state.others, None)
    return num_layers


def _check_options(
    fuse_update: bool, clip_norm: float | None, has_aux: bool, options: dict[str, Any]
) -> OffloadOptions:
    check_clip_norm(clip_norm)
    if as_flag("fuse_update", fuse_update) and clip_norm is not None:
        raise ValueError(
            f"`clip_norm` (={clip_norm}) needs the norm of all gradients, but with "
            "fuse_update=True the first slices are updated before the last gradients exist: pass "
            "fuse_update=False."
        )
    known = {field.name for field in dataclasses.fields(OffloadOptions)} - {"grads"}
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"`{unknown[0]}` is no option of offload_train_step; those of offload_scan are "
            f"{', '.join(sorted(known))}."
        )
    options = {"activations": options.get("params_in", "host")} | options
    return OffloadOptions(has_aux=has_aux, **options)


def _update_meanwhile(tx: Any, stack: Stack, state: Tree, backward: Callable) -> tuple:
    """(layers, their optimizer's state, dx)"""

    def consume(layers, state, i, w, dw):
        return update_slice(tx, layers, state, i, w, dw)

    layers, state, dx, _ = backward(consume, by_slice(state, stack))
    return layers, join(state), dx


def _collect(stack: Stack, layers: Tree, backward: Callable) -> tuple:
    """(gradients of the layers, the sum of their squares, dx)"""

    def consume(layers, carry, i, w, dw):
        grads, total = carry
        return layers, (write(grads, dw, i), total + squares(dw))

    carry = empty_slices(stack, layers, stack.options.grads_in), jnp.float32(0)
    _, (grads, total), dx, _ = backward(consume, carry)
    return join(grads), total, dx


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, jax.Array):
        raise TypeError(
            f"`head` must return a scalar loss and nothing else, not {described(loss)}."
        )
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"`head` must return a scalar loss, not {jax.typeof(loss)}.")
