"""The model, the schedule and the optimizer of a run on images. No data are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ...models import DenseNet, ResNet, densenet_cifar
from ...models.densenet import DENSENET_OPTIONS
from ...models.resnet import RESNET_OPTIONS
from ..errors import TrainError
from ..finite import OnNan
from ..mesh import AXIS
from .config import DenseNetConfig, ImageConfig, ResNetConfig
from .steps import Learner

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
    if isinstance(config, ResNetConfig):
        return _resnet_builder(config, options)
    assert isinstance(config, DenseNetConfig)
    return _densenet_builder(config, options)


def _resnet_builder(config: ResNetConfig, options: dict[str, Any]) -> Callable[..., nnx.Module]:
    network = RESNET8 if config.depth == 8 else RESNET_OPTIONS[config.network]
    if config.dcn != "none":
        num_later = len(network["stage_sizes"]) - 1
        options["modulated"] = config.dcn == "v2"
        options["stage_with_dcn"] = (False, *[True] * num_later)
    return lambda **overrides: ResNet(**network | options | overrides)


def _densenet_builder(config: DenseNetConfig, options: dict[str, Any]) -> Callable[..., nnx.Module]:
    options["drop_rate"] = config.drop_rate
    for name in ("growth_rate", "compression", "bn_size"):
        if (value := getattr(config, name)) is not None:
            options[name] = value
    if config.model == "densenet-bc":
        depth = DEFAULT_DEPTH if config.depth is None else config.depth
        return lambda **overrides: densenet_cifar(depth, **options | overrides)
    if config.model not in DENSENET_OPTIONS:
        known = ", ".join(["densenet-bc", *DENSENET_OPTIONS])
        raise TrainError(f"model (={config.model!r}) must be one of {known}")
    if config.depth is not None:
        raise TrainError(
            f"depth (={config.depth}) is for --model densenet-bc. {config.model} has a fixed depth."
        )
    network = DENSENET_OPTIONS[config.model]
    return lambda **overrides: DenseNet(**network | options | overrides)


def make_schedule(config: ImageConfig, steps_per_epoch: int) -> optax.Schedule:
    """Return cosine decay to zero, or division by ten after 1/2 and after 3/4 of the steps."""
    steps = config.epochs * steps_per_epoch
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(config.learning_rate, steps)
    return optax.piecewise_constant_schedule(
        config.learning_rate, {steps // 2: 0.1, steps * 3 // 4: 0.1}
    )


def make_optimizer(config: ImageConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum, and weight decay of kernels only.

    Parameters of rank one are not decayed: scales and biases of batch norm, and the classifier's
    bias.
    """

    def is_kernel(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=is_kernel),
        optax.sgd(schedule, momentum=config.momentum, nesterov=True),
    )


def make_learner(
    build: Callable[..., nnx.Module],
    image_shape: tuple[int, int, int],
    optimizer: optax.GradientTransformation,
    mean: np.ndarray,
    std: np.ndarray,
    on_nan: OnNan = "stop",
) -> Learner:
    """Trace a model with one image and return what a training step needs of it.

    Args:
        build: From `model_builder`.
        image_shape: [H, W, C].
        optimizer: The optimizer.
        mean: Mean of the pixels, [C].
        std: Standard deviation of the pixels, [C].
        on_nan: An argument of `finite.skip_nonfinite`.

    Raises:
        TrainError: The model refuses its options, or images of that shape.
    """
    try:
        model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        model.eval()
        nnx.eval_shape(lambda m, x: m(x), model, jnp.zeros((1, *image_shape)))
        eval_graphdef = nnx.graphdef(model)
        model.train()
        return Learner(nnx.graphdef(model), eval_graphdef, optimizer, mean, std, on_nan)
    except ValueError as error:
        raise TrainError(str(error)) from error
