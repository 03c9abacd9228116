"""A training step of layers: gradients and updates in one program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.arguments import as_callable, as_flag, as_number
from .checks import as_key, check_optimizer
from .ends import Ends, Headed, ends_of, run_embed, run_head
from .optimizer import apply, check_clip_norm
from .options import OffloadOptions
from .scaling import adjusted, measure, next_scale
from .sequential import check_layers
from .slices import check_microbatches
from .train_layers import LIST, STACK, Form
from .train_state import Carried, OffloadState, check_fits, initial_state
from .trainable import Parts
from .trees import Tree


class TrainStep(NamedTuple):
    """``init(layers, others, model_state) -> OffloadState``, and ``step(state, batch, key)``."""

    init: Callable[..., Any]
    step: Callable[..., Any]


def offload_train_step(
    embed: Callable[..., Any],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head: Callable[..., Any],
    tx: Any,
    *,
    fuse_update: bool = True,
    clip_norm: float | None = None,
    loss_scale: float | None = None,
    skip_nonfinite: bool = False,
    has_aux: bool = False,
    head_has_aux: bool = False,
    has_state: bool = False,
    trainable: Any = True,
    trainable_others: Any = True,
    **options: Any,
) -> TrainStep:
    """A training step for ``loss = head(others, layers(embed(others, batch)), batch)``.

    With fuse_update every slice is updated as soon as its gradient is there, inside the backward
    pass: no full gradient exists anywhere. Else gradients go to where the layers are, and a second
    loop over the layers updates them, scaled by the norm that the backward pass has added up.

    With params_in="device" nothing is offloaded: parameters and the optimizer's state stay on the
    device, and by default what the backward pass needs does too. Fused, the step saves the
    gradients.

    With num_microbatches=M embed and head see a microbatch at a time too, rows
    [m B / M, (m + 1) B / M) of every array of the batch, and the loss is the mean of M losses:
    each must be a mean over its rows.

    Compile the step with `offload_jit`, which writes the new state over the old one: `layers` that
    were given to init are gone after the first step. Of all else init keeps a copy.

    In ``jax.shard_map`` the loss is the mean over the devices (``jax.lax.pmean``); with
    check_vma=False gradients are those of each device, for ``tx`` to average first, and neither
    clip_norm nor loss_scale are for that, nor for parameters that differ from device to device.

    Args:
        embed: ``embed(others, batch, key) -> x``. What it keeps for its backward pass stays on the
            device meanwhile: make it a ``jax.checkpoint`` if that is much.
        layer: ``layer(params, x, key) -> x``, or ``-> (x, aux)`` with has_aux; see `offload_scan`.
            A list of such makes a step of unlike layers: the parameters are then a list of pytrees,
            as of `offload_sequential`, but for one array in several places.
        head: ``head(others, x, batch, key) -> loss``, a scalar, or ``-> (loss, aux)`` with
            head_has_aux.
        tx: an ``optax.GradientTransformation`` that treats every parameter on its own, or
            ``optax.MultiSteps`` of one. What it draws differs from layer to layer, see
            `stream_update`.
        fuse_update: whether to update inside the backward pass; not with clip_norm, loss_scale or
            skip_nonfinite, which are about all gradients.
        clip_norm: the largest global norm of the gradients, above 0; as
            ``optax.clip_by_global_norm``.
        loss_scale: the first factor of the loss in the backward pass, at least 1, for float16; then
            as ``flax.training.dynamic_scale.DynamicScale`` with a minimum of 1. A step whose
            gradients are not finite changes no parameter, and nothing in the optimizer's state;
            the state of embed and head goes on.
        skip_nonfinite: whether a step whose loss or gradients are not finite changes nothing at
            all but loss_scale's factor; the loss that it returns is then NaN.
        has_aux: whether layers return a second result.
        head_has_aux: whether head does.
        has_state: whether embed and head have a state that is not trained, such as batch
            statistics: ``embed(others, model_state, batch, key) -> (x, model_state)`` and
            ``head(others, model_state, x, batch, key) -> (loss, model_state)``, or
            ``-> (loss, model_state, aux)``. Nothing is differentiated through it. embed's
            microbatches get it one after the other, then those of head.
        trainable: which parameters of the layers are trained, as in `offload_scan`. The others are
            read and never written, and tx sees None in their place.
        trainable_others: which of `others` are.
        **options: of `offload_scan`: num_slices, num_microbatches, params_in, activations (by
            default where params_in is), compute_dtype, policy; of a stack prefetch (by default 0
            where nothing is offloaded) and resident_slices.

    Returns:
        ``init(layers, others, model_state=()) -> OffloadState``, for layers in the memory that
        params_in says, such as `host_init` makes them, and all else on the device; what is trained
        must be floating-point. And ``step(state, batch, key)``, which returns (state, loss), then
        the layers' aux [L, num_microbatches, ...] or a list of such, then that of head
        [num_microbatches, ...]. `key` may be None; embed and head get it folded with L and L + 1,
        then with the microbatch.

    Raises:
        ValueError: fuse_update with clip_norm, loss_scale or skip_nonfinite; a tx that
            `stream_update` refuses; a batch that num_microbatches does not divide; and as
            `offload_scan`.
        TypeError: for what is no function, array, key or state; for trained parameters that are
            integers; for results of embed and head that are not as the options say.
    """
    form = LIST if isinstance(layer, Sequence) else STACK
    as_callable("embed", embed)
    if form is LIST:
        check_layers("layer", layer)
    else:
        as_callable("layer", layer)
    as_callable("head", head)
    check_optimizer(tx)
    flags = {
        "head_has_aux": head_has_aux, "has_state": has_state, "fuse_update": fuse_update,
        "skip_nonfinite": skip_nonfinite,
    }  # fmt: skip
    for name, flag in flags.items():
        as_flag(name, flag)
    _check_update(fuse_update, clip_norm, loss_scale, skip_nonfinite)
    checked = _check_options(form, has_aux, options)
    made = Made(
        ends_of(embed, head, checked.num_microbatches, has_state, head_has_aux),
        layer,
        Carried(
            tx,
            form.update,
            len(layer) if isinstance(layer, Sequence) else None,
            trainable,
            trainable_others,
            checked.params_in,
            has_state,
            loss_scale,
        ),
        form,
        checked,
        fuse_update,
        clip_norm,
        skip_nonfinite,
    )

    def init(layers: Tree, others: Tree, model_state: Tree = ()) -> OffloadState:
        return initial_state(made.carried, layers, others, model_state)

    def step(state: OffloadState, batch: Any, key: jax.Array | None = None):
        results = _step(made, state, batch, as_key("key", key))
        asked = True, True, has_aux, head_has_aux
        return tuple(result for result, is_asked in zip(results, asked, strict=True) if is_asked)

    return TrainStep(init, step)


class Made(NamedTuple):
    """What a step is made of."""

    ends: Ends
    layer: Callable[..., Any] | Sequence[Callable[..., Any]]
    carried: Carried
    form: Form
    options: OffloadOptions
    fuse_update: bool
    clip_norm: float | None
    skip_nonfinite: bool


def _step(made: Made, state: OffloadState, batch: Any, key: Any) -> tuple:
    """(state, loss, aux of the layers, aux of the head)"""
    num_layers, layers, others = check_fits(made.carried, state)
    check_microbatches(batch, made.options.num_microbatches, "batch")
    tx = made.carried.tx
    scale = jnp.float32(1) if made.skip_nonfinite else None
    scale = scale if made.carried.loss_scale is None else state.loss_scale.scale

    x, model_state, embed_back = run_embed(
        made.ends, others, state.model_state, batch, key, num_layers
    )
    passed = made.form.forward(made.layer, layers, x, key, made.options)
    end = run_head(made.ends, others, model_state, passed.y, batch, key, num_layers + 1, scale)
    if made.fuse_update:
        trained, layers_state, dx = passed.update_meanwhile(tx, state.layers_state, end.dy)
        grads = jax.tree.map(jnp.add, end.grads, embed_back(dx))
    else:
        grads_of_layers, found, dx = passed.collect(scale, end.dy)
        grads = jax.tree.map(jnp.add, end.grads, embed_back(dx))
        found = measure(found, grads, scale)
        if made.skip_nonfinite:
            found = found._replace(finite=found.finite & jnp.isfinite(end.loss))
            end = _kept_if(found.finite, end, state.model_state)
        tx = adjusted(tx, found, made.clip_norm, scale)
        trained, layers_state = made.form.update.update(
            tx, grads_of_layers, state.layers_state, layers.trained, None
        )
    trained_others, others_state = apply(tx, others.trained, state.others_state, grads)
    state = OffloadState(
        Parts(trained, layers.frozen).whole,
        Parts(trained_others, others.frozen).whole,
        layers_state,
        others_state,
        end.model_state,
        next_scale(state.loss_scale, found.finite) if state.loss_scale else (),
    )
    return state, end.loss, passed.aux, end.aux


def _kept_if(finite: jax.Array, end: Headed, before: Tree) -> Headed:
    """What comes after the layers, in a step that counts or does not."""
    kept = jax.tree.map(functools.partial(jnp.where, finite), end.model_state, before)
    return end._replace(loss=jnp.where(finite, end.loss, jnp.nan), model_state=kept)


def _check_update(
    fuse_update: bool, clip_norm: float | None, loss_scale: float | None, skip_nonfinite: bool
) -> None:
    check_clip_norm(clip_norm)
    if loss_scale is not None:
        as_number("loss_scale", loss_scale, lambda a: 1 <= a < float("inf"), "finite, at least 1")
    needs = {
        "clip_norm": (clip_norm, "the norm of all gradients"),
        "loss_scale": (loss_scale, "to know whether all gradients are finite"),
        "skip_nonfinite": (skip_nonfinite or None, "to know whether all gradients are finite"),
    }
    for name, (value, what) in needs.items():
        if fuse_update and value is not None:
            raise ValueError(
                f"`{name}` (={value}) needs {what}, but with fuse_update=True the first slices are "
                "updated before the last gradients exist: pass fuse_update=False."
            )


def _check_options(form: Form, has_aux: bool, options: dict[str, Any]) -> OffloadOptions:
    known = {field.name for field in dataclasses.fields(OffloadOptions)}
    known -= {"grads", "has_aux"} | form.without
    if unknown := [name for name in options if name not in known]:
        of = " for a list of layers" if unknown[0] in form.without else ""
        raise ValueError(
            f"`{unknown[0]}` is no option of offload_train_step{of}; those of offload_scan are "
            f"{', '.join(sorted(known))}."
        )
    options = {"activations": options.get("params_in", "host")} | options
    if options["activations"] == options.get("params_in") == "device":
        options = {"prefetch": 0} | options  # there is nothing to wait for
    return OffloadOptions(has_aux=has_aux, **options)
