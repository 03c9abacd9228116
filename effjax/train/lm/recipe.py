"""The model, the schedule, the optimizer and the step that the options of a run describe; no text
is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...models import TransformerLM, scan_layers
from ...models.nnx.transformer import ApplyLayers, Layer
from ...ops.offload.trees import partition
from ..mesh import FSDP, AnyMesh
from .config import LMConfig
from .lora import ADAPTERS, trainable
from .offloaded import (
    OffloadedState,
    apply_offloaded,
    in_slices,
    initial_offloaded_state,
    offloaded_step,
    shardings_of,
)
from .steps import LMState, gathering, lm_step

WARMUP, LOWEST = 0.1, 0.1  # shares of the steps, of the rate
B2 = 0.95  # Adam's: a byte of a text is a noisy example


@dataclasses.dataclass(frozen=True, eq=False)
class LMLearner:
    """What learns: a model, how its layers are applied, and an optimizer."""

    config: LMConfig
    model: TransformerLM  # abstract: shapes, no arrays
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[int], Any]
    apply_layers: ApplyLayers
    apply_layers_in_test: ApplyLayers
    mesh: AnyMesh | None  # over which parameters are split, if they are

    @property
    def graphdef(self) -> nnx.GraphDef:
        return nnx.graphdef(self.model)

    @property
    def num_params(self) -> int:
        return _size(nnx.state(self.model, nnx.Param))

    @property
    def num_trained(self) -> int:
        params = nnx.to_pure_dict(nnx.state(self.model, nnx.Param))
        return _size(partition("trainable", trainable(self.config), params).trained)


def make_learner(config: LMConfig, mesh: AnyMesh | None = None) -> LMLearner:
    """As the options have it; nothing is computed."""
    mesh = mesh if mesh is not None and FSDP in mesh.shape else None
    schedule = make_lm_schedule(config.learning_rate, config.steps)
    optimizer = make_lm_optimizer(schedule, config.weight_decay)
    model = nnx.eval_shape(lambda: build(config))
    if config.offload == "none":
        apply = in_test = _scan(config.remat, mesh)
    else:
        apply = apply_offloaded(config, config.num_microbatches, mesh)
        in_test = apply_offloaded(config, mesh=mesh)
    return LMLearner(config, model, optimizer, schedule, apply, in_test, mesh)


def _scan(remat: bool, mesh: AnyMesh | None) -> ApplyLayers:
    def apply(layer: Layer, *args: Any) -> jax.Array:
        return scan_layers(gathering(layer, mesh), *args, remat=remat)

    return apply


def build(config: LMConfig) -> TransformerLM:
    """The model of bytes, with the parameters that the seed draws."""
    return TransformerLM(
        vocab_size=256, num_layers=config.layers, width=config.width, num_heads=config.heads,
        use_bias=config.bias, dropout_rate=config.dropout, lora_rank=config.lora,
        dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed),
    )  # fmt: skip


def initial_state(learner: LMLearner, mesh: AnyMesh) -> LMState | OffloadedState:
    """Parameters drawn from the seed, and the optimizer's first state."""
    config, optimizer = learner.config, learner.optimizer

    def params() -> Any:
        return nnx.to_pure_dict(nnx.state(build(config), nnx.Param))

    if in_slices(config):
        return initial_offloaded_state(config, learner.model, optimizer, params, mesh)

    def init() -> LMState:
        made = params()
        trained = partition("trainable", trainable(config), made).trained
        return LMState(jnp.int32(0), made, optimizer.init(trained))

    where = shardings_of(config, jax.eval_shape(init), mesh)
    return jax.jit(init, out_shardings=where)()


def train_step(learner: LMLearner) -> Callable:
    """`(state, tokens, key) -> (state, loss)`, to be compiled."""
    if in_slices(learner.config):
        return offloaded_step(learner.config, learner.model, learner.optimizer, learner.mesh)
    how = learner.apply_layers, trainable(learner.config), learner.mesh, learner.config.on_nan
    return lm_step(learner.graphdef, learner.optimizer, *how)


def make_lm_schedule(learning_rate: float, steps: int) -> optax.Schedule:
    """From a tenth of the rate up to it over the first tenth of the steps, then cosine back."""
    warmup = max(round(WARMUP * steps), 1)
    return optax.warmup_cosine_decay_schedule(
        LOWEST * learning_rate, learning_rate, warmup, max(steps, warmup + 1),
        end_value=LOWEST * learning_rate,
    )  # fmt: skip


def make_lm_optimizer(
    schedule: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW; weight decay pulls on kernels and adapters only, not on norms, biases and the
    embedding.

    It works leaf by leaf.
    """
    decayed = "kernel", *ADAPTERS

    def is_decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[-1].key in decayed, params)

    return optax.adamw(schedule, b2=B2, weight_decay=weight_decay, mask=is_decayed)


def _size(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
