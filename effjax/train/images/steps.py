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
the new state over the old one. With `jit` alone, parameters and the optimizer's state can be split
over the axis `fsdp` of the mesh: parameters are gathered once a step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..finite import OnNan, skip_nonfinite
from ..mesh import AXIS, AnyMesh, Array, by_batch, gathered, shardings_of, whole
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
    on_nan: OnNan = "stop"  # as for `skip_nonfinite`

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

    def update(
        self, state: TrainState, grads: nnx.State, stats: nnx.State, loss: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """The optimizer's step, and the loss."""
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, stats, opt_state)
        return skip_nonfinite(self.on_nan, new, state, loss, grads)


def first_state(
    params: nnx.State, stats: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """Before the first step."""
    return TrainState(jnp.int32(0), params, stats, optimizer.init(params))


def initial_state(
    build: Callable[..., nnx.Module], optimizer: optax.GradientTransformation, seed: int,
    mesh: AnyMesh | None = None,
) -> TrainState:  # fmt: skip
    """Parameters drawn from the seed, and the optimizer's first state; on a mesh, each array is
    made where it lies."""

    def init() -> TrainState:
        _, params, stats = nnx.split(build(rngs=nnx.Rngs(seed)), nnx.Param, ...)
        return first_state(params, stats, optimizer)

    if mesh is None:
        return jax.jit(init)()
    return jax.jit(init, out_shardings=state_shardings(jax.eval_shape(init), mesh))()


TrainStep = Callable[[TrainState, Batch, jax.Array], tuple[TrainState, StepMetrics]]


def state_shardings(state: TrainState, mesh: AnyMesh) -> TrainState:
    """Where the state lies, or one of its shapes."""
    split = shardings_of(state, mesh)
    return split._replace(step=whole(mesh), stats=jax.tree.map(lambda _: whole(mesh), state.stats))


def make_train_step(
    parallel: Parallel, learner: Learner, mesh: Mesh, shardings: Any = None
) -> TrainStep:
    """Compiles `(state, batch, key) -> (state, metrics)` for the devices of `mesh`.

    `shardings` are those of the state, from `state_shardings`; default: it is whole on each device.

    The batch is the whole one, of a size that the number of devices divides. `state` is donated.
    Dropout differs from step to step, and from device to device; so with dropout, and only then,
    the three ways draw different masks.
    """
    makers = {
        "jit": functools.partial(jit_step, shardings=shardings),
        "shard_map": _shard_map_step,
        "pmap": _pmap_step,
    }
    if parallel not in makers:
        raise ValueError(f"parallel (={parallel!r}) must be one of {', '.join(makers)}.")
    return makers[parallel](learner, mesh)


def jit_step(learner: Learner, mesh: AnyMesh, shardings: Any = None) -> Any:
    """The code of one device; the shardings of its arguments make it the code of many."""

    def loss(params: nnx.State, *rest: Any) -> Any:
        return learner.loss(gathered(params, mesh), *rest)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        (value, (stats, correct)), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.stats, batch, key
        )
        new, value = learner.update(state, grads, stats, value)
        return new, StepMetrics(value, correct)

    state = whole(mesh) if shardings is None else shardings
    return jax.jit(
        step,
        in_shardings=(state, by_batch(mesh), whole(mesh)),
        out_shardings=(state, whole(mesh)),
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
        new, loss = learner.update(state, grads, stats, loss)
        return new, StepMetrics(loss, lax.psum(correct, AXIS))

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
        new, loss = learner.update(state, grads, stats, lax.pmean(loss, AXIS))
        return new, StepMetrics(loss, lax.psum(correct, AXIS))

    devices = list(mesh.devices.flat)
    mapped = jax.pmap(
        step, AXIS, in_axes=(None, 0, None), out_axes=None, devices=devices, donate_argnums=0
    )

    here = sum(device.process_index == jax.process_index() for device in devices)

    def over_devices(state: TrainState, batch: Batch, key: jax.Array) -> Any:
        """A batch is what this process has of it."""
        parts = [a.reshape(here, -1, *a.shape[1:]) for a in batch]
        return jax.tree.map(over_processes, mapped(state, Batch(*parts), key))

    def over_processes(a: jax.Array) -> jax.Array:
        """The same array as one of all processes; `pmap` gives each its own."""
        copies = [shard.data for shard in a.addressable_shards]
        return jax.make_array_from_single_device_arrays(a.shape, whole(mesh), copies)

    return over_devices


def make_eval_step(
    learner: Learner, mesh: Mesh, shardings: Any = None
) -> Callable[[TrainState, Batch, Array], EvalSums]:
    """Compiles `(state, batch, weights) -> sums` over the batch, sharded over `mesh`.

    Evaluation normalizes by the running statistics, so devices have nothing to exchange but the
    sums, and `jit` serves all three ways to train. `weights` [N] is 1 for an image and 0 for the
    padding of a last batch.
    """

    def step(state: TrainState, batch: Batch, weights: jax.Array) -> EvalSums:
        model = nnx.merge(learner.eval_graphdef, gathered(state.params, mesh), state.stats)
        logits = model(learner.inputs(batch.images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        right = jnp.argmax(logits, axis=-1) == batch.labels
        return EvalSums(jnp.sum(losses * weights), jnp.sum(right * weights))

    state, rows = whole(mesh) if shardings is None else shardings, by_batch(mesh)
    return jax.jit(step, in_shardings=(state, rows, rows), out_shardings=whole(mesh))
