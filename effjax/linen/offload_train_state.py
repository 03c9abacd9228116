"""OffloadTrainState for Flax linen."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from flax.core import unfreeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict

from ..layers.offload import check_on_host
from ..layers.offload_optimizer import (
    ParamGroups,
    UpdateState,
    init_grad_norm,
    init_state,
    update_groups,
)
from ..ops._common.arguments import describe
from ..ops.offload.optimizer import ClipBy, check_clipping
from ..ops.offload.placement import Space, space_of
from ..ops.offload.trees import as_array_tree, check_same_shapes


class OffloadTrainState(TrainState):
    """Flax's ``TrainState`` for models with parameters in host memory.

    The state of the optimizer is in the memory of the parameters. Parameters on the host are
    updated one module at a time on the device, which holds one or two of them with their gradients
    and state; arrays above 512 MiB alone, whole or in chunks of rows. All others are updated on the
    device::

        variables = model.init(key, x)  # a linen.OffloadModel, or a model that contains one
        state = effjax.linen.OffloadTrainState.create(
            apply_fn=model.apply, params=effjax.to_host(variables["params"]), tx=optax.adam(1e-3)
        )

        @effjax.offload_jit
        def train_step(state, x, y):
            loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
            return state.apply_gradients(grads=grads), loss

    Attributes:
        step: as in ``flax.training.train_state.TrainState``, like `apply_fn`, `params`, `tx` and
            `opt_state`.
        stacks: the paths of parameters [L, ...] of identical layers, see `create`.
        clip_norm: the largest norm of the gradients. If None, they are not clipped.
        clip_by: the norm that `clip_norm` limits, see `create`.
        update_rows: the parameters that may be updated in chunks of rows, see `create`.
        grad_norm: the norm of the last gradients, with ``clip_by="previous"``.

    References:
        ZeRO-Offload: Ren et al., 2021 (arXiv:2101.06840).
    """

    stacks: tuple[str, ...] = struct.field(pytree_node=False, default=())
    clip_norm: float | None = struct.field(pytree_node=False, default=None)
    clip_by: ClipBy = struct.field(pytree_node=False, default="global")
    update_rows: Callable[[Any, Any], bool] | None = struct.field(pytree_node=False, default=None)
    grad_norm: Any = ()

    @classmethod
    def create(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: Any,
        stacks: Sequence[str] = (),
        clip_norm: float | None = None,
        clip_by: ClipBy = "global",
        update_rows: Callable[[Any, Any], bool] | None = None,
        **kwargs: Any,
    ) -> "OffloadTrainState":
        """Create the state before the first step.

        Args:
            apply_fn: the function that applies the model, such as ``model.apply``.
            params: nested dicts of arrays, some of them in host memory, see `effjax.to_host`.
            tx: an ``optax.GradientTransformation`` that treats every parameter separately, as in
                `effjax.stream_update`. It gets the parameters of one module on the host, or all
                others together, as nested dicts from the model down.
            stacks: the paths of the parameters of an OffloadModel with `num_layers`, or of
                ``nn.scan``, such as "decoder/layers". They are updated layer by layer.
            clip_norm: the largest norm of the gradients, above 0. It replaces
                ``optax.clip_by_global_norm``, which mixes parameters.
            clip_by: the norm that `clip_norm` limits, as in `effjax.offload_train_step`: "global",
                "previous" (the global norm of the previous step, `grad_norm`), or "layer" (that of
                each module on the host or layer of `stacks`, and of all parameters on the device).
                Only "global" reads the gradients twice.
            update_rows: the arrays above 512 MiB in host memory, outside of `stacks`, that may be
                updated in chunks of rows, ``(path, leaf) -> bool``, as in
                `effjax.offload_train_step`. A path is that of nested dicts from the model down.
            **kwargs: the fields of a subclass.

        Returns:
            The state of step 0.

        Raises:
            TypeError: if `params` are not nested dicts of arrays, `apply_fn` is neither a function
                nor None, or `stacks` is not a sequence of strings.
            ValueError: if tx mixes parameters, if `stacks` has other paths or paths on the device,
                if `clip_norm` is not positive, for `clip_by` without `clip_norm`, or if
                `update_rows` selects no parameter or one whose optimizer state has no rows.
        """
        check_clipping(clip_norm, clip_by)
        if not isinstance(params, Mapping):
            raise TypeError(f"`params` must be nested dicts of arrays, not {describe(params)}.")
        if not (apply_fn is None or callable(apply_fn)):
            raise TypeError(f"`apply_fn` must be a function, not {describe(apply_fn)}.")
        params = as_array_tree("params", unfreeze(params))  # type: ignore[arg-type]
        groups = _group(params, params, stacks)
        check_on_host(groups.stacks, "Move them with effjax.to_host, or remove them from `stacks`.")
        return cls(
            step=jnp.int32(0), apply_fn=apply_fn, params=params, tx=tx,
            opt_state=init_state(tx, groups, update_rows), stacks=tuple(stacks),
            clip_norm=clip_norm, clip_by=clip_by, update_rows=update_rows,
            grad_norm=init_grad_norm(clip_by, groups), **kwargs,
        )  # fmt: skip

    def apply_gradients(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, grads: Any, value: Any = None, **kwargs: Any
    ) -> "OffloadTrainState":
        """Return the state after a step; compile it with `effjax.offload_jit`.

        Args:
            grads: the gradients of `params`.
            value: the loss, a scalar, for transformations that need it, such as
                ``optax.contrib.reduce_on_plateau``.
            **kwargs: other fields to replace.

        Raises:
            TypeError: if a gradient is not an array, or if `tx` needs `value`.
            ValueError: if the gradients do not have the structure and shapes of the parameters.
        """
        check_same_shapes("grads", as_array_tree("grads", grads), "`params`", self.params)
        state: Any = self.opt_state
        old = UpdateState(_group(self.params, self.params, self.stacks), state, self.grad_norm)
        grads = _group(self.params, grads, self.stacks)
        new, opt_state, grad_norm = update_groups(
            self.tx, self.clip_norm, self.clip_by, self.update_rows, old, grads, value
        )
        flat = {}
        for group in (*new.layers, *new.stacks, new.others):
            flat |= flatten_dict(group)
        params = unflatten_dict({path: flat[path] for path in flatten_dict(self.params)})
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, grad_norm=grad_norm, **kwargs
        )


def _group(params: Mapping, arrays: Mapping, stacks: Sequence[str]) -> ParamGroups:
    """Group `arrays` (parameters or gradients) by update method, as nested dicts."""
    is_text = isinstance(stacks, str)
    if is_text or not all(isinstance(path, str) for path in stacks):
        example = [stacks if is_text else "decoder/layers"]
        raise TypeError(f"`stacks` must be a sequence of paths, such as {example}.")
    remaining, flat_params = flatten_dict(arrays), flatten_dict(params)
    stacked = []
    for name in stacks:
        prefix = tuple(name.split("/"))
        paths = [path for path in remaining if path[: len(prefix)] == prefix]
        if not paths:
            raise ValueError(
                f"`stacks` (={stacks!r}) must be disjoint paths such as 'decoder/layers', but the "
                f"params have no {name!r}, or another path contains it."
            )
        stacked.append({path: remaining.pop(path) for path in paths})
    modules = defaultdict(dict)
    for path in [path for path in remaining if space_of(flat_params[path]) == Space.Host]:
        modules[path[:-1]][path] = remaining.pop(path)
    return ParamGroups(
        [unflatten_dict(group) for group in modules.values()],
        [unflatten_dict(group) for group in stacked],
        unflatten_dict(remaining),
    )
