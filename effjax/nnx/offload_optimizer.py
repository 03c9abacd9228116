"""OffloadOptimizer for Flax NNX."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PathParts

from ..layers.offload import check_on_host
from ..layers.offload_optimizer import (
    ParamGroups,
    UpdateState,
    init_grad_norm,
    init_state,
    update_groups,
)
from ..ops._common.arguments import describe
from ..ops.offload import offload_jit
from ..ops.offload.optimizer import ClipBy, check_clipping
from ..ops.offload.placement import Space, space_of
from ..ops.offload.trees import check_same_shapes
from .offload import OffloadModel


class OffloadOptimizer(nnx.Pytree):
    """``nnx.Optimizer`` for models with parameters in host memory.

    The state of the optimizer is in the memory of the parameters. The layers of an `OffloadModel`
    are updated one at a time on the device, which holds one or two of them with their gradients and
    state. All other parameters stay on the device and are updated there. If you move them to the
    host, each array above 512 MiB is updated alone, whole or in chunks of rows (`update_rows`)::

        model = effjax.nnx.OffloadModel(layers).to_host()
        optimizer = effjax.nnx.OffloadOptimizer(model, optax.adam(1e-3))

        @effjax.nnx.offload_jit
        def train_step(model, optimizer, x, y):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
            optimizer.update(model, grads)
            return loss

    Args:
        model: an `OffloadModel`, or a module that contains some, after their `to_host`.
        tx: an ``optax.GradientTransformation`` that treats every parameter separately, as in
            `effjax.stream_update`. It gets the parameters of one layer of an OffloadModel, or all
            others together, as nested dicts from the model down.
        wrt: a filter for the Variables to update, as in `nnx.Optimizer`. The others have no state.
        clip_norm: the largest norm of the gradients, above 0. If None, gradients are not clipped.
            It replaces ``optax.clip_by_global_norm``, which mixes parameters.
        clip_by: the norm that `clip_norm` limits, as in `effjax.offload_train_step`: "global",
            "previous" (the global norm of the previous step, `grad_norm`), or "layer" (that of each
            layer, and of all parameters on the device). Only "global" reads the gradients twice.
        update_rows: the arrays above 512 MiB in host memory that may be updated in chunks of rows,
            ``(path, leaf) -> bool``, as in `effjax.offload_train_step`. A path is that of nested
            dicts from the model down; parameters of stacks are not asked for.

    Attributes:
        step: the number of updates, an `nnx.OptState`.
        tx: the optimizer.
        opt_state: its state.
        grad_norm: the norm of the last gradients, an `nnx.OptState`, with ``clip_by="previous"``.

    Raises:
        TypeError: if `model` is not an nnx Module.
        ValueError: if tx mixes parameters, if the parameters of an OffloadModel are not in host
            memory, if `wrt` selects no Variable, if `clip_norm` is not positive, for `clip_by`
            without `clip_norm`, or if `update_rows` selects no parameter or one whose optimizer
            state has no rows.

    References:
        ZeRO-Offload: Ren et al., 2021 (arXiv:2101.06840).
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: Any,
        *,
        wrt: Any = nnx.Param,
        clip_norm: float | None = None,
        clip_by: ClipBy = "global",
        update_rows: Callable[[Any, Any], bool] | None = None,
    ):
        check_clipping(clip_norm, clip_by)
        _check_module(model)
        self.step = nnx.OptState(jnp.uint32(0))
        self.tx, self.wrt, self.clip_norm, self.clip_by = tx, wrt, clip_norm, clip_by
        params = _flatten(model, wrt)
        if not params:
            raise ValueError(f"`wrt` (={wrt!r}) must select at least one Variable of `model`.")
        groups = _group(model, params, params)
        check_on_host([groups.layers, groups.stacks], "Call to_host() of each OffloadModel first.")
        state = init_state(tx, groups, update_rows)
        self.opt_state: Any = nnx.data(jax.tree.map(nnx.OptArray, state))
        grad_norm = init_grad_norm(clip_by, groups)
        self.grad_norm: Any = nnx.data(jax.tree.map(nnx.OptState, grad_norm))
        self.update_arrays = offload_jit(
            functools.partial(update_groups, tx, clip_norm, clip_by, update_rows)
        )

    def update(self, model: nnx.Module, grads: Any, *, value: Any = None) -> None:
        """Update the parameters of the model and the state, in place.

        Outside of jit, too, the old arrays in host memory are overwritten: do not use other
        references to them.

        Args:
            model: the model that was passed to the constructor.
            grads: gradients as ``nnx.grad(…, argnums=nnx.DiffState(0, wrt))`` returns them.
            value: the loss, a scalar, for transformations that need it, such as
                ``optax.contrib.reduce_on_plateau``.

        Raises:
            TypeError: if `model` is not an nnx Module, if `grads` are not a State of gradients, or
                if `tx` needs `value`.
            ValueError: if the gradients do not match the Variables that `wrt` selects.
        """
        _check_module(model)
        if not isinstance(grads, (Mapping, nnx.State, nnx.Module)):
            raise TypeError(f"`grads` must be a State, as nnx.grad returns, not {describe(grads)}.")
        params = _flatten(model, self.wrt)
        grads = _flatten(grads, self.wrt)
        if params.keys() != grads.keys():
            path = sorted(params.keys() ^ grads.keys(), key=str)[0]
            raise ValueError(
                "`grads` must have the Variables of the model that `wrt` selects, but only one of "
                f"them has {'.'.join(map(str, path))}."
            )
        check_same_shapes("grads", grads, "the parameters of `model`", params)
        state = self.opt_state, self.grad_norm
        variables = jax.tree.leaves(state, is_leaf=_is_variable)
        values = jax.tree.map(lambda v: v.get_value(), state, is_leaf=_is_variable)
        old = UpdateState(_group(model, params, params), *values)
        new, *state = self.update_arrays(old, _group(model, params, grads), value)
        for group in (*new.layers, *new.stacks, new.others):
            nnx.update(model, group)
        for variable, value in zip(variables, jax.tree.leaves(state), strict=True):
            variable.set_value(value)
        self.step.set_value(self.step.get_value() + 1)


_Arrays = dict[PathParts, jax.Array]


def _check_module(model: Any) -> None:
    # A State would pass for a model, and its update would be lost.
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` must be a flax.nnx.Module, not {describe(model)}.")


def _is_variable(a: Any) -> bool:
    return isinstance(a, nnx.Variable)


def _flatten(tree: Any, wrt: Any) -> _Arrays:
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(tree, wrt)))


def _group(model: nnx.Module, params: _Arrays, arrays: _Arrays) -> ParamGroups:
    """Group `arrays` (parameters or gradients) by update method, as nested dicts."""
    remaining = dict(arrays)

    def take(prefix: PathParts) -> dict:
        return {
            path: remaining.pop(path)
            for path in arrays
            if path[: len(prefix)] == prefix and path in remaining
        }

    layers, stacks = [], []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, OffloadModel):
            prefix = (*path, "layers")
            if module.stacked:
                stacks.append(take(prefix))
            else:
                layers += [take((*prefix, i)) for i in range(len(module.layers))]
    # Parameters outside of an OffloadModel that the user moved to the host.
    on_host = [path for path in remaining if space_of(params[path]) == Space.Host]
    layers.append({path: remaining.pop(path) for path in on_host})
    nest = nnx.traversals.unflatten_mapping
    return ParamGroups(
        [nest(group) for group in layers if group],
        [nest(group) for group in stacks if group],
        nest(remaining),
    )
