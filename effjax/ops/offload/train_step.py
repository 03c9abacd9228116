"""A training step of offloaded layers: gradients and updates in one program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.arguments import (
    as_key,
    as_number,
    check_choice,
    check_instance,
    check_optimizer,
)
from .._common.platform import follow_arrays
from .embed_head import HeadResult, make_embed_head, run_embed, run_head
from .layers import ForwardPass, LayerList, LayerStack
from .optimizer import (
    ClipBy,
    adjust_optimizer,
    apply_optimizer,
    check_clipping,
    make_clip,
    next_grad_norm,
    sum_of_squares,
    unscale_gradients,
    with_clipping,
    with_value,
)
from .placement import SPACES, MemoryName, Space, put
from .row_update import plan_rows, update_params
from .slices import OffloadOptions, check_microbatches
from .train_state import OffloadState, StateSpec, check_state, init_state, next_loss_scale
from .trees import Partition, Tree


class TrainStep(NamedTuple):
    """The init and step functions of an offloaded training step."""

    init: Callable[..., Any]
    step: Callable[..., "StepResult"]


class StepResult(NamedTuple):
    """The result of a training step.

    The norm of the gradients of all trained parameters is that before clipping, without the loss
    scale. `grad_norm` may be inf although all gradients are finite; `finite` tells the two apart.
    """

    state: OffloadState
    loss: jax.Array  # []
    aux: Any  # of the layers, [L, num_microbatches, ...] or a list of them; None without has_aux
    head_aux: Any  # of head, [num_microbatches, ...]; None without head_has_aux
    grad_norm: jax.Array  # [], float32 or wider
    finite: jax.Array  # bool []: the loss and all gradients are finite


def offload_train_step(
    embed: Callable[..., Any],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head: Callable[..., Any],
    tx: Any,
    *,
    fuse_update: bool = True,
    clip_norm: float | None = None,
    clip_by: ClipBy = "global",
    loss_scale: float | None = None,
    skip_nonfinite: bool = False,
    weighted_loss: bool = False,
    has_aux: bool = False,
    head_has_aux: bool = False,
    has_state: bool = False,
    trainable: Any = True,
    trainable_others: Any = True,
    num_slices: int | None = None,
    num_microbatches: int = 1,
    params_in: MemoryName = "host",
    others_in: MemoryName = "device",
    update_rows: Callable[[Any, Any], bool] | None = None,
    activations_in: MemoryName | None = None,
    prefetch: int | None = None,
    resident_slices: int | None = None,
    compute_dtype: Any = None,
    policy: Callable[..., Any] | None = None,
) -> TrainStep:
    """Make a training step for ``loss = head(others, layers(embed(others, batch)), batch)``.

    With `fuse_update` each slice is updated inside the backward pass as soon as its gradient is
    known, and the full gradient never exists. Otherwise gradients go to the memory of the layers,
    and a second loop updates the layers.

    With ``params_in="device"`` nothing is offloaded by default: parameters, optimizer state and
    residuals stay on the device. A fused step still saves the memory of the gradients.

    With `num_microbatches` M, embed and head also get one microbatch at a time, rows
    [m B / M, (m + 1) B / M) of each array of the batch, or of each device's rows if these are
    sharded along Explicit axes. The loss is the mean of M losses, so each must be a mean over its
    rows. If rows have different weights, such as numbers of tokens, use `weighted_loss`.

    With ``others_in="host"`` the parameters of embed and head are on the device until these
    functions have run. For the update one large parameter at a time is on the device again, with
    its gradient and its optimizer state, or chunks of its rows of 64 MiB if `update_rows` selects
    it. Both compute the same as with ``others_in="device"``, except for random numbers of the
    optimizer: each chunk has its own.

    Compile the step with `offload_jit`, which overwrites the old state. The `layers` passed to
    init, and `others` in host memory, are overwritten by the first step; init copies everything
    else.

    In ``jax.shard_map`` the loss must be the mean over the devices (``jax.lax.pmean``), or with
    `weighted_loss` both numbers their sum (``jax.lax.psum``). With ``check_vma=False``, and in
    ``jax.pmap``, gradients are those of each device, which ``tx`` must average first. `clip_norm`,
    `loss_scale` and `skip_nonfinite` need gradients that are equal on all devices: they are not
    supported there.

    Args:
        embed: ``embed(others, batch, key) -> x``. Its residuals stay on the device during the step;
            use ``jax.checkpoint`` if they are large.
        layer: ``layer(params, x, key) -> x``, or ``-> (x, aux)`` with `has_aux`, as in
            `offload_scan`. A list of functions makes a step of different layers, whose parameters
            are a list of pytrees as in `offload_sequential`, in which no array occurs twice.
        head: ``head(others, x, batch, key) -> loss``, a scalar, or ``-> (loss, aux)`` with
            `head_has_aux`. With `weighted_loss` the loss is a pair.
        tx: an ``optax.GradientTransformation`` that treats every parameter separately, or
            ``optax.MultiSteps`` of one. Masks and labels get `OffloadParams`, with the paths of all
            parameters, and None in place of those that are not updated at the time. It gets the
            loss as `value`, if it takes this argument. Its random numbers differ from layer to
            layer, see `stream_update`.
        fuse_update: whether to update inside the backward pass. Not with `loss_scale`,
            `skip_nonfinite` or ``clip_by="global"``, which depend on all gradients.
        clip_norm: the largest norm of the gradients, above 0. If None, they are not clipped.
        clip_by: the norm that `clip_norm` limits. Gradients are multiplied by ``min(1, clip_norm /
            norm)``.

            * "global": the norm of all gradients, as in ``optax.clip_by_global_norm``.
            * "previous": the norm of all gradients of the previous step, before clipping. It is
              `state.grad_norm`, and 0 at first, so that the first step is not clipped; replace it
              for another first norm. This does not bound the update of the step in which the norm
              grows, only those after it. A norm that is not finite is not stored: the next step
              uses the last finite one.
            * "layer": the norm of the gradients of each layer; all of `others` count as one layer.
              The norm of all gradients is then at most ``clip_norm * sqrt(L + 1)``.

            As in optax, gradients that are NaN stay NaN. With "global" and "layer" they make all
            gradients with the same norm NaN; an infinite norm makes finite gradients 0.
        loss_scale: the initial factor of the loss in the backward pass, at least 1, for float16. It
            changes as in ``flax.training.dynamic_scale.DynamicScale`` with a minimum of 1. A step
            with gradients that are not finite changes no parameters and no optimizer state, only
            the state of embed and head.
        skip_nonfinite: whether a step with a loss or gradients that are not finite changes nothing
            except the loss scale. Its loss is NaN.
        weighted_loss: whether head returns ``(loss_sum, weight)`` in place of the loss: a sum over
            its rows, and the sum of their weights, such as the number of valid tokens. The loss is
            the quotient of the sums over all microbatches. The weights are not differentiated. If
            they add up to 0, the loss and its gradients are 0; the optimizer still runs. With
            several microbatches, a pass before the heads computes the weights, which costs
            little unless they depend on x.
        has_aux: whether layers return a second result.
        head_has_aux: whether head returns a second result.
        has_state: whether embed and head have a state that is not differentiated, such as batch
            statistics: ``embed(others, model_state, batch, key) -> (x, model_state)`` and
            ``head(others, model_state, x, batch, key) -> (loss, model_state)``, or ``-> (loss,
            model_state, aux)``. The microbatches of embed update it in order, then those of head.
        trainable: the trained parameters of the layers, as in `offload_scan`. The others are never
            written, and tx gets None in their place.
        trainable_others: the trained parameters of `others`.
        num_slices: as in `offload_scan`.
        num_microbatches: as in `offload_scan`.
        params_in: the memory of the layers and their optimizer state, "host" or "device".
        others_in: the memory of `others` and their optimizer state, "host" or "device".
        update_rows: the parameters of `others` in host memory that may be updated in chunks of
            rows, ``(path, leaf) -> bool`` with paths as in `trainable_others`. The leaf is the
            parameter's shape and dtype. Return True only if the update of a row depends on no other
            row of the parameter, as with AdamW (also in 8 bits), Lion and SGD, but not with
            Adafactor, LAMB or Muon. A state of the optimizer that does not consist of rows is an
            error; nothing else is checked, and a wrong promise gives the updates of separate
            chunks. By default large parameters are updated whole.
        activations_in: the memory of the residuals; by default `params_in`.
        prefetch: as in `offload_scan`, for a stack only; by default 1, or 0 if nothing is
            offloaded.
        resident_slices: as in `offload_scan`, for a stack only; by default 0.
        compute_dtype: as in `offload_scan`.
        policy: as in `offload_scan`.

    Returns:
        ``init(layers, others, model_state=()) -> OffloadState``, for layers in the memory
        `params_in` (see `host_init`), others in the memory `others_in`, and model_state on the
        device, and ``step(state, batch, key=None)``. The step returns a NamedTuple (state, loss,
        aux, head_aux, grad_norm, finite). aux are the second results of the layers [L,
        num_microbatches, ...], or a list of them, and head_aux that of head [num_microbatches,
        ...]; None if there is none. grad_norm is the norm of the gradients of all trained
        parameters, before clipping. finite is False if the loss or a gradient is not. embed and
        head get the key folded with L and L + 1, and then with the microbatch.

    Raises:
        ValueError: for `fuse_update` with `loss_scale`, `skip_nonfinite` or clipping by the global
            norm; for `clip_by` without `clip_norm`; for `prefetch` or `resident_slices` with a list
            of layers; for `update_rows` without ``others_in="host"``, without a parameter that it
            selects, or with one whose optimizer state has no rows; if `stream_update` rejects tx;
            if `num_microbatches` does not divide the batch; and as `offload_scan`.
        TypeError: if an argument is not an array, a key or a state, if a trained parameter is an
            integer, or if embed or head return other results than the options describe.
    """
    check_optimizer(tx)
    check_clipping(clip_norm, clip_by)
    check_choice("others_in", others_in, *SPACES)
    if update_rows is not None and others_in == "device":
        raise ValueError(
            "`update_rows` needs others_in='host'. Parameters on the device are updated whole."
        )
    if loss_scale is not None:
        as_number("loss_scale", loss_scale, lambda a: 1 <= a < float("inf"), "finite, at least 1")
    if fuse_update:
        _check_fused(clip_norm if clip_by == "global" else None, loss_scale, skip_nonfinite)
    is_list = isinstance(layer, Sequence)
    if is_list:
        for name, value in (("prefetch", prefetch), ("resident_slices", resident_slices)):
            if value is not None:
                raise ValueError(f"`{name}` (={value}) must be None for a list of layers.")
    activations_in = params_in if activations_in is None else activations_in
    if prefetch is None:
        prefetch = 0 if params_in == activations_in == "device" else 1
    options = OffloadOptions(
        num_slices=num_slices,
        num_microbatches=num_microbatches,
        params_in=params_in,
        activations_in=activations_in,
        prefetch=prefetch,
        resident_slices=0 if resident_slices is None else resident_slices,
        compute_dtype=compute_dtype,
        has_aux=has_aux,
        policy=policy,
    )
    spec = StateSpec(
        layers=LayerList(tx) if is_list else LayerStack(tx),
        trainable=trainable,
        trainable_others=trainable_others,
        params_in=params_in,
        loss_scale=loss_scale,
        keeps_grad_norm=clip_by == "previous",
        others_in=others_in,
        update_rows=update_rows,
    )
    embed_with_state, head_with_state = make_embed_head(
        embed, head, has_state, head_has_aux, weighted_loss
    )
    config = StepConfig(
        embed=embed_with_state,
        head=head_with_state,
        layer=layer,
        spec=spec,
        options=options,
        fuse_update=fuse_update,
        clip_norm=clip_norm,
        clip_by=clip_by,
        skip_nonfinite=skip_nonfinite,
        weighted_loss=weighted_loss,
    )

    def init(layers: Tree, others: Tree, model_state: Tree = ()) -> OffloadState:
        return init_state(spec, layers, others, model_state)

    def step(state: OffloadState, batch: Any, key: jax.Array | None = None):
        check_instance("state", state, OffloadState, "an OffloadState, as init returns it")
        key = None if key is None else as_key("key", key)
        result = _step(config, state, batch, key)
        return result._replace(
            aux=result.aux if has_aux else None,
            head_aux=result.head_aux if head_has_aux else None,
        )

    return TrainStep(init, step)


def _check_fused(clip_norm: float | None, loss_scale: float | None, skip_nonfinite: bool) -> None:
    """Raise ValueError for an option that depends on all gradients."""
    global_options = {
        "clip_norm": clip_norm,
        "loss_scale": loss_scale,
        "skip_nonfinite": skip_nonfinite or None,
    }
    for name, value in global_options.items():
        if value is not None:
            remedy = ' Or use clip_by="previous" or "layer".' if name == "clip_norm" else ""
            raise ValueError(
                f"`{name}` (={value}) needs fuse_update=False, because it depends on all "
                "gradients, and a fused step updates the first slices before the last gradients "
                f"exist.{remedy}"
            )


class StepConfig(NamedTuple):
    """Static configuration of a training step."""

    embed: Callable  # (others, model_state, batch, key) -> (x, model_state)
    head: Callable  # (others, model_state, x, batch, key) -> (loss, (weight, model_state, aux))
    layer: Any  # a function, or a sequence of them
    spec: StateSpec
    options: OffloadOptions
    fuse_update: bool
    clip_norm: float | None
    clip_by: ClipBy
    skip_nonfinite: bool
    weighted_loss: bool


@follow_arrays
def _step(config: StepConfig, state: OffloadState, batch: Any, key: Any) -> StepResult:
    spec, layers, others = check_state(config.spec, state)
    config, num_layers = config._replace(spec=spec), spec.layers.count(state.layers)
    num_microbatches = config.options.num_microbatches
    check_microbatches(batch, num_microbatches, "batch")
    scale = _gradient_scale(config, state)

    # In host memory, XLA loads each parameter before its first use. A barrier that orders these
    # loads would stop XLA for TPUs from finding the host arrays.
    loaded = put(others, Space.Device)
    x, model_state, embed_vjp = run_embed(
        config.embed, num_microbatches, loaded, state.model_state, batch, key, num_layers
    )
    done = spec.layers.run(config.layer, layers, x, key, config.options)
    head = run_head(
        config.head, num_microbatches, loaded, model_state, done.y, batch, key, num_layers + 1,
        scale, config.weighted_loss,
    )  # fmt: skip
    if config.fuse_update:
        update = _update_fused(config, state, done, head, embed_vjp)
    else:
        update = _update_apart(config, state, layers.trained, done, head, embed_vjp, scale)
    loss = head.loss
    if config.skip_nonfinite:
        head = _skip_head(update.finite, head, state.model_state)
    trained_others, others_state = _update_others(
        config, others.trained, state.others_state, update, loss, scale, num_layers
    )
    grad_norm = state.grad_norm
    if spec.keeps_grad_norm:  # a step that is skipped keeps the norm
        grad_norm = jnp.where(update.finite, next_grad_norm(grad_norm, update.norm), grad_norm)
    new_state = OffloadState(
        Partition(update.trained, layers.frozen).merge(),
        Partition(trained_others, others.frozen).merge(),
        update.layers_state,
        others_state,
        head.model_state,
        next_loss_scale(state.loss_scale, update.finite) if state.loss_scale else (),
        grad_norm,
    )
    finite = update.finite & jnp.isfinite(head.loss)
    return StepResult(new_state, head.loss, done.aux, head.aux, update.norm, finite)


def _gradient_scale(config: StepConfig, state: OffloadState) -> jax.Array | None:
    """Return the factor of the loss in the backward pass; only with one are gradients checked."""
    if config.spec.loss_scale is not None:
        return state.loss_scale.scale
    return jnp.float32(1) if config.skip_nonfinite else None  # dividing by 1 is exact


class _LayersUpdate(NamedTuple):
    """The updated layers, and what the update of `others` needs."""

    trained: Tree  # the new parameters of the layers
    layers_state: Tree
    grads: Tree  # of `others`
    finite: jax.Array  # bool []: whether to update
    norm: jax.Array  # [], of all gradients
    clip: Callable | None  # of the gradients of a layer


def _update_fused(
    config: StepConfig, state: OffloadState, done: ForwardPass, head: HeadResult, embed_vjp: Any
) -> _LayersUpdate:
    """Update each slice of the layers inside the backward pass."""
    layers, clip = config.spec.layers.map_tx(lambda tx: with_value(tx, head.loss)), None
    if config.clip_norm is not None:
        clip = make_clip(config.clip_norm, config.clip_by, state.grad_norm)
        layers = layers.map_tx(lambda tx: with_clipping(tx, clip))
    trained, layers_state, stats, dx = layers.backward_and_update(done, head.dy, state.layers_state)
    grads = jax.tree.map(jnp.add, head.grads, embed_vjp(dx))
    stats = stats.add(grads, None)
    return _LayersUpdate(trained, layers_state, grads, stats.finite, jnp.sqrt(stats.squares), clip)


def _update_apart(
    config: StepConfig,
    state: OffloadState,
    trained: Tree,
    done: ForwardPass,
    head: HeadResult,
    embed_vjp: Any,
    scale: jax.Array | None,
) -> _LayersUpdate:
    """Update the layers after the backward pass, with the norm of all gradients known."""
    layers = config.spec.layers
    layer_grads, stats, dx = layers.backward(done, head.dy, scale)
    grads = jax.tree.map(jnp.add, head.grads, embed_vjp(dx))
    stats = stats.add(grads, scale)
    finite, norm, clip = stats.finite, jnp.sqrt(stats.squares), None
    if config.skip_nonfinite:
        finite &= jnp.isfinite(head.loss)
    if config.clip_norm is not None:
        limited = norm if config.clip_by == "global" else state.grad_norm
        clip = make_clip(config.clip_norm, config.clip_by, limited)
    layers = layers.map_tx(
        lambda tx: adjust_optimizer(with_value(tx, head.loss), finite, clip, scale)
    )
    trained, layers_state = layers.update(layer_grads, state.layers_state, trained)
    return _LayersUpdate(trained, layers_state, grads, finite, norm, clip)


def _update_others(
    config: StepConfig,
    trained: Tree,
    others_state: Tree,
    update: _LayersUpdate,
    loss: jax.Array,
    scale: jax.Array | None,
    num_layers: int,
) -> tuple[Tree, Tree]:
    """Return the new parameters of `others` and their state."""
    grads, clip, tx = update.grads, update.clip, config.spec.others_tx
    if config.clip_norm is not None and config.clip_by == "layer":
        # The optimizer may get a few rows at a time, but the norm is that of all others.
        squares = sum_of_squares(grads if scale is None else unscale_gradients(grads, scale))
        clip = make_clip(config.clip_norm, "global", jnp.sqrt(squares))
    adjusted = adjust_optimizer(with_value(tx, loss), update.finite, clip, scale)
    if config.spec.others_in == "host":
        plan = plan_rows(tx, trained, config.spec.update_rows)
        return update_params(adjusted, plan, trained, others_state, grads, num_layers)
    return apply_optimizer(adjusted, trained, others_state, grads)


def _skip_head(finite: jax.Array, head: HeadResult, model_state: Tree) -> HeadResult:
    """Return NaN for the loss, and the old model state, unless `finite`."""
    model_state = jax.tree.map(functools.partial(jnp.where, finite), head.model_state, model_state)
    return head._replace(loss=jnp.where(finite, head.loss, jnp.nan), model_state=model_state)
