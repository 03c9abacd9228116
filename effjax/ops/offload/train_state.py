"""What a training step carries from one call to the next."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.arguments import describe
from .checks import as_arrays, check_alike
from .host_init import state_sharding
from .optimizer import check_like_init
from .placement import Where, check_space
from .scaling import LossScale
from .trainable import Parts, parts_of
from .trees import Tree, check_floats


class OffloadState(NamedTuple):
    """What is trained, the optimizer's state of it, and what else changes."""

    layers: Tree  # [L, ...] or a list, where params_in says
    others: Tree  # parameters before and after the layers, on the device
    layers_state: Tree  # like the layers, where they are; counts on the device
    others_state: Tree
    model_state: Tree = ()  # what embed and head change with has_state, on the device
    loss_scale: Any = ()  # a LossScale with loss_scale


class Carried(NamedTuple):
    """What the options say of the state."""

    tx: Any
    update: ModuleType  # update_stack or update_list
    num_layers: int | None  # of a list
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

    def number_of(self, name: str, layers: Tree) -> int:
        """How many layers there are; raises ValueError or TypeError for what are none."""
        found = self.update.number_of(name, layers)
        if self.num_layers not in (None, found):
            raise ValueError(
                f"`{name}` must be the parameters of the {self.num_layers} layers that `layer` is "
                f"a list of, not of {found}."
            )
        return found


def initial_state(carried: Carried, layers: Tree, others: Tree, model_state: Tree) -> OffloadState:
    layers, others = as_arrays("layers", layers), as_arrays("others", others)
    model_state = as_arrays("model_state", model_state)
    check_space("params_in", layers, carried.params_in)
    check_space("others", others, "device")
    check_space("model_state", model_state, "device")
    carried.number_of("layers", layers)
    _check_model_state("model_state", carried, model_state)
    _check_apart(layers)
    of_layers, of_others = carried.parts(layers, others)
    check_floats("layers", of_layers.trained)
    check_floats("others", of_others.trained)
    # They are small, and the first step overwrites them: others are the caller's, and the state can
    # hold what belongs to tx, such as its key.
    copied = functools.partial(jax.tree.map, functools.partial(jnp.array, copy=True))
    others_state = jax.tree_util.tree_map_with_path(
        lambda path, a: _placed(a, state_sharding(others, path, a.shape)),
        copied(carried.tx.init(of_others.trained)),
    )
    loss_scale = ()
    if carried.loss_scale is not None:
        loss_scale = LossScale(jnp.float32(carried.loss_scale), jnp.int32(0))
    return OffloadState(
        layers, copied(others), carried.update.init(carried.tx, of_layers.trained), others_state,
        copied(model_state), loss_scale,
    )  # fmt: skip


def _placed(a: jax.Array, sharding: Any) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(a, sharding)
    # device_put makes arrays that cannot be read where each of several processes has one device.
    return jax.jit(lambda a: a, out_shardings=sharding)(a)


def check_fits(carried: Carried, state: OffloadState) -> tuple[int, Parts, Parts]:
    """(the number of layers, layers, others) of a state that fits."""
    if not isinstance(state, OffloadState):
        raise TypeError(
            f"`state` must be an OffloadState, as init makes it, not {describe(state)}."
        )
    as_arrays("state", state)
    num_layers, tx = carried.number_of("state.layers", state.layers), carried.tx
    layers, others = carried.parts(state.layers, state.others)
    check_floats("state.layers", layers.trained)
    check_floats("state.others", others.trained)
    carried.update.check_state("state.layers_state", tx, state.layers_state, layers.trained)
    check_like_init("state.others_state", tx, state.others_state, others.trained, None)
    _check_model_state("state.model_state", carried, state.model_state)
    wanted = () if carried.loss_scale is None else LossScale(jnp.zeros(()), jnp.zeros(()))
    check_alike("state.loss_scale", state.loss_scale, "what init makes", wanted)
    return num_layers, layers, others


def _check_apart(layers: Tree) -> None:
    """Raises ValueError where one array is in two places: they would be updated apart."""
    places: dict[int, str] = {}
    for path, a in jax.tree_util.tree_leaves_with_path(layers):
        name = f"layers{jax.tree_util.keystr(path)}"
        if (other := places.setdefault(id(a), name)) != name:
            raise ValueError(
                f"`{other}` and `{name}` are one array, which a step would write twice; copy it, "
                "or take its gradients through offload_sequential, which adds them."
            )


def _check_model_state(name: str, carried: Carried, model_state: Tree) -> None:
    if not carried.has_state and jax.tree.leaves(model_state):
        raise ValueError(f"`{name}` is for embed and head to change: set has_state=True.")
