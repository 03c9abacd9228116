"""The model, the optimizer and the training steps of a run on text. No text is read.

A model is split by `nnx.split` into a graphdef and `params`, nested dicts of arrays. The parameters
of the layers are stacked in ``params["blocks"]``. All other entries are called `others`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ... import OffloadState, host_init, offload_scan, offload_train_step
from ...models import TransformerLM, scan_layers
from ...models.nnx.transformer import ApplyLayers, Layer, Params
from ...ops.offload.trees import Partition, partition
from ..finite import skip_nonfinite
from ..mesh import FSDP, AnyMesh, Array, gather_params, param_sharding, param_shardings
from .config import LMConfig

WARMUP = 0.1  # share of the steps
LOWEST = 0.1  # share of the learning rate, at the start and at the end
B2 = 0.95  # of Adam, for the noisy gradients of single bytes
ADAPTERS = "lora_a", "lora_b"  # names of the parameters that `lora` trains
POLICIES: dict[str, Any] = {
    "recompute": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


class LMState(NamedTuple):
    """State of a model in device memory."""

    step: Array  # int32 []
    params: Params
    opt_state: optax.OptState  # of the trainable parameters

    def with_params(self, params: Params) -> "LMState":
        """Return the state with other parameters."""
        return self._replace(params=params)


class OffloadedState(NamedTuple):
    """State of a model whose layers are updated one at a time, on the host or the device."""

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


def is_adapter(path: Any, leaf: Any) -> bool:
    """Return True if the path of a parameter is that of an adapter."""
    return path[-1].key in ADAPTERS


def build(config: LMConfig) -> TransformerLM:
    """Create a model of bytes, with parameters drawn from the seed."""
    return TransformerLM(
        vocab_size=256, num_layers=config.layers, width=config.width, num_heads=config.heads,
        use_bias=config.bias, dropout_rate=config.dropout, lora_rank=config.lora,
        dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed),
    )  # fmt: skip


def make_lm_schedule(learning_rate: float, steps: int) -> optax.Schedule:
    """Return a schedule with linear warmup over a tenth of the steps, and cosine decay.

    It starts and ends at a tenth of `learning_rate`.
    """
    warmup = max(round(WARMUP * steps), 1)
    return optax.warmup_cosine_decay_schedule(
        LOWEST * learning_rate, learning_rate, warmup, max(steps, warmup + 1),
        end_value=LOWEST * learning_rate,
    )  # fmt: skip


def make_lm_optimizer(
    schedule: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    """Return AdamW with weight decay on kernels and adapters only.

    Norms, biases and the embedding are not decayed. The updates of one parameter depend on no
    other, so layers can be updated one at a time.
    """
    decayed = "kernel", *ADAPTERS

    def is_decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[-1].key in decayed, params)

    return optax.adamw(schedule, b2=B2, weight_decay=weight_decay, mask=is_decayed)


@dataclasses.dataclass(frozen=True, eq=False)
class LMLearner:
    """A model and its optimizer, and the training step that the configuration asks for.

    Attributes:
        config: The options of the run.
        model: Abstract: shapes and no arrays.
        optimizer: The optimizer.
        mesh: The mesh that the parameters are sharded over, or None if they are replicated.
    """

    config: LMConfig
    model: TransformerLM
    optimizer: optax.GradientTransformation
    mesh: AnyMesh | None

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return nnx.graphdef(self.model)

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return _count(nnx.state(self.model, nnx.Param))

    @property
    def num_trained(self) -> int:
        """The number of trainable parameters."""
        params = nnx.to_pure_dict(nnx.state(self.model, nnx.Param))
        return _count(partition(self.trainable, params).trained)

    @property
    def trainable(self) -> Any:
        """Which parameters are trained, as an argument of `offload_train_step`."""
        return True if self.config.lora is None else is_adapter

    @property
    def params_on_host(self) -> bool:
        """True if the parameters of the layers live in host memory."""
        return self.config.offload in ("params", "all")

    @property
    def updates_by_layer(self) -> bool:
        """True if the layers are updated one at a time, with the state `OffloadedState`."""
        return self.config.fuse_update or self.params_on_host

    def apply_layers(self, num_microbatches: int) -> ApplyLayers:
        """Return a function that applies the layers, where the configuration puts them."""
        config, mesh = self.config, self.mesh

        def scan(layer: Layer, *args: Any) -> jax.Array:
            return scan_layers(gather_layer(layer, mesh), *args, remat=config.remat)

        def scan_offloaded(
            layer: Layer, params: Params, x: jax.Array, key: jax.Array | None
        ) -> jax.Array:
            return offload_scan(
                gather_layer(layer, mesh), params, x, key=key, num_microbatches=num_microbatches,
                policy=POLICIES[config.policy], trainable=self.trainable, **self._places(),
            )  # fmt: skip

        return scan if config.offload == "none" else scan_offloaded

    def train_step(self) -> Callable:
        """Return the training step, ``(state, tokens, key) -> (state, loss)``, not compiled."""
        return self._step_by_layer() if self.updates_by_layer else self._step_at_once()

    def eval_step(self) -> Callable:
        """Return ``(params, tokens, weights) -> sum``, the weighted sum of the window losses."""
        graphdef, apply_layers = self.graphdef, self.apply_layers(num_microbatches=1)

        def step(params: Params, tokens: Array, weights: Array) -> jax.Array:
            params = gather_others(params, self.mesh)
            return jnp.sum(window_losses(graphdef, params, tokens, None, apply_layers) * weights)

        return step

    def initial_state(self, mesh: AnyMesh) -> LMState | OffloadedState:
        """Return the state before the first step, with parameters drawn from the seed."""
        if self.updates_by_layer:
            return self._initial_offloaded_state(mesh)

        def init() -> LMState:
            params = self._params()
            trained = partition(self.trainable, params).trained
            return LMState(jnp.int32(0), params, self.optimizer.init(trained))

        shardings = self.shardings(jax.eval_shape(init), mesh)
        return jax.jit(init, out_shardings=shardings)()

    def shardings(self, state: LMState | OffloadedState, mesh: AnyMesh) -> Any:
        """Return the sharding and the memory of each array of the state, or of its shapes."""

        def leaf_sharding(path: Any, leaf: Any) -> Any:
            names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
            is_layer = bool(names & {"blocks", "layers", "layers_state"})
            sharding = param_sharding(leaf.shape, mesh, is_layer)
            # Counts of the optimizer stay on the device.
            offloads = "layers" in names or ("layers_state" in names and leaf.ndim > 1)
            if self.params_on_host and offloads:
                return sharding.with_memory_kind("pinned_host")
            return sharding

        return jax.tree.map_with_path(leaf_sharding, state)

    def _params(self) -> Params:
        return nnx.to_pure_dict(nnx.state(build(self.config), nnx.Param))

    def _places(self) -> dict[str, Any]:
        activations_on_host = self.config.offload in ("activations", "all")
        return {
            "params_in": "host" if self.params_on_host else "device",
            "activations": "host" if activations_on_host else "device",
        }

    def _step_at_once(self) -> Callable:
        """Return the training step for `LMState`."""
        graphdef, mesh = self.graphdef, self.mesh
        apply_layers = self.apply_layers(self.config.num_microbatches)

        def step(state: LMState, tokens: Array, key: jax.Array) -> tuple[LMState, jax.Array]:
            key = jax.random.fold_in(key, state.step)
            trained, frozen = partition(self.trainable, state.params)

            def loss_of(trained: Params) -> jax.Array:
                params = gather_others(Partition(trained, frozen).merge(), mesh)
                return lm_loss(graphdef, params, tokens, key, apply_layers)

            loss, grads = jax.value_and_grad(loss_of)(trained)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
            trained = optax.apply_updates(trained, updates)
            new = LMState(state.step + 1, Partition(trained, frozen).merge(), opt_state)
            return skip_nonfinite(self.config.on_nan, new, state, loss, grads)

        return step

    def _step_by_layer(self) -> Callable:
        """Return the training step for `OffloadedState`."""
        _, train_step = self._offload_functions()

        def step(
            state: OffloadedState, tokens: Array, key: jax.Array
        ) -> tuple[OffloadedState, jax.Array]:
            model, loss = train_step(state.model, tokens, jax.random.fold_in(key, state.step))
            return OffloadedState(state.step + 1, model), loss

        return step

    def _offload_functions(self) -> tuple[Callable, Callable]:
        """Return `(init, step)` of `offload_train_step`."""
        functions, config = split_loss(self.model, self.mesh), self.config
        return offload_train_step(
            *functions, self.optimizer,
            fuse_update=config.fuse_update, num_microbatches=config.num_microbatches,
            skip_nonfinite=config.on_nan == "skip", policy=POLICIES[config.policy],
            trainable=self.trainable, trainable_others=self.trainable, **self._places(),
        )  # fmt: skip

    def _initial_offloaded_state(self, mesh: AnyMesh) -> OffloadedState:
        def blocks() -> Params:
            return self._params()["blocks"]

        def others() -> Params:
            return without_blocks(self._params())

        shardings = param_shardings(jax.eval_shape(blocks), mesh, stacked=True)
        if self.params_on_host:  # one layer at a time
            keys = self.model.layer_keys(nnx.Rngs(self.config.seed).params())
            layers = host_init(self.model.init_layer, keys, shardings=shardings)
        else:
            layers = jax.jit(blocks, out_shardings=shardings)()
        shardings = param_shardings(jax.eval_shape(others), mesh)
        init, _ = self._offload_functions()
        return OffloadedState(
            jnp.int32(0), init(layers, jax.jit(others, out_shardings=shardings)())
        )


def make_learner(config: LMConfig, mesh: AnyMesh) -> LMLearner:
    """Create the learner of a configuration. Nothing is computed."""
    schedule = make_lm_schedule(config.learning_rate, config.steps)
    optimizer = make_lm_optimizer(schedule, config.weight_decay)
    model = nnx.eval_shape(lambda: build(config))
    return LMLearner(config, model, optimizer, mesh if FSDP in mesh.shape else None)


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class LMFunctions(NamedTuple):
    """The loss as ``head(others, layers(embed(others, tokens, key)), tokens, key)``.

    `layers` applies `layer` with each slice of ``params["blocks"]`` in turn.
    """

    embed: Callable  # (others, tokens, key) -> x
    layer: Layer  # (params, x, key) -> x
    head: Callable  # (others, x, tokens, key) -> loss


def without_blocks(params: Params) -> Params:
    """Return the parameters without `blocks`."""
    return {name: value for name, value in params.items() if name != "blocks"}


def gather_others(params: Params, mesh: AnyMesh | None) -> Params:
    """Gather all parameters but those of the layers, which are gathered one layer at a time."""
    if mesh is None:
        return params
    return {**gather_params(without_blocks(params), mesh), "blocks": params["blocks"]}


def gather_layer(layer: Layer, mesh: AnyMesh | None) -> Layer:
    """Return the layer as a function of sharded parameters."""
    if mesh is None:
        return layer
    return lambda params, *rest: layer(gather_params(params, mesh), *rest)


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
        key: Dropout key. If None, dropout is disabled.
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
