"""The loss of a language model, and one training step around it.

The model is taken apart (`nnx.split`) into a graphdef and `params`, nested dicts of arrays; those
of the layers are stacked in ``params["blocks"]``. What applies the layers is an argument.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ... import offload_jit
from ...models import TransformerLM, scan_layers
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ...ops.offload.trees import Partition, partition
from ..finite import OnNan, skip_nonfinite
from ..mesh import AnyMesh, Array, by_batch, gathered


class LMState(NamedTuple):
    step: Array  # int32 []
    params: Params
    opt_state: optax.OptState  # of what is trained

    def with_params(self, params: Params) -> "LMState":
        return self._replace(params=params)


def lm_loss(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    key: jax.Array | None,
    apply_layers: ApplyLayers = scan_layers,
) -> jax.Array:
    """Mean cross entropy in nats of `tokens[:, 1:]`, each given those before it.

    Args:
        tokens: integers [N, T + 1].
        key: of dropout; None: without.
        apply_layers: as of `TransformerLM`.
    """
    return jnp.mean(window_losses(graphdef, params, tokens, key, apply_layers))


def window_losses(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    key: jax.Array | None,
    apply_layers: ApplyLayers = scan_layers,
) -> jax.Array:
    """`lm_loss` of each window by itself: [N]."""
    model: Any = nnx.merge(graphdef, params)
    x = model.features(tokens[:, :-1], key=key, apply_layers=apply_layers)
    return jnp.mean(model.losses(x, tokens[:, 1:]), axis=-1)


class LMParts(NamedTuple):
    """The loss in three parts, ``head(others, layers(embed(others, tokens, key)), tokens, key)``.

    `layers` is `layer` applied to ``params["blocks"]``, and `others` are all other params.
    """

    embed: Callable  # (others, tokens, key) -> x
    layer: Layer  # (params, x, key) -> x
    head: Callable  # (others, x, tokens, key) -> loss


def gathered_others(params: Params, mesh: AnyMesh | None) -> Params:
    """All but the layers whole on each device, to compute with."""
    if mesh is None:
        return params
    others = {name: value for name, value in params.items() if name != "blocks"}
    return {**gathered(others, mesh), "blocks": params["blocks"]}


def gathering(layer: Layer, mesh: AnyMesh | None) -> Layer:
    """The layer, of parameters that are split over devices."""
    return layer if mesh is None else lambda params, *rest: layer(gathered(params, mesh), *rest)


def lm_parts(model: TransformerLM, mesh: AnyMesh | None = None) -> LMParts:
    """`lm_loss` of a model, which may be abstract, for steps that apply the layers themselves."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model))
    no_blocks = {"blocks": nnx.to_pure_dict(params)["blocks"]}  # their shapes only

    def rest(others: Params) -> Any:
        return nnx.merge(graphdef, gathered_others(others | no_blocks, mesh))

    return LMParts(
        lambda others, tokens, key: rest(others).embed(tokens[:, :-1]),
        gathering(model.layer, mesh),
        lambda others, x, tokens, key: jnp.mean(rest(others).losses(x, tokens[:, 1:])),
    )


def make_lm_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    apply_layers: ApplyLayers = scan_layers,
) -> Callable[[LMState, Array, jax.Array], tuple[LMState, jax.Array]]:
    """Compiles `(state, tokens, key) -> (state, loss)`, the tokens sharded over the mesh.

    `state` stays where it is, and is donated. Dropout differs from step to step.
    """
    return compile_lm_step(lm_step(graphdef, optimizer, apply_layers, mesh=mesh), mesh)


def compile_lm_step(step: Callable, mesh: Mesh) -> Callable:
    """For any `(state, tokens, key) -> (state, loss)`; the state stays where it is."""
    compiled, rows = offload_jit(step), by_batch(mesh)
    return lambda state, tokens, key: compiled(state, jax.device_put(tokens, rows), key)


def lm_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    apply_layers: ApplyLayers = scan_layers,
    trainable: Any = True,
    mesh: AnyMesh | None = None,
    on_nan: OnNan = "stop",
) -> Callable:
    """`make_lm_step` before it is compiled; `trainable` is as of `offload_train_step`, and `on_nan`
    as of `finite.skip_nonfinite`."""

    def step(state: LMState, tokens: Array, key: jax.Array) -> tuple[LMState, jax.Array]:
        key = jax.random.fold_in(key, state.step)
        trained, frozen = partition("trainable", trainable, state.params)

        def loss_of(trained: Params) -> jax.Array:
            params = gathered_others(Partition(trained, frozen).merge(), mesh)
            return lm_loss(graphdef, params, tokens, key, apply_layers)

        loss, grads = jax.value_and_grad(loss_of)(trained)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        new = LMState(state.step + 1, Partition(trained, frozen).merge(), opt_state)
        return skip_nonfinite(on_nan, new, state, loss, grads)

    return step


def make_lm_eval_step(
    graphdef: nnx.GraphDef, mesh: Mesh, apply_layers: ApplyLayers = scan_layers
) -> Callable[[Params, Array, Array], jax.Array]:
    """Compiles `(params, tokens, weights) -> sum` of the losses of the windows, times `weights`."""
    rows = by_batch(mesh)

    def step(params: Params, tokens: Array, weights: Array) -> jax.Array:
        params = gathered_others(params, mesh)
        return jnp.sum(window_losses(graphdef, params, tokens, None, apply_layers) * weights)

    compiled = offload_jit(step, donate=False)
    return lambda params, *batch: compiled(params, *jax.device_put(batch, rows))
