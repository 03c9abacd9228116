"""Optimizers of partially offloaded models, shared by the linen and nnx modules."""

from typing import Any, NamedTuple

import jax

from ..ops.offload.per_leaf import check_per_leaf
from ..ops.offload.trees import Tree, shapes_of
from ..ops.offload.update import (
    LayerList,
    LayerStack,
    apply_optimizer,
    clip_scale,
    sum_of_squares,
)


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


def update_groups(
    tx: Any,
    clip_norm: float | None,
    params_and_state: tuple[ParamGroups, ParamGroups],
    grads: ParamGroups,
) -> tuple[ParamGroups, ParamGroups]:
    """Return (parameters, state) after a step."""
    params, state = params_and_state
    stacked, listed = LayerStack(tx), LayerList(tx)
    scale, other_grads = None, grads.others
    if clip_norm is not None:
        squares = sum(map(stacked.sum_of_squares, grads.stacks))
        squares = squares + listed.sum_of_squares(grads.layers) + sum_of_squares(other_grads)
        scale = clip_scale(squares, clip_norm)
        other_grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), other_grads)
    layers, layers_state = listed.update(grads.layers, state.layers, params.layers, scale)
    stacks = [
        stacked.update(g, s, w, scale)
        for g, s, w in zip(grads.stacks, state.stacks, params.stacks, strict=True)
    ]
    others, others_state = apply_optimizer(tx, params.others, state.others, other_grads)
    return (
        ParamGroups(list(layers), [w for w, _ in stacks], others),
        ParamGroups(list(layers_state), [s for _, s in stacks], others_state),
    )
