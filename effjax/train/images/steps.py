"""The model, the optimizer and the training step of a run on images. No data are read.

A step runs on all devices in one of three ways, with batch norm over the whole batch. All three
compute the same loss and the same new state. They differ in what the traced function sees, and so
in where reductions over the devices happen:

                 jit                    shard_map                     pmap
  sees           the whole batch        the device's shard; types     the device's shard
                                        record the axes a value
                                        varies over
  axis_name of   None; reductions over  "data"                        "data"
  the model      the batch are already
                 global
  loss           mean over the batch    pmean inside of grad          mean of its images
  gradient       complete               complete: the transpose of    pmean after grad
                                        the pmean is the reduction

Two mistakes raise no error: a `pmean` of the loss inside of `grad` under `pmap` (gradients
are not reduced over devices), and a `pmean` of the gradients of a local loss under
`shard_map(check_vma=True)` (they are already summed, hence N times too large).

Parameters, running statistics and optimizer state are replicated, and donated: a step overwrites
the old state. With `jit`, parameters and optimizer state can be sharded over the axis `fsdp` of the
mesh; parameters are then gathered once per step.
"""

from collections.abc import Callable, Sequence
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

from ...models import DenseNet, ResNet, densenet_cifar
from ...models.densenet import DENSENET_OPTIONS
from ...models.resnet import RESNET_OPTIONS
from ..errors import TrainError
from ..mesh import AXIS, AnyMesh, Array, batch_sharding, gather_params, param_shardings, replicated
from ..task import TrainStep
from .config import DenseNetRunConfig, ImageConfig, Parallel, ResNetRunConfig

DEFAULT_DEPTH = 22  # of densenet-bc
SMALL_IMAGE = 64  # the largest side that gets a stem without pooling
RESNET8: dict[str, Any] = dict(stage_sizes=(1, 1, 1), bottleneck=False, width=16)


def model_builder(
    config: ImageConfig, image_shape: tuple[int, int, int], num_classes: int
) -> Callable[..., nnx.Module]:
    """Return a function that creates the model of `config` for images of shape [H, W, C].

    Its keyword arguments override the options of `config`. `rngs` is required.
    """
    height, width, channels = image_shape
    small_inputs = config.small_inputs
    if small_inputs is None:
        small_inputs = max(height, width) <= SMALL_IMAGE
    options = dict(
        num_classes=num_classes,
        in_channels=channels,
        efficient=config.efficient,
        save=config.save,
        dtype=jnp.dtype(config.dtype),
        axis_name=None if config.parallel == "jit" else AXIS,
        small_inputs=small_inputs,
    )
    if isinstance(config, ResNetRunConfig):
        return _resnet_builder(config, options)
    assert isinstance(config, DenseNetRunConfig)
    return _densenet_builder(config, options)


def _resnet_builder(config: ResNetRunConfig, options: dict[str, Any]) -> Callable[..., nnx.Module]:
    networks = {"resnet8": RESNET8, **RESNET_OPTIONS}
    if config.network not in networks:
        raise TrainError(f"`model` (={config.model!r:.120}) must be one of {', '.join(networks)}")
    network = networks[config.network]
    if config.dcn != "none":
        num_later = len(network["stage_sizes"]) - 1
        options["modulated"] = config.dcn == "v2"
        options["stage_with_dcn"] = (False, *[True] * num_later)
    return lambda **overrides: ResNet(**network | options | overrides)


def _densenet_builder(
    config: DenseNetRunConfig, options: dict[str, Any]
) -> Callable[..., nnx.Module]:
    options["drop_rate"] = config.drop_rate
    for name in ("growth_rate", "compression", "bn_size"):
        if (value := getattr(config, name)) is not None:
            options[name] = value
    if config.model == "densenet-bc":
        depth = DEFAULT_DEPTH if config.depth is None else config.depth
        return lambda **overrides: densenet_cifar(depth, **options | overrides)
    if config.model not in DENSENET_OPTIONS:
        known = ", ".join(["densenet-bc", *DENSENET_OPTIONS])
        raise TrainError(f"`model` (={config.model!r:.120}) must be one of {known}")
    if config.depth is not None:
        raise TrainError(
            f"`depth` (={config.depth}) needs `model` (={config.model}) to be densenet-bc. Others "
            "have a fixed depth."
        )
    network = DENSENET_OPTIONS[config.model]
    return lambda **overrides: DenseNet(**network | options | overrides)


# Flax's streams count their keys. While a model is traced, JAX searches the whole trace at each
# count, which takes 6 of 8 seconds of a DenseNet-121.
class _OneKey(nnx.RngStream):
    """Stream of random numbers that always returns its key."""

    def __call__(self) -> Array:
        return self.key[...]


def abstract_rngs() -> nnx.Rngs:
    """Return random numbers for a model whose values do not matter, as in `nnx.eval_shape`."""
    rngs: Any = nnx.Rngs()
    rngs.default = _OneKey(0, tag="default")
    return rngs


class Batch(NamedTuple):
    """A batch of labeled images."""

    images: Array  # uint8 [N, H, W, C]
    labels: Array  # int32 [N]


class TrainState(NamedTuple):
    """State of a training run."""

    step: Array  # int32 []
    params: nnx.State
    stats: nnx.State  # running statistics of batch norm, and frozen parameters
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    """Metrics of a training step."""

    loss: jax.Array  # [], mean over the whole batch
    correct: Any  # [], correctly classified images; None of a detector


class EvalSums(NamedTuple):
    """Weighted sums of an evaluation step."""

    loss: jax.Array  # [], sum over the images
    correct: jax.Array  # []


@dataclass(frozen=True, eq=False)
class Learner:
    """A model split by `nnx.split`, its optimizer, and the statistics of the pixels."""

    config: Any  # an ImageConfig; of a subclass its own
    graphdef: nnx.GraphDef  # of the model in training mode
    eval_graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    mean: np.ndarray  # [C]
    std: np.ndarray  # [C]

    @property
    def trained(self) -> Any:
        """The nnx filter of the parameters that the optimizer gets.

        `freeze_stages` = 0 freezes the stem, and N the stem and the first N stages. A stage of a
        DenseNet is a dense block and the transition after it; the last norm belongs to the head.
        """
        frozen = self.config.freeze_stages
        if frozen is None:
            return nnx.Param
        return nnx.All(nnx.Param, lambda path, _: not _is_frozen(path, frozen))

    def normalize(self, images: Array) -> jax.Array:
        """Normalize uint8 pixels to float32."""
        # On the device: a batch of uint8 is a quarter of float32 on its way there.
        scaled = jnp.asarray(images, jnp.float32) / 255
        return (scaled - self.mean.reshape(1, 1, 1, -1)) / self.std.reshape(1, 1, 1, -1)

    def loss(self, params: nnx.State, stats: nnx.State, batch: Batch, key: jax.Array) -> Any:
        """Return the mean cross entropy, the new running statistics and the correct answers."""
        # Without a copy, the running statistics of the traced function's arguments would be
        # overwritten in place.
        model = nnx.merge(self.graphdef, params, stats, copy=True)
        logits = model(self.normalize(batch.images), rngs=nnx.Rngs(dropout=key))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == batch.labels)
        _, _, stats = nnx.split(model, self.trained, ...)
        return jnp.mean(losses), (stats, correct)

    def init(self, params: nnx.State, stats: nnx.State) -> TrainState:
        """Return the state before the first step."""
        return TrainState(jnp.int32(0), params, stats, self.optimizer.init(params))

    def update(
        self, state: TrainState, grads: nnx.State, stats: nnx.State, loss: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """Apply the optimizer; return the new state and the loss, NaN if a gradient is."""
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, stats, opt_state)
        leaves = jax.tree.leaves((loss, grads))
        finite = jnp.stack([jnp.all(jnp.isfinite(a)) for a in leaves]).all()
        # The host learns from the loss that gradients were not finite, and ends the run or goes on.
        loss = jnp.where(finite, loss, jnp.full_like(loss, jnp.nan))
        if self.config.on_nan == "skip":
            # Within the program, because its old state is donated: the host cannot go back to it.
            kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
            new = kept._replace(step=new.step)
        return new, loss


def trace_model(build: Callable[..., nnx.Module], image_shape: tuple[int, int, int]) -> Any:
    """Return a model of shapes, after tracing it with one image.

    Args:
        build: From `model_builder`.
        image_shape: [H, W, C].

    Raises:
        TrainError: The model refuses its options, or images of that shape.
    """
    try:
        model: Any = nnx.eval_shape(lambda: build(rngs=abstract_rngs()))
        model.eval()
        nnx.eval_shape(lambda m, x: m(x), model, jnp.zeros((1, *image_shape)))
    except ValueError as error:
        raise TrainError(str(error)) from error
    return model


def make_learner(
    config: ImageConfig,
    model: Any,
    optimizer: optax.GradientTransformation,
    mean: np.ndarray,
    std: np.ndarray,
) -> Learner:
    """Return what a training step needs of a model, which is then in training mode.

    Args:
        config: The options.
        model: A model of shapes.
        optimizer: The optimizer.
        mean: Mean of the pixels, [C].
        std: Standard deviation of the pixels, [C].

    Raises:
        TrainError: The model has fewer stages than are frozen.
    """
    model.eval()
    eval_graphdef = nnx.graphdef(model)
    _set_training(model, config.freeze_stages)
    return Learner(config, nnx.graphdef(model), eval_graphdef, optimizer, mean, std)


def _set_training(model: Any, freeze_stages: int | None) -> None:
    # Norms of frozen stages use their running statistics, and keep them.
    model.train()
    if freeze_stages is None:
        return
    num_stages = len(getattr(model, "stages", getattr(model, "blocks", ())))
    if freeze_stages > num_stages:
        raise TrainError(
            f"`freeze_stages` (={freeze_stages}) must be at most the number of stages of the "
            f"network (={num_stages})"
        )
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm) and _is_frozen(path, freeze_stages):
            module.use_running_average = True


def _is_frozen(path: Sequence[Any], freeze_stages: int) -> bool:
    if path and path[0] in ("stem_conv", "stem_norm"):
        return True
    in_stage = len(path) > 1 and path[0] in ("stages", "blocks", "transitions")
    return in_stage and path[1] < freeze_stages


def initial_state(learner: Learner, build: Callable[..., nnx.Module]) -> TrainState:
    """Draw parameters from the seed and initialize the optimizer of those that are trained."""
    model = build(rngs=nnx.Rngs(learner.config.seed))
    _, params, stats = nnx.split(model, learner.trained, ...)
    return learner.init(params, stats)


def state_shardings(state: TrainState, mesh: AnyMesh) -> TrainState:
    """Return the shardings of the state, or of its shapes."""
    split = param_shardings(state, mesh)
    return split._replace(
        step=replicated(mesh), stats=jax.tree.map(lambda _: replicated(mesh), state.stats)
    )


def make_train_step(learner: Learner, mesh: Mesh, shardings: Any) -> TrainStep:
    """Compile `(state, batch, key) -> (state, metrics)` for the devices of `mesh`.

    The state is donated. Dropout masks differ from step to step. With `shard_map` and `pmap` they
    also differ from device to device, so only with dropout do the three ways give different
    results.

    Args:
        learner: The model and its optimizer.
        mesh: Its size must divide the batch size.
        shardings: From `state_shardings`. With `shard_map` and `pmap` the state is replicated.
    """
    parallel: Parallel = learner.config.parallel
    match parallel:
        case "jit":
            return jit_step(learner, mesh, shardings)
        case "shard_map":
            return _shard_map_step(learner, mesh)
        case "pmap":
            return _pmap_step(learner, mesh)


def jit_step(learner: Learner, mesh: AnyMesh, shardings: Any) -> Any:
    """Compile a function of the whole batch. Shardings of its arguments distribute it."""

    def loss(params: nnx.State, *rest: Any) -> Any:
        return learner.loss(gather_params(params, mesh), *rest)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(key, state.step)
        (value, (stats, correct)), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.stats, batch, key
        )
        new, value = learner.update(state, grads, stats, value)
        return new, StepMetrics(value, correct)

    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _shard_map_step(learner: Learner, mesh: Mesh) -> TrainStep:
    # `check_vma` gives values types that catch a forgotten reduction.

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

    num_local = sum(device.process_index == jax.process_index() for device in devices)

    def over_devices(state: TrainState, batch: Batch, key: jax.Array) -> Any:
        rows = [a.reshape(num_local, -1, *a.shape[1:]) for a in batch]
        return jax.tree.map(over_processes, mapped(state, Batch(*rows), key))

    def over_processes(a: jax.Array) -> jax.Array:
        # `pmap` returns an array of this process. Make it one of all processes.
        copies = [shard.data for shard in a.addressable_shards]
        return jax.make_array_from_single_device_arrays(a.shape, replicated(mesh), copies)

    return over_devices


def make_eval_step(
    learner: Learner, mesh: Mesh, shardings: Any
) -> Callable[[TrainState, Batch, Array], EvalSums]:
    """Compile `(state, batch, weights) -> sums`, with the batch sharded over `mesh`.

    Evaluation uses the running statistics, so devices exchange only the sums, and `jit` serves all
    three ways to train. `weights` [N] is 1 for an image and 0 for the padding of the last batch.
    """

    def step(state: TrainState, batch: Batch, weights: jax.Array) -> EvalSums:
        model = nnx.merge(learner.eval_graphdef, gather_params(state.params, mesh), state.stats)
        logits = model(learner.normalize(batch.images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        right = jnp.argmax(logits, axis=-1) == batch.labels
        return EvalSums(jnp.sum(losses * weights), jnp.sum(right * weights))

    rows = batch_sharding(mesh)
    return jax.jit(step, in_shardings=(shardings, rows, rows), out_shardings=replicated(mesh))
