"""Training with layers that are updated a slice at a time, on the host or on the device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ... import OffloadState, host_init, offload_scan, offload_train_step
from ...models import TransformerLM
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ..mesh import Array
from .config import LMConfig
from .steps import LMState, lm_parts


class OffloadedState(NamedTuple):
    """`LMState` of layers that are updated in slices."""

    step: Array  # int32 []
    model: OffloadState

    @property
    def params(self) -> Params:
        return {**self.model.others, "blocks": self.model.layers}


POLICIES: dict[str, Any] = {
    "recompute": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


def in_slices(config: LMConfig) -> bool:
    """Whether the layers are updated a slice at a time."""
    return config.fuse_update or _places(config)["params_in"] == "host"


def _places(config: LMConfig) -> dict[str, Any]:
    """Where parameters and activations live."""
    on_host = {"params_in": ("params", "all"), "activations": ("activations", "all")}
    return {name: "host" if config.offload in of else "device" for name, of in on_host.items()}


def apply_offloaded(config: LMConfig, num_microbatches: int = 1) -> ApplyLayers:
    """`scan_layers` for what the options leave on the device."""

    def apply(layer: Layer, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return offload_scan(
            layer, params, x, key=key, num_microbatches=num_microbatches,
            policy=POLICIES[config.policy], **_places(config),
        )  # fmt: skip

    return apply


def initial_offloaded_state(
    config: LMConfig,
    model: TransformerLM,
    optimizer: optax.GradientTransformation,
    all_params: Callable[[], Params],
    mesh: Mesh,
) -> OffloadedState:
    """The parameters that `all_params` makes at once; those on the host layer by layer."""
    replicated = NamedSharding(mesh, P())

    def others() -> Params:
        return {name: value for name, value in all_params().items() if name != "blocks"}

    if _places(config)["params_in"] == "host":
        keys = model.layer_keys(nnx.Rngs(config.seed).params())
        layers = host_init(model.init_layer, keys, shardings=replicated)
    else:
        layers = jax.jit(lambda: all_params()["blocks"], out_shardings=replicated)()
    init, _ = _train_step(config, model, optimizer)
    return OffloadedState(jnp.int32(0), init(layers, jax.jit(others, out_shardings=replicated)()))


def offloaded_step(
    config: LMConfig, model: TransformerLM, optimizer: optax.GradientTransformation
) -> Callable:
    """`(state, tokens, key) -> (state, loss)`."""
    _, train_step = _train_step(config, model, optimizer)

    def step(state: OffloadedState, tokens: Array, key: jax.Array):
        new, loss = train_step(state.model, tokens, jax.random.fold_in(key, state.step))
        return OffloadedState(state.step + 1, new), loss

    return step


def _train_step(
    config: LMConfig, model: TransformerLM, optimizer: optax.GradientTransformation
) -> Any:
    parts = lm_parts(model)
    return offload_train_step(
        parts.embed, parts.layer, parts.head, optimizer,
        fuse_update=config.fuse_update, num_microbatches=config.num_microbatches,
        policy=POLICIES[config.policy], **_places(config),
    )  # fmt: skip


def shardings_of(config: LMConfig, state: LMState | OffloadedState, mesh: Any) -> Any:
    """Replicated, layers and their moments on the host if they are offloaded."""
    device = NamedSharding(mesh, P())
    host = device.with_memory_kind("pinned_host")
    found: Any = jax.tree.map(lambda _: device, state)
    if isinstance(state, OffloadedState) and _places(config)["params_in"] == "host":
        on_host: Any = jax.tree.map(lambda a: host if a.ndim > 1 else device, state.model)
        layers = jax.tree.map(lambda _: host, state.model.layers)
        model = found.model._replace(layers=layers, layers_state=on_host.layers_state)
        found = found._replace(model=model)
    return found
