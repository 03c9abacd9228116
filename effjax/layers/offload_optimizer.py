"""Optimizers of partially offloaded models, shared by the linen and nnx modules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..ops._common.arguments import check_optimizer
from ..ops.offload.backends import barrier, mark_in_order
from ..ops.offload.layers import LayerList, LayerStack
from ..ops.offload.mixing import check_per_leaf
from ..ops.offload.optimizer import (
    ClipBy,
    apply_optimizer,
    make_clip,
    next_grad_norm,
    sum_of_squares,
    with_clipping,
    with_value,
    zero_squares,
)
from ..ops.offload.row_update import (
    UpdateRows,
    check_selects,
    has_huge_array,
    plan_rows,
    update_params,
)
from ..ops.offload.trees import Tree, shapes_of


class ParamGroups(NamedTuple):
    """Parameters of a model by update method; also their gradients or optimizer state."""

    layers: list[Tree]  # updated one at a time, on the host; huge arrays alone or by rows
    stacks: list[Tree]  # stacks of identical layers, arrays [L, ...] on the host
    others: Tree  # updated together, on the device


def init_state(tx: Any, params: ParamGroups, update_rows: UpdateRows | None) -> ParamGroups:
    """Return the state of `tx`, in the memory of the parameters.

    Raises the errors of `stream_update` and of `plan_rows`.
    """
    check_optimizer(tx)
    check_per_leaf(tx, shapes_of(params.others))
    check_selects(update_rows, params.layers)
    for module in filter(has_huge_array, params.layers):
        plan_rows(tx, module, update_rows)
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
    tx: Any,
    clip_norm: float | None,
    clip_by: ClipBy,
    update_rows: UpdateRows | None,
    old: UpdateState,
    grads: ParamGroups,
    value: Any = None,
) -> UpdateState:
    """Return the parameters and the state after a step; `value` is the loss."""
    params, state, norm = old
    plain_tx, tx = tx, with_value(tx, value)
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
        new, s, of_layers = layers.update_and_measure(g, s, w)
        squares.append(of_layers)
        return new, s

    modules = list(zip(params.layers, state.layers, grads.layers, strict=True))
    huge = [i for i, (w, _, _) in enumerate(modules) if has_huge_array(w)]
    small = [i for i in range(len(modules)) if i not in huge]
    w, s, g = ([tree[i] for i in small] for tree in (params.layers, state.layers, grads.layers))
    updated = dict(zip(small, zip(*update(LayerList(tx), g, s, w), strict=True), strict=True))
    if huge:
        if clip_by == "previous":
            squares.append(LayerList(tx).sum_of_squares([grads.layers[i] for i in huge]))

        def clipped(g: Tree) -> Any:
            if clip_norm is None or clip_by != "layer":
                return tx
            # The optimizer gets a few rows at a time, but the norm is that of the module.
            module_norm = jnp.sqrt(LayerList(tx).sum_of_squares([g]))
            return with_clipping(
                with_value(plain_tx, value), make_clip(clip_norm, "global", module_norm)
            )

        one_by_one = _update_huge(plain_tx, clipped, [modules[i] for i in huge], update_rows)
        updated |= dict(zip(huge, one_by_one, strict=True))
    layers, layers_state = ([updated[i][j] for i in range(len(modules))] for j in (0, 1))
    stacks = [
        update(LayerStack(tx), g, s, w)
        for g, s, w in zip(grads.stacks, state.stacks, params.stacks, strict=True)
    ]
    others, others_state = apply_optimizer(tx, params.others, state.others, grads.others)
    if clip_by == "previous":
        norm = next_grad_norm(norm, jnp.sqrt(sum(squares, jnp.float32(0))))
    return UpdateState(
        ParamGroups(layers, [w for w, _ in stacks], others),
        ParamGroups(layers_state, [s for _, s in stacks], others_state),
        norm if clip_by == "previous" else (),
    )


def _update_huge(
    tx: Any, clipped: Callable, modules: list[tuple], update_rows: UpdateRows | None
) -> list[tuple[Tree, Tree]]:
    """Update modules (params, state, grads) one after the other, and large arrays one by one.

    ``clipped(grads)`` is `tx` with clipping.
    """
    updated: list[Any] = []
    last: Any = mark_in_order()
    for i, module in enumerate(modules):
        (w, s, g), last = barrier((module, last))
        if i:
            updated.append(last)
        plan = plan_rows(tx, w, update_rows)
        last = update_params(clipped(g), plan, w, s, g, key_offset=0)
    return [*updated, last]
