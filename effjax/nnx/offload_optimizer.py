"""Optimizers of optax for nnx models that live in host memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PathParts

from ..layers.offload import check_on_host
from ..layers.offload_optimizer import Parts, init_state, updated
from ..ops._common.arguments import describe
from ..ops.offload import offload_jit
from ..ops.offload.optimizer import check_clip_norm
from ..ops.offload.placement import Space, space_of
from .offload import OffloadModel


class OffloadOptimizer(nnx.Pytree):
    """``nnx.Optimizer`` for models whose parameters, or some of them, are in host memory.

    The state of the optimizer is where the parameters are. Layers of an `OffloadModel` are updated
    one after the other on the device, which holds one or two of them with their gradients and
    state; all other parameters stay on the device and are updated there::

        model = effjax.nnx.OffloadModel(layers).to_host()
        optimizer = effjax.nnx.OffloadOptimizer(model, optax.adam(1e-3))

        @effjax.nnx.offload_jit
        def train_step(model, optimizer, x, y):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
            optimizer.update(model, grads)
            return loss

    Args:
        model: an `OffloadModel`, or a module with some inside, after their `to_host`.
        tx: an ``optax.GradientTransformation`` that treats every parameter on its own, as of
            `effjax.stream_update`. It sees the parameters of one layer of an OffloadModel, or all
            others together, as nested dicts from the model down.
        wrt: a filter for the Variables to be updated, as of `nnx.Optimizer`; the others have no
            state.
        clip_norm: the largest global norm of the gradients, above 0; None: they are not scaled. It
            stands for ``optax.clip_by_global_norm``, which mixes parameters.

    Attributes:
        step: the number of updates, an `nnx.OptState`.
        tx: the optimizer.
        opt_state: its state.

    Raises:
        TypeError, ValueError: for arguments that do not fit, and for a tx that mixes parameters.

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
    ):
        if not isinstance(model, nnx.Module):
            raise TypeError(f"`model` must be an nnx.Module, not {describe(model)}.")
        check_clip_norm(clip_norm)
        self.step = nnx.OptState(jnp.uint32(0))
        self.tx, self.wrt, self.clip_norm = tx, wrt, clip_norm
        params = _flat(model, wrt)
        parts = _parts(model, params, params)
        check_on_host([parts.layers, parts.stacks], "Call to_host() of each OffloadModel first.")
        state = init_state(tx, parts)
        self.opt_state: Any = nnx.data(jax.tree.map(nnx.OptArray, state))
        self.update_arrays = offload_jit(functools.partial(updated, tx, clip_norm))

    def update(self, model: nnx.Module, grads: Any) -> None:
        """Updates the parameters of the model and the state, in place.

        Outside of jit too what is on the host is overwritten: what else refers to these arrays has
        lost them.

        Args:
            model: the one that the optimizer was made for.
            grads: as ``nnx.grad(…, argnums=nnx.DiffState(0, wrt))`` returns them.

        Raises:
            ValueError: for a model or gradients that do not fit.
        """
        params = _flat(model, self.wrt)
        grads = _flat(grads, self.wrt)
        if params.keys() != grads.keys():
            differ = sorted(params.keys() ^ grads.keys(), key=str)
            raise ValueError(
                "`grads` must be of the Variables that `wrt` selects, but "
                f"{'.'.join(map(str, differ[0]))} is in one of them only."
            )
        variables = jax.tree.leaves(self.opt_state, is_leaf=_is_variable)
        values = jax.tree.map(lambda v: v.get_value(), self.opt_state, is_leaf=_is_variable)
        both = _parts(model, params, params), values
        new, state = self.update_arrays(both, _parts(model, params, grads))
        for part in (*new.layers, *new.stacks, new.others):
            nnx.update(model, part)
        for variable, value in zip(variables, jax.tree.leaves(state), strict=True):
            variable.set_value(value)
        self.step.set_value(self.step.get_value() + 1)


_Arrays = dict[PathParts, jax.Array]


def _is_variable(a: Any) -> bool:
    return isinstance(a, nnx.Variable)


def _flat(tree: Any, wrt: Any) -> _Arrays:
    """The arrays by their paths."""
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(tree, wrt)))


def _parts(model: nnx.Module, params: _Arrays, arrays: _Arrays) -> Parts:
    """The `arrays` of `params` by how they are updated, in nested dicts from the model down."""
    left = dict(arrays)

    def take(at: PathParts) -> dict:
        return {path: left.pop(path) for path in arrays if path[: len(at)] == at and path in left}

    layers, stacks = [], []
    for at, module in nnx.iter_modules(model):
        if isinstance(module, OffloadModel):
            places = (*at, "layers")
            if module.stacked:
                stacks.append(take(places))
            else:
                layers += [take((*places, i)) for i in range(len(module.layers))]
    # What has been put on the host by itself.
    by_hand = [path for path in left if space_of(params[path]) == Space.Host]
    layers.append({path: left.pop(path) for path in by_hand})
    nested = nnx.traversals.unflatten_mapping
    return Parts(
        [nested(part) for part in layers if part], [nested(part) for part in stacks if part],
        nested(left),
    )  # fmt: skip
