"""Training steps of runs on images for the planner, and options that trade time for memory.

No data are read.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ...memory import ResidualReport, residual_bytes
from ...models import DenseNet
from ...models.densenet import DENSENET_OPTIONS
from ..mesh import planning_mesh
from ..optimizers import make_schedule, make_sgd
from ..task import AS_GIVEN, Form, MemoryChoices
from .config import DenseNetRunConfig, ImageConfig
from .steps import (
    Batch,
    Learner,
    abstract_rngs,
    jit_step,
    make_learner,
    model_builder,
    state_shardings,
)

# The options that `effjax memory` changes to compare forms of a step. The first two forms of a
# DenseNet are those of Flax, see `with_flax_layers`.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"efficient": False},
    "jax.checkpoint": {"efficient": False},
    "effjax conv": {"efficient": True, "save": "conv"},
    "effjax features": {"efficient": True, "save": "features"},
}
FLAX_FORMS = "plain", "jax.checkpoint"
IMAGENET, CIFAR = (224, 1000), (32, 10)  # side and classes


def forms(
    config: ImageConfig,
    given: Collection[str],
    num_devices: int = 1,
    num_classes: int | None = None,
) -> dict[str, Form]:
    """Return the forms of the step of a network to compare; one, if the options choose it.

    Args:
        config: The configuration, resolved.
        given: The names of the options that must keep their values.
        num_devices: As in `training_step`.
        num_classes: As in `training_step`.
    """
    step = functools.partial(training_step, num_devices=num_devices, num_classes=num_classes)
    result = recomputation_forms(config, given, step)
    if isinstance(config, DenseNetRunConfig) and AS_GIVEN not in result:
        plain = result.pop("plain").config
        flax = {
            n: Form(plain, functools.partial(step, form=n), has_command=False) for n in FLAX_FORMS
        }
        result = flax | result
    return result


def recomputation_forms(
    config: Any, given: Collection[str], training_step: Callable[[Any], tuple[Any, ...]]
) -> dict[str, Form]:
    """Return the forms of a configuration that has the options `efficient` and `save`."""
    if {"efficient", "save"} & {*given}:
        return {AS_GIVEN: Form(config, training_step)}
    changes = {name: form for name, form in FORMS.items() if name != "jax.checkpoint"}
    return {
        n: Form(dataclasses.replace(config, **form), training_step) for n, form in changes.items()
    }


def smaller_configs(config: Any, of_state: bool) -> Iterator[Any]:
    """Yield configurations with fewer images in a step; none if the state must become smaller."""
    size = config.batch_size
    while size > 1 and not of_state:
        size //= 2
        yield dataclasses.replace(config, batch_size=size)


def training_step(
    config: ImageConfig,
    num_devices: int = 1,
    image_shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    form: str | None = None,
) -> tuple[Any, ...]:
    """Return the training step of a run and the shapes of its arguments, `(fun, *args)`.

    The step is that of `effjax train`: SGD with momentum, a donated state, a batch sharded over the
    devices.

    Args:
        config: The configuration.
        num_devices: The number of devices.
        image_shape: [H, W, C]. By default `image_size` of the configuration, or the size of the
            images that the network was made for.
        num_classes: The number of classes; by default as for the shape.
        form: One of `forms`, which changes the options of the network. "plain" is a ResNet with
            `efficient=False`, or a DenseNet with Flax's BatchNorm and automatic differentiation.
            "jax.checkpoint" is the latter with `jax.checkpoint` around each dense layer. In the
            result of a run, "plain" is `efficient=False` of both networks.
    """
    config = config.resolve()
    side, classes = default_images(config)
    image_shape = image_shape or (config.image_size or side, config.image_size or side, 3)
    build = model_builder(config, image_shape, num_classes or classes)

    def make() -> nnx.Module:
        # `jit` reduces over the whole batch, whatever `parallel` is.
        model = build(**FORMS[form] if form else {}, axis_name=None, rngs=abstract_rngs())
        if isinstance(model, DenseNet) and form in FLAX_FORMS:
            return with_flax_layers(model, checkpoint=form == "jax.checkpoint")
        return model

    schedule = make_schedule(config.schedule, config.learning_rate, config.epochs)
    optimizer = make_sgd(schedule, config.momentum, config.weight_decay)
    mesh = planning_mesh(config.mesh, num_devices)
    images: Any = jax.ShapeDtypeStruct((config.batch_size, *image_shape), jnp.uint8)
    labels: Any = jax.ShapeDtypeStruct((config.batch_size,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    learner, params, stats = _split_model(config, nnx.eval_shape(make), optimizer, image_shape[-1])
    state = jax.eval_shape(learner.init, params, stats)
    step = jit_step(learner, mesh, state_shardings(state, mesh))
    return step, state, Batch(images, labels), key


def default_images(config: ImageConfig) -> tuple[int, int]:
    """Return the side and the number of classes of the images that a network was made for."""
    small = config.network in ("densenet-bc", "resnet8")
    is_small = small or "small_inputs" in DENSENET_OPTIONS.get(config.network, ())
    return CIFAR if is_small else IMAGENET


def memory_choices(
    config: ImageConfig,
    given: Collection[str] = (),
    num_devices: int = 1,
    image_shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
) -> MemoryChoices:
    """Return the options of a run that trade time for memory.

    Args:
        config: The configuration.
        given: The names of the options that must keep their values.
        num_devices: As in `training_step`.
        image_shape: As in `training_step`.
        num_classes: As in `training_step`.
    """
    step = functools.partial(
        training_step, num_devices=num_devices, image_shape=image_shape, num_classes=num_classes
    )
    return recomputation_choices(config, given, step)


def recomputation_choices(
    config: Any, given: Collection[str], training_step: Callable[[Any], tuple[Any, ...]]
) -> MemoryChoices:
    """Return the choices of a configuration that has the options `efficient` and `save`."""
    options: dict[str, tuple[Any, ...]] = {
        "efficient": (False, True),
        "save": ("conv", "features"),
    }
    options |= {name: (getattr(config, name),) for name in options.keys() & given}

    def change(efficient: bool, save: Any) -> Any:
        if not efficient and save != "conv":  # `save` has no effect
            return None
        return dataclasses.replace(config, efficient=efficient, save=save)

    return MemoryChoices(options, [*options], change, training_step)


def backward_bytes(
    config: ImageConfig,
    build: Callable[..., nnx.Module],
    batch_shape: tuple[int, int, int, int],
    **form: Any,
) -> ResidualReport:
    """Return the bytes that a batch keeps for the backward pass of a model, for a run's result.

    Args:
        config: The configuration.
        build: From `model_builder`.
        batch_shape: [N, H, W, C].
        **form: Options of the model.
    """
    model = nnx.eval_shape(lambda: build(**form, axis_name=None, rngs=abstract_rngs()))
    learner, params, stats = _split_model(config, model, optax.identity(), batch_shape[-1])
    # `residual_bytes` traces; NumPy's zeros take no memory until they are read.
    zeros: Any = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), stats)
    batch = Batch(np.zeros(batch_shape, np.uint8), np.zeros(batch_shape[:1], np.int32))
    key = jax.random.key(0)
    return residual_bytes(lambda p: learner.loss(p, zeros, batch, key), params, has_aux=True)


def _split_model(
    config: ImageConfig, model: Any, optimizer: optax.GradientTransformation, channels: int
) -> tuple[Learner, Any, Any]:
    """Return a learner for pixels of `channels`, and the shapes of parameters and statistics."""
    learner = make_learner(config, model, optimizer, np.zeros(channels), np.ones(channels))
    _, params, stats = nnx.split(model, learner.trained, ...)
    return learner, params, stats


def with_flax_layers(model: DenseNet, checkpoint: bool) -> DenseNet:
    """Replace the norms by those of Flax, and optionally wrap layers in `jax.checkpoint`."""
    norms: list[Any] = [model, *model.transitions]
    for holder in norms:
        for name in ("stem_norm", "final_norm", "norm"):
            if getattr(holder, name, None) is not None:
                setattr(holder, name, _FlaxNorm(getattr(holder, name)))
    for block in model.blocks:
        for layer in block.layers:
            layer.norm1, layer.norm2 = _FlaxNorm(layer.norm1), _FlaxNorm(layer.norm2)
        if checkpoint:
            block.layers = nnx.List([_Checkpointed(layer) for layer in block.layers])
    return model


class _FlaxNorm(nnx.Module):
    """Flax's BatchNorm and a ReLU, with the options of a norm of effjax."""

    def __init__(self, norm: Any):
        self.norm = nnx.BatchNorm(
            norm.scale.shape[0], momentum=norm.momentum, epsilon=norm.epsilon, dtype=norm.dtype,
            param_dtype=norm.param_dtype, use_running_average=False, rngs=abstract_rngs(),
        )  # fmt: skip

    def __call__(
        self, x: jax.Array, use_running_average: None = None, mask: None = None
    ) -> jax.Array:
        return nnx.relu(self.norm(x).astype(x.dtype))


class _Checkpointed(nnx.Module):
    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: jax.Array, use_running_average: None, *, mask: None) -> jax.Array:
        return nnx.remat(lambda layer, x: layer(x, None, mask=None))(self.layer, x)
