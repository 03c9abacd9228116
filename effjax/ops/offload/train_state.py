"""The state of an offloaded training step, with the loss scale."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._common.platform import follow_arrays
from .host_init import has_places, place_state
from .layers import LayerList, LayerStack
from .optimizer import OffloadParams, with_full_paths, zero_squares
from .placement import MemoryName, check_space
from .row_update import UpdateRows, check_selects, init_rows
from .trees import (
    Partition,
    Tree,
    as_array_tree,
    check_differentiable,
    check_same_shapes,
    layer_shapes,
    partition,
)

GROWTH_INTERVAL = 2000  # finite steps until the loss scale is doubled


class LossScale(NamedTuple):
    """The factor of the loss in the backward pass."""

    scale: jax.Array  # float32 []
    finite_steps: jax.Array  # int32 [], since the scale changed


def next_loss_scale(now: LossScale, finite: jax.Array) -> LossScale:
    """Return the loss scale after a step, given whether its gradients were finite."""
    largest = jnp.finfo(jnp.float32).max
    grows = now.finite_steps == GROWTH_INTERVAL
    larger = jnp.where(grows, jnp.minimum(2 * now.scale, largest), now.scale)
    smaller = jnp.maximum(now.scale / 2, 1)
    return LossScale(
        jnp.where(finite, larger, smaller), jnp.where(grows | ~finite, 0, now.finite_steps + 1)
    )


class OffloadState(NamedTuple):
    """Parameters, optimizer state and other values that a training step updates."""

    layers: Tree  # [L, ...] or a list, in the memory params_in
    others: Tree  # parameters of embed and head, in the memory others_in
    layers_state: Tree  # the optimizer's state of the layers; counts are on the device
    others_state: Tree  # in the memory others_in; scalars are on the device
    model_state: Tree = ()  # the state of embed and head with has_state, on the device
    loss_scale: Any = ()  # a LossScale with loss_scale
    grad_norm: Any = ()  # [], of the last step, with clip_by="previous"

    def shardings(self) -> "OffloadState":
        """Return the sharding of each array, with its memory.

        The parameters may be shapes with shardings, and everything else shapes, as
        ``jax.eval_shape(init, layers, others)`` returns them. `init` creates the same places: the
        optimizer's state is in the memory of the parameters, except for scalars, and sharded like
        them. All other arrays are replicated on the device.

        Raises:
            ValueError: if an array of the optimizer's state has another shape than its parameter,
                which is sharded, and is neither a factored nor an 8-bit moment.
        """
        layers_state = self.layers_state
        if isinstance(layers_state, list):  # different layers
            owners = (_owners(w, self.layers) for w in self.layers)
            layers_places: Any = list(map(place_state, layers_state, owners))
        else:
            layers_places = place_state(layers_state, self.layers, stacked=True)
        others_places = place_state(self.others_state, _owners(self.others, self.layers))
        replicated = place_state(jnp.zeros(()), self.layers)
        layers, others = jax.tree.map(lambda a: a.sharding, (self.layers, self.others))
        rest = jax.tree.map(lambda _: replicated, self[4:])
        return OffloadState(layers, others, layers_places, others_places, *rest)


def _owners(params: Tree, layers: Tree) -> Tree:
    """Return the parameters; if there are none, the layers, on whose devices their counts are."""
    return params if jax.tree.leaves(params) else layers


class StateSpec(NamedTuple):
    """Static description of the train state."""

    layers: LayerStack | LayerList
    trainable: Any  # of the layers
    trainable_others: Any
    params_in: MemoryName
    loss_scale: float | None
    keeps_grad_norm: bool = False
    others_in: MemoryName = "device"
    update_rows: UpdateRows | None = None
    others_tx: Any = None  # the optimizer of `others`, from `with_paths`

    def with_paths(self, layers: Tree, others: Tree) -> "StateSpec":
        """Return the static description whose optimizers know the paths of all parameters.

        Both arguments have None in place of the parameters that are not trained.
        """
        tx: Any = self.layers.tx
        no_layers, no_others = jax.tree.map(lambda _: None, (layers, others))
        others_tx = with_full_paths(
            tx, others, lambda w: OffloadParams(no_layers, w), lambda params: params.others
        )
        if isinstance(self.layers, LayerStack):
            of_layers = LayerStack(
                with_full_paths(
                    tx,
                    layer_shapes(layers),
                    lambda w: OffloadParams(w, no_others),
                    lambda params: params.layers,
                )
            )
        else:
            is_layer = lambda a: a is not no_layers  # noqa: E731
            nothing, structure = jax.tree.flatten(no_layers, is_leaf=is_layer)

            def of_layer(i: int) -> Any:
                def put_in(w: Tree) -> OffloadParams:
                    layers = structure.unflatten([*nothing[:i], w, *nothing[i + 1 :]])
                    return OffloadParams(layers, no_others)

                def take_out(params: OffloadParams) -> Tree:
                    # optax has one MaskedNode() for all layers that a mask excludes.
                    return params.layers[i] if len(params.layers) > i else params.layers

                return with_full_paths(tx, layers[i], put_in, take_out)

            of_layers = LayerList([of_layer(i) for i in range(len(layers))])
        return self._replace(layers=of_layers, others_tx=others_tx)

    def partition(self, layers: Tree, others: Tree) -> tuple[Partition, Partition]:
        """Split the parameters of the layers, and the others, into trained and frozen ones."""
        return partition(self.trainable, layers), partition(self.trainable_others, others)


@follow_arrays
def init_state(spec: StateSpec, layers: Tree, others: Tree, model_state: Tree) -> OffloadState:
    """Return the state before the first step."""
    layers, others = as_array_tree("layers", layers), as_array_tree("others", others)
    model_state = as_array_tree("model_state", model_state)
    check_space("layers", layers, spec.params_in)
    check_space("others", others, spec.others_in)
    check_space("model_state", model_state, "device")
    check_no_shared("layers", layers)
    layer_params, other_params = spec.partition(layers, others)
    spec.layers.check_params("trained layers", layer_params.trained)
    check_differentiable("layers", layer_params.trained)
    check_differentiable("others", other_params.trained)
    spec = spec.with_paths(layer_params.trained, other_params.trained)

    # The first step overwrites the state. Copy what the caller or tx still owns, such as the key
    # of tx; arrays in host memory are too large for that.
    copy = functools.partial(jax.tree.map, functools.partial(jnp.array, copy=True))
    owners = _owners(others, layers)
    if spec.others_in == "host":
        check_no_shared("others", others)
        check_selects(spec.update_rows, [other_params.trained])
        others_state = init_rows(spec.others_tx, other_params.trained, owners, spec.update_rows)
    else:
        others_state = copy(spec.others_tx.init(other_params.trained))
        if has_places(owners):
            places = place_state(others_state, owners)
            others_state = jax.tree.map(_shard, others_state, places)
        others = copy(others)
    layers_state = spec.layers.init(layer_params.trained)
    loss_scale = ()
    if spec.loss_scale is not None:
        loss_scale = LossScale(jnp.float32(spec.loss_scale), jnp.int32(0))
    grad_norm = ()
    if spec.keeps_grad_norm:
        grad_norm = zero_squares((layer_params.trained, other_params.trained))
    return OffloadState(
        layers, others, layers_state, others_state, copy(model_state), loss_scale, grad_norm
    )


def _shard(a: jax.Array, sharding: Any) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(a, sharding)
    # With several processes of one device each, device_put returns arrays that cannot be read.
    return jax.jit(lambda a: a, out_shardings=sharding)(a)


def check_state(spec: StateSpec, state: OffloadState) -> tuple[StateSpec, Partition, Partition]:
    """Check a state; return (spec with the paths of all parameters, layers, others)."""
    spec.layers.check_params("state.layers", state.layers)
    check_space("state.others", state.others, spec.others_in)
    layers, others = spec.partition(state.layers, state.others)
    check_differentiable("state.layers", layers.trained)
    check_differentiable("state.others", others.trained)
    spec = spec.with_paths(layers.trained, others.trained)
    spec.layers.check_state("state.layers_state", state.layers_state, layers.trained)
    others_state = jax.eval_shape(spec.others_tx.init, others.trained)
    check_same_shapes("state.others_state", state.others_state, "the result of init", others_state)
    expected = () if spec.loss_scale is None else LossScale(jnp.zeros(()), jnp.zeros(()))
    check_same_shapes("state.loss_scale", state.loss_scale, "the result of init", expected)
    expected = jnp.zeros(()) if spec.keeps_grad_norm else ()
    check_same_shapes("state.grad_norm", state.grad_norm, "the result of init", expected)
    return spec, layers, others


def check_no_shared(name: str, tree: Tree) -> None:
    """Raise ValueError if an array occurs twice."""
    # An array in two places would be updated twice, from two gradients.
    names: dict[int, str] = {}
    for path, a in jax.tree_util.tree_leaves_with_path(tree):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if (other := names.setdefault(id(a), place)) != place:
            remedy = ", or differentiate offload_sequential, which adds the gradients"
            raise ValueError(
                f"`{other}` and `{place}` are the same array, which a step would update twice. "
                f"Copy it{remedy if name == 'layers' else ''}."
            )
