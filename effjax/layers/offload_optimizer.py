"""Optimizers of partially offloaded models, shared by the linen and nnx modules."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..ops.offload.clipping import (
    ClipBy,
    make_clip,
    next_grad_norm,
    sum_of_squares,
    with_clipping,
    zero_squares,
)
from ..ops.offload.per_leaf import check_per_leaf
from ..ops.offload.trees import Tree, shapes_of
from ..ops.offload.update import LayerList, LayerStack, apply_optimizer


class ParamGroups(NamedTuple):
    """Parameters of a model by update method; also their gradients or optimizer state."""

    layers: list[Tree]  # updated one at a time, on the host
    stacks: list[Tree]  # stacks of identical layers, arrays [L, ...] on the host
    others: Tree  # updated together, on the device


def init_state(tx: Any, params: ParamGroups) -> ParamGroups:
    """Return the state of `tx`, in the memory of the parameters; raise as `stream_update` does."""
    check_per_leaf(tx, shapes_of(params.others))
    stacks = [LayerStack(tx).init(stack) for stack in params.stacks]
    return ParamGroups(LayerList(tx).init(params.layers), stacks, tx.init(params.others))


class UpdateState(NamedTuple):
    """Parameters, optimizer state and gradient norm: everything that an update replaces."""

    params: ParamGroups
    opt_state: ParamGroups
    grad_norm: Any  # [], of the last step, with clip_by="previous"; else ()


def init_grad_norm(clip_by: ClipBy, params: ParamGroups) -> Any:
    """Return the norm before the first step, 0; () if it is not needed."""
    return zero_squares(params) if clip_by == "previous" else ()


def update_groups(
    tx: Any, clip_norm: float | None, clip_by: ClipBy, old: UpdateState, grads: ParamGroups
) -> UpdateState:
    """Return the parameters and the state after a step."""
    params, state, norm = old
    if clip_norm is not None:
        if clip_by == "global":
            squares = sum(map(LayerStack(tx).sum_of_squares, grads.stacks))
            squares += LayerList(tx).sum_of_squares(grads.layers) + sum_of_squares(grads.others)
            norm = jnp.sqrt(squares)
        tx = with_clipping(tx, make_clip(clip_norm, clip_by, norm))
    squares = [sum_of_squares(grads.others)]

    def update(layers: LayerStack | LayerList, g: Any, s: Any, w: Any) -> tuple[Any, Any]:
        if clip_by != "previous":
            return layers.update(g, s, w)
        new, s, of_layers = layers.measure(lambda layers, s: layers.update(g, s, w), s, w)
        squares.append(of_layers)
        return new, s

    layers, layers_state = update(LayerList(tx), grads.layers, state.layers, params.layers)
    stacks = [
        update(LayerStack(tx), g, s, w)
        for g, s, w in zip(grads.stacks, state.stacks, params.stacks, strict=True)
    ]
    others, others_state = apply_optimizer(tx, params.others, state.others, grads.others)
    if clip_by == "previous":
        norm = next_grad_norm(norm, sum(squares, jnp.float32(0)))
    return UpdateState(
        ParamGroups(list(layers), [w for w, _ in stacks], others),
        ParamGroups(list(layers_state), [s for _, s in stacks], others_state),
        norm if clip_by == "previous" else (),
    )
