"""Training with the layers and their optimizer's state in host memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ... import OffloadState, host_init, offload_scan, offload_train_step
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ..images.steps import Array
from .config import LMConfig
from .steps import LMState, lm_parts

if TYPE_CHECKING:
    from .job import LMJob


class OffloadedState(NamedTuple):
    """`LMState` of layers on the host."""

    step: Array  # int32 []
    model: OffloadState

    @property
    def params(self) -> Params:
        return {**self.model.others, "blocks": self.model.layers}


def layers_on_host(config: LMConfig) -> bool:
    return config.offload in ("params", "all")


def apply_offloaded(config: LMConfig, num_microbatches: int = 1) -> ApplyLayers:
    """`scan_layers` for what the options leave on the device."""

    def apply(layer: Layer, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return offload_scan(
            layer, params, x, key=key, num_microbatches=num_microbatches,
            params="host" if layers_on_host(config) else "device",
            activations="device" if config.offload == "params" else "host",
        )  # fmt: skip

    return apply


def initial_offloaded_state(job: "LMJob", mesh: Mesh) -> OffloadedState:
    """The parameters of `initial_state`, made layer by layer on the host."""
    from .job import build

    def others() -> Params:
        params = nnx.to_pure_dict(nnx.state(build(job.config), nnx.Param))
        return {name: value for name, value in params.items() if name != "blocks"}

    replicated = NamedSharding(mesh, P())
    keys = job.model.layer_keys(nnx.Rngs(job.config.seed).params())
    layers = host_init(job.model.init_layer, keys, shardings=replicated)
    init, _ = _train_step(job)
    model = init(layers, jax.jit(others, out_shardings=replicated)())
    return OffloadedState(jnp.int32(0), model)


def offloaded_step(job: "LMJob") -> Callable:
    """`(state, tokens, key) -> (state, loss)`."""
    _, train_step = _train_step(job)

    def step(state: OffloadedState, tokens: Array, key: jax.Array):
        model, loss = train_step(state.model, tokens, jax.random.fold_in(key, state.step))
        return OffloadedState(state.step + 1, model), loss

    return step


def _train_step(job: "LMJob") -> Any:
    config, parts = job.config, lm_parts(job.model)
    return offload_train_step(
        parts.embed, parts.layer, parts.head, job.optimizer,
        fuse_update=config.fuse_update, num_microbatches=config.num_microbatches,
        activations="device" if config.offload == "params" else "host",
    )  # fmt: skip


def shardings_of(state: LMState | OffloadedState, mesh: Any) -> Any:
    """Replicated, layers and their moments on the host if they are offloaded."""
    device = NamedSharding(mesh, P())
    host = device.with_memory_kind("pinned_host")
    found: Any = jax.tree.map(lambda _: device, state)
    if isinstance(state, OffloadedState):
        on_host: Any = jax.tree.map(lambda a: host if a.ndim > 1 else device, state.model)
        layers = jax.tree.map(lambda _: host, state.model.layers)
        model = found.model._replace(layers=layers, layers_state=on_host.layers_state)
        found = found._replace(model=model)
    return found
