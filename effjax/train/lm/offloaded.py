"""Training with layers that are updated a slice at a time, on the host or on the device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ... import OffloadState, host_init, offload_scan, offload_train_step
from ...models import TransformerLM
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ..mesh import AnyMesh, Array, sharding_of
from ..mesh import shardings_of as split
from .config import LMConfig
from .lora import trainable
from .steps import LMState, gathering, lm_parts


class OffloadedState(NamedTuple):
    """`LMState` of layers that are updated in slices."""

    step: Array  # int32 []
    model: OffloadState

    @property
    def params(self) -> Params:
        return {**self.model.others, "blocks": self.model.layers}

    def with_params(self, params: Params) -> "OffloadedState":
        others = {name: value for name, value in params.items() if name != "blocks"}
        return self._replace(model=self.model._replace(layers=params["blocks"], others=others))


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


def apply_offloaded(
    config: LMConfig, num_microbatches: int = 1, mesh: AnyMesh | None = None
) -> ApplyLayers:
    """`scan_layers` for what the options leave on the device."""

    def apply(layer: Layer, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return offload_scan(
            gathering(layer, mesh), params, x, key=key, num_microbatches=num_microbatches,
            policy=POLICIES[config.policy], trainable=trainable(config), **_places(config),
        )  # fmt: skip

    return apply


def initial_offloaded_state(
    config: LMConfig,
    model: TransformerLM,
    optimizer: optax.GradientTransformation,
    all_params: Callable[[], Params],
    mesh: AnyMesh,
) -> OffloadedState:
    """The parameters that `all_params` makes at once; those on the host layer by layer."""

    def made(part: Callable[[Params], Params], stacked: bool) -> tuple[Any, Any]:
        """A function that makes a part of the parameters, and where they lie."""
        make = lambda: part(all_params())  # noqa: E731
        return make, split(jax.eval_shape(make), mesh, stacked)

    blocks, where = made(lambda params: params["blocks"], stacked=True)
    if _places(config)["params_in"] == "host":
        keys = model.layer_keys(nnx.Rngs(config.seed).params())
        layers = host_init(model.init_layer, keys, shardings=where)
    else:
        layers = jax.jit(blocks, out_shardings=where)()
    others, where = made(lambda params: {k: v for k, v in params.items() if k != "blocks"}, False)
    init, _ = _train_step(config, model, optimizer, mesh)
    return OffloadedState(jnp.int32(0), init(layers, jax.jit(others, out_shardings=where)()))


def offloaded_step(
    config: LMConfig,
    model: TransformerLM,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh | None = None,
) -> Callable:
    """`(state, tokens, key) -> (state, loss)`."""
    _, train_step = _train_step(config, model, optimizer, mesh)

    def step(state: OffloadedState, tokens: Array, key: jax.Array):
        new, loss = train_step(state.model, tokens, jax.random.fold_in(key, state.step))
        return OffloadedState(state.step + 1, new), loss

    return step


def _train_step(
    config: LMConfig,
    model: TransformerLM,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh | None,
) -> Any:
    parts = lm_parts(model, mesh)
    return offload_train_step(
        parts.embed, parts.layer, parts.head, optimizer,
        fuse_update=config.fuse_update, num_microbatches=config.num_microbatches,
        skip_nonfinite=config.on_nan == "skip",
        policy=POLICIES[config.policy], trainable=trainable(config),
        trainable_others=trainable(config), **_places(config),
    )  # fmt: skip


def shardings_of(config: LMConfig, state: LMState | OffloadedState, mesh: AnyMesh) -> Any:
    """Where the state lies: whole on each device or split over `fsdp`, layers and their moments on
    the host if they are offloaded."""
    on_host = isinstance(state, OffloadedState) and _places(config)["params_in"] == "host"

    def place(path: Any, a: Any) -> Any:
        names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
        stacked = bool(names & {"blocks", "layers", "layers_state"})
        to = sharding_of(a.shape, mesh, stacked)
        moves = "layers" in names or "layers_state" in names and a.ndim > 1
        return to.with_memory_kind("pinned_host") if on_host and moves else to

    return jax.tree.map_with_path(place, state)
