"""Optimizers of models of which parts are offloaded, for linen and nnx, as functions of arrays."""

from typing import Any, NamedTuple

import jax

from ..ops.offload import update_list, update_stack
from ..ops.offload.checks import check_optimizer
from ..ops.offload.optimizer import apply, clip_scale, squares
from ..ops.offload.per_leaf import check_per_leaf
from ..ops.offload.trees import Tree, shapes_of


class Parts(NamedTuple):
    """The parameters of a model, their gradients, or an optimizer's state of them."""

    layers: list[Tree]  # each by itself, on the host
    stacks: list[Tree]  # of like layers, arrays [L, ...] on the host
    others: Tree  # on the device, all together


def init_state(tx: Any, params: Parts) -> Parts:
    """The state of tx where the parameters are; raises as `stream_update` does."""
    check_optimizer(tx)
    check_per_leaf(tx, shapes_of(params.others))
    stacks = [update_stack.init(tx, stack) for stack in params.stacks]
    return Parts(update_list.init(tx, params.layers), stacks, tx.init(params.others))


def updated(
    tx: Any, clip_norm: float | None, both: tuple[Parts, Parts], grads: Parts
) -> tuple[Parts, Parts]:
    """(parameters, state) after a step."""
    params, state = both
    scale, of_others = None, grads.others
    if clip_norm is not None:
        stacks = sum(map(update_stack.sum_of_squares, grads.stacks))
        listed = update_list.sum_of_squares(grads.layers)
        scale = clip_scale(stacks + listed + squares(of_others), clip_norm)
        of_others = jax.tree.map(lambda g: (g * scale).astype(g.dtype), of_others)
    layers = update_list.update(tx, grads.layers, state.layers, params.layers, scale)
    stacks = [
        update_stack.update(tx, g, s, w, scale)
        for g, s, w in zip(grads.stacks, state.stacks, params.stacks, strict=True)
    ]
    others = apply(tx, params.others, state.others, of_others)
    new = zip(layers, (list(zip(*stacks, strict=True)) or [(), ()]), others, strict=True)
    params, state = (Parts(list(a), list(b), c) for a, b, c in new)
    return params, state
