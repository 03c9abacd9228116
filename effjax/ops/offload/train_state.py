"""What a training step carries from one call to the next."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arguments import described
from .checks import as_arrays, check_alike
from .host_init import state_sharding
from .optimizer import check_like_init
from .per_leaf import check_per_leaf
from .placement import Where, check_space
from .scaling import LossScale
from .trainable import Parts, parts_of
from .trees import Tree, check_floats, num_layers_of, one_layer
from .update import stream_update


class OffloadState(NamedTuple):
    """What is trained, the optimizer's state of it, and what else changes."""

    layers: Tree  # [L, ...], where params_in says
    others: Tree  # parameters before and after the layers, on the device
    layers_state: Tree  # [L, ...], where the layers are; counts [L] on the device
    others_state: Tree
    model_state: Tree = ()  # what embed and head change with has_state, on the device
    loss_scale: Any = ()  # a LossScale with loss_scale


class Carried(NamedTuple):
    """What the options say of the state."""

    tx: Any
    trainable: Any  # of the layers
    trainable_others: Any
    params_in: Where
    has_state: bool
    loss_scale: float | None

    def parts(self, layers: Tree, others: Tree) -> tuple[Parts, Parts]:
        """Of both, what is trained and what is not."""
        parts = parts_of("trainable", self.trainable, layers)
        if not jax.tree.leaves(parts.trained):
            raise ValueError(
                "`trainable` leaves no parameter of the layers to train: take the gradients of the "
                "others through offload_scan, with trainable=False."
            )
        return parts, parts_of("trainable_others", self.trainable_others, others)


def initial_state(carried: Carried, layers: Tree, others: Tree, model_state: Tree) -> OffloadState:
    layers, others = as_arrays("layers", layers), as_arrays("others", others)
    model_state = as_arrays("model_state", model_state)
    check_space("params_in", layers, carried.params_in)
    check_space("others", others, "device")
    check_space("model_state", model_state, "device")
    num_layers_of(layers, "layers")
    _check_model_state("model_state", carried, model_state)
    of_layers, of_others = carried.parts(layers, others)
    check_floats("layers", of_layers.trained)
    check_floats("others", of_others.trained)
    # They are small, and the first step overwrites them: others are the caller's, and the state can
    # hold what belongs to tx, such as its key.
    copied = functools.partial(jax.tree.map, functools.partial(jnp.array, copy=True))
    others_state = jax.tree_util.tree_map_with_path(
        lambda path, a: jax.device_put(a, state_sharding(others, path, a.shape)),
        copied(carried.tx.init(of_others.trained)),
    )
    loss_scale = ()
    if carried.loss_scale is not None:
        loss_scale = LossScale(jnp.float32(carried.loss_scale), jnp.int32(0))
    return OffloadState(
        layers, copied(others), stream_update(carried.tx).init(of_layers.trained), others_state,
        copied(model_state), loss_scale,
    )  # fmt: skip


def check_fits(carried: Carried, state: OffloadState) -> tuple[int, Parts, Parts]:
    """(the number of layers, layers, others) of a state that fits."""
    if not isinstance(state, OffloadState):
        raise TypeError(
            f"`state` must be an OffloadState, as init makes it, not {described(state)}."
        )
    as_arrays("state", state)
    num_layers, tx = num_layers_of(state.layers, "state.layers"), carried.tx
    layers, others = carried.parts(state.layers, state.others)
    check_floats("state.layers", layers.trained)
    check_floats("state.others", others.trained)
    check_per_leaf(tx, one_layer(layers.trained))
    check_like_init("state.layers_state", tx, state.layers_state, layers.trained, num_layers)
    check_like_init("state.others_state", tx, state.others_state, others.trained, None)
    _check_model_state("state.model_state", carried, state.model_state)
    wanted = () if carried.loss_scale is None else LossScale(jnp.zeros(()), jnp.zeros(()))
    check_alike("state.loss_scale", state.loss_scale, "what init makes", wanted)
    return num_layers, layers, others


def _check_model_state(name: str, carried: Carried, model_state: Tree) -> None:
    if not carried.has_state and jax.tree.leaves(model_state):
        raise ValueError(f"`{name}` is for embed and head to change: set has_state=True.")
