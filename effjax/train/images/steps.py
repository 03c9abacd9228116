"""One training step on all devices, three ways, with batch norm over the whole batch.

Each takes the same state and the same batch to the same loss and the same new state. They differ in
what the function you write sees, and so in who reduces over the devices:

                 jit                    shard_map                     pmap
  it sees        the whole batch        its device's images, and      its device's images
                                        types that say what varies
  axis_name of   None: a mean over      "data"                        "data"
  the model      the batch is global
  loss           mean over the batch    pmean inside of grad          mean of its images
  gradient       complete               complete: the transpose of    pmean after grad
                                        the pmean is the reduction

Two mistakes that raise no error: a `pmean` of the loss inside of `grad` under `pmap` (gradients
are not reduced over devices), and a `pmean` of the gradients of a local loss under
`shard_map(check_vma=True)` (they are already summed, hence N times too large).

Parameters, running statistics and the optimizer's state are replicated, and donated: a step writes
the new state over the old one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import AXIS, Array, Devices, data_mesh
from .config import Parallel


class Batch(NamedTuple):
    images: Array  # uint8 [N, H, W, C]
    labels: Array  # int32 [N]


class TrainState(NamedTuple):
    step: Array  # int32 []
    params: nnx.State
    stats: nnx.State  # what is not trained: batch norm's running statistics
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    loss: jax.Array  # [], mean over the whole batch
    correct: jax.Array  # [], images of the whole batch classified right


class EvalSums(NamedTuple):
    loss: jax.Array  # [], sum over the images that count
    correct: jax.Array  # []


@dataclass(frozen=True, eq=False)
class Learner:
    """What learns: a model taken apart (`nnx.split`), an optimizer, the pixels' statistics."""

    graphdef: nnx.GraphDef  # of the model in training mode
    eval_graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    mean: np.ndarray  # [C]
    std: np.ndarray  # [C]

    def inputs(self, images: Array) -> jax.Array:
        """uint8 pixels to normalized float32."""
        scaled = jnp.asarray(images, jnp.float32) / 255
        return (scaled - self.mean.reshape(1, 1, 1, -1)) / self.std.reshape(1, 1, 1, -1)

    def loss(
        self, params: nnx.State, stats: nnx.State, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[nnx.State, jax.Array]]:
        """Mean cross entropy of `batch`, the new running statistics, and the right answers."""
        model = nnx.merge(self.graphdef, params, stats, copy=True)
        logits = model(self.inputs(batch.images), rngs=nnx.Rngs(dropout=key))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == batch.labels)
        _, _, stats = nnx.split(model, nnx.Param, ...)
        return jnp.mean(losses), (stats, correct)

    def update(self, state: TrainState, grads: nnx.State, stats: nnx.State) -> TrainState:
        """The optimizer's step."""
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(
            step=state.step + 1,
            params=params,
            stats=stats,
            opt_state=opt_state,
        )


def first_state(
    params: nnx.State, stats: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """Before the first step."""
    return TrainState(jnp.int32(0), params, stats, optimizer.init(params))


def initial_state(
    build: Callable[..., nnx.Module], optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Parameters drawn from the seed, and the optimizer's first state."""

    @jax.jit
    def init() -> TrainState:
        _, params, stats = nnx.split(build(rngs=nnx.Rngs(seed)), nnx.Param, ...)
        return first_state(params, stats, optimizer)

    return init()


TrainStep = Callable[[TrainState, Batch, jax.Array], tuple[TrainState, StepMetrics]]


def make_train_step(
    parallel: Parallel, learner: Learner, devices: Devices | None = None
) -> TrainStep:
    """Compiles `(state, batch, key) -> (state, metrics)` for `devices` (default: all local ones).

    The batch is the whole one, of a size that the number of devices divides. `state` is donated.
    Dropout differs from step to step, and from device to device; so with dropout, and only then,
    the three ways draw different masks.
    """
    makers = {"jit": jit_step, "shard_map": _shard_map_step, "pmap": _pmap_step}
    if parallel not in makers:
        raise ValueError(f"parallel (={parallel!r}) must be one of {', '.join(makers)}.")
    return makers[parallel](learner, data_mesh(devices))


def jit_step(learner: Learner, mesh: Mesh | AbstractMesh) -> Any:
    """The code of one device; the shardings of its arguments make it the code of many."""
    replicated, by_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        (loss, (stats, correct)), grads = jax.value_and_grad(learner.loss, has_aux=True)(
            state.params, state.stats, batch, key
        )
        return learner.update(state, grads, stats), StepMetrics(loss, correct)

    return jax.jit(
        step,
        in_shardings=(replicated, by_batch, replicated),
        out_shardings=replicated,
        donate_argnums=0,
    )


def _shard_map_step(learner: Learner, mesh: Mesh) -> TrainStep:
    """The code of one of many devices, with types that catch a forgotten reduction."""

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index(AXIS))

        def mean_loss(params: nnx.State) -> tuple[jax.Array, tuple[nnx.State, jax.Array]]:
            loss, aux = learner.loss(params, state.stats, batch, key)
            return lax.pmean(loss, AXIS), aux

        (loss, (stats, correct)), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        return learner.update(state, grads, stats), StepMetrics(loss, lax.psum(correct, AXIS))

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(), check_vma=True
    )
    return jax.jit(sharded, donate_argnums=0)


def _pmap_step(learner: Learner, mesh: Mesh) -> TrainStep:
    """The code of one of many devices, without those types: every reduction is yours."""

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index(AXIS))
        (loss, (stats, correct)), grads = jax.value_and_grad(learner.loss, has_aux=True)(
            state.params, state.stats, batch, key
        )
        grads = lax.pmean(grads, AXIS)
        metrics = StepMetrics(lax.pmean(loss, AXIS), lax.psum(correct, AXIS))
        return learner.update(state, grads, stats), metrics

    devices = list(mesh.devices.flat)
    mapped = jax.pmap(
        step, AXIS, in_axes=(None, 0, None), out_axes=None, devices=devices, donate_argnums=0
    )

    def over_devices(state: TrainState, batch: Batch, key: jax.Array) -> Any:
        parts = [a.reshape(len(devices), -1, *a.shape[1:]) for a in batch]
        return mapped(state, Batch(*parts), key)

    return over_devices


def make_eval_step(
    learner: Learner, devices: Devices | None = None
) -> Callable[[TrainState, Batch, Array], EvalSums]:
    """Compiles `(state, batch, weights) -> sums` over the batch, sharded over `devices`.

    Evaluation normalizes by the running statistics, so devices have nothing to exchange but the
    sums, and `jit` serves all three ways to train. `weights` [N] is 1 for an image and 0 for the
    padding of a last batch.
    """
    mesh = data_mesh(devices)
    replicated, by_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))

    def step(state: TrainState, batch: Batch, weights: jax.Array) -> EvalSums:
        model = nnx.merge(learner.eval_graphdef, state.params, state.stats)
        logits = model(learner.inputs(batch.images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        right = jnp.argmax(logits, axis=-1) == batch.labels
        return EvalSums(jnp.sum(losses * weights), jnp.sum(right * weights))

    return jax.jit(step, in_shardings=(replicated, by_batch, by_batch), out_shardings=replicated)
