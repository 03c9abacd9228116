"""The loss of a language model, and training steps with its layers on the device or the host.

A model is split by `nnx.split` into a graphdef and `params`, nested dicts of arrays. The parameters
of the layers are stacked in ``params["blocks"]``; the others are all other entries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ... import OffloadState, offload_jit
from ...models import TransformerLM, scan_layers
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ...ops.offload.trees import Partition, partition
from ..finite import OnNan, skip_nonfinite
from ..mesh import AnyMesh, Array, batch_sharding, gather_params


class LMState(NamedTuple):
    """State of a model in device memory."""

    step: Array  # int32 []
    params: Params
    opt_state: optax.OptState  # of the trainable parameters

    def with_params(self, params: Params) -> "LMState":
        """Return the state with other parameters."""
        return self._replace(params=params)


class OffloadedState(NamedTuple):
    """State of a model whose layers are updated in slices, on the host or the device."""

    step: Array  # int32 []
    model: OffloadState

    @property
    def params(self) -> Params:
        """The parameters, in the form of `LMState`."""
        return {**self.model.others, "blocks": self.model.layers}

    def with_params(self, params: Params) -> "OffloadedState":
        """Return the state with other parameters."""
        model = self.model._replace(layers=params["blocks"], others=without_blocks(params))
        return self._replace(model=model)


class LMFunctions(NamedTuple):
    """The loss as ``head(others, layers(embed(others, tokens, key)), tokens, key)``.

    `layers` applies `layer` with each slice of ``params["blocks"]`` in turn.
    """

    embed: Callable  # (others, tokens, key) -> x
    layer: Layer  # (params, x, key) -> x
    head: Callable  # (others, x, tokens, key) -> loss


def without_blocks(params: Params) -> Params:
    """Return the parameters apart from those of the layers."""
    return {name: value for name, value in params.items() if name != "blocks"}


def gather_others(params: Params, mesh: AnyMesh | None) -> Params:
    """Gather all parameters but those of the layers, which are gathered one layer at a time."""
    if mesh is None:
        return params
    return {**gather_params(without_blocks(params), mesh), "blocks": params["blocks"]}


def gather_layer(layer: Layer, mesh: AnyMesh | None) -> Layer:
    """Return the layer as a function of sharded parameters."""
    return (
        layer if mesh is None else lambda params, *rest: layer(gather_params(params, mesh), *rest)
    )


def window_losses(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    key: jax.Array | None,
    apply_layers: ApplyLayers = scan_layers,
) -> jax.Array:
    """Return the mean cross entropy of each window of tokens.

    Args:
        graphdef: From `nnx.split` of a `TransformerLM`.
        params: Its parameters.
        tokens: Integers [N, T + 1]. Each of the last T is predicted from those before it.
        key: Of dropout; None turns it off.
        apply_layers: An argument of `TransformerLM`.

    Returns:
        [N], in nats.
    """
    model: Any = nnx.merge(graphdef, params)
    x = model.features(tokens[:, :-1], key=key, apply_layers=apply_layers)
    return jnp.mean(model.losses(x, tokens[:, 1:]), axis=-1)


def lm_loss(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    key: jax.Array | None,
    apply_layers: ApplyLayers = scan_layers,
) -> jax.Array:
    """Return the mean of `window_losses`."""
    return jnp.mean(window_losses(graphdef, params, tokens, key, apply_layers))


def split_loss(model: TransformerLM, mesh: AnyMesh | None = None) -> LMFunctions:
    """Split `lm_loss` into functions, for steps that apply the layers themselves.

    Args:
        model: Concrete or abstract.
        mesh: The mesh that the parameters are sharded over, if they are.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model))
    abstract_blocks = {"blocks": nnx.to_pure_dict(params)["blocks"]}

    def merge(others: Params) -> Any:
        return nnx.merge(graphdef, gather_others(others | abstract_blocks, mesh))

    return LMFunctions(
        lambda others, tokens, key: merge(others).embed(tokens[:, :-1]),
        gather_layer(model.layer, mesh),
        lambda others, x, tokens, key: jnp.mean(merge(others).losses(x, tokens[:, 1:])),
    )


def lm_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    apply_layers: ApplyLayers = scan_layers,
    trainable: Any = True,
    mesh: AnyMesh | None = None,
    on_nan: OnNan = "stop",
) -> Callable:
    """Return a training step for `LMState`, ``(state, tokens, key) -> (state, loss)``.

    Args:
        graphdef: From `nnx.split` of a `TransformerLM`.
        optimizer: Updates the trainable parameters.
        apply_layers: An argument of `TransformerLM`.
        trainable: An argument of `offload_train_step`, for all parameters.
        mesh: The mesh that the parameters are sharded over, if they are.
        on_nan: An argument of `finite.skip_nonfinite`.
    """

    def step(state: LMState, tokens: Array, key: jax.Array) -> tuple[LMState, jax.Array]:
        key = jax.random.fold_in(key, state.step)
        trained, frozen = partition("trainable", trainable, state.params)

        def loss_of(trained: Params) -> jax.Array:
            params = gather_others(Partition(trained, frozen).merge(), mesh)
            return lm_loss(graphdef, params, tokens, key, apply_layers)

        loss, grads = jax.value_and_grad(loss_of)(trained)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        new = LMState(state.step + 1, Partition(trained, frozen).merge(), opt_state)
        return skip_nonfinite(on_nan, new, state, loss, grads)

    return step


def offloaded_step(train_step: Callable) -> Callable:
    """Return a training step for `OffloadedState`, ``(state, tokens, key) -> (state, loss)``.

    Args:
        train_step: From `offload_train_step`.
    """

    def step(
        state: OffloadedState, tokens: Array, key: jax.Array
    ) -> tuple[OffloadedState, jax.Array]:
        model, loss = train_step(state.model, tokens, jax.random.fold_in(key, state.step))
        return OffloadedState(state.step + 1, model), loss

    return step


def compile_lm_step(step: Callable, mesh: Mesh) -> Callable:
    """Compile ``(state, tokens, key) -> (state, loss)``, with the tokens sharded over the mesh.

    Each array of the state keeps its sharding and its memory. The state is donated.
    """
    compiled, rows = offload_jit(step), batch_sharding(mesh)
    return lambda state, tokens, key: compiled(state, jax.device_put(tokens, rows), key)


def make_lm_eval_step(
    graphdef: nnx.GraphDef, mesh: Mesh, apply_layers: ApplyLayers = scan_layers
) -> Callable[[Params, Array, Array], jax.Array]:
    """Compile ``(params, tokens, weights) -> sum``, the weighted sum of the window losses."""
    rows = batch_sharding(mesh)

    def step(params: Params, tokens: Array, weights: Array) -> jax.Array:
        params = gather_others(params, mesh)
        return jnp.sum(window_losses(graphdef, params, tokens, None, apply_layers) * weights)

    compiled = offload_jit(step, donate=False)
    return lambda params, *batch: compiled(params, *jax.device_put(batch, rows))
