"""The model, the schedule and the optimizer that the options of a run describe, for images of a
shape; no data are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ...models import DENSENETS, RESNETS, DenseNet, ResNet, densenet_cifar
from ..errors import TrainError
from ..finite import OnNan
from ..mesh import AXIS
from .config import Config
from .steps import Learner

DEFAULT_DEPTH = 22
SMALL_IMAGE = 64  # up to this side, a stem without pooling
# For small images: three stages of one block each.
NETWORKS = {**RESNETS, "resnet8": dict(stage_sizes=(1, 1, 1), bottleneck=False, width=16)}


def model_builder(
    config: Config, image_shape: tuple[int, int, int], num_classes: int
) -> Callable[..., nnx.Module]:
    """A function that makes the model of `config` for images of that shape.

    It takes keyword arguments over those of the config: `axis_name`, `rngs`, and what
    `forms.forms` has.
    """
    height, width, channels = image_shape
    axis_name = None if config.parallel == "jit" else AXIS
    small = config.small_inputs
    options: dict[str, Any] = dict(
        num_classes=num_classes,
        in_channels=channels,
        efficient=config.efficient,
        save=config.save,
        dtype=jnp.dtype(config.dtype),
        axis_name=axis_name,
        small_inputs=max(height, width) <= SMALL_IMAGE if small is None else small,
    )
    if config.depth is not None and config.model in (*DENSENETS, *NETWORKS):
        raise TrainError(
            f"depth (={config.depth}) is for --model densenet-bc; {config.model} has a fixed depth"
        )
    own = {name: getattr(config, name) for name in ("growth_rate", "compression", "bn_size")}
    own = {name: value for name, value in own.items() if value is not None}
    if config.model in NETWORKS:
        own |= {"drop_rate": config.drop_rate} if config.drop_rate else {}
        for name, value in own.items():
            raise TrainError(f"{name} (={value}) is of DenseNets; {config.model} has none")
        network: dict[str, Any] = NETWORKS[config.model]
        if config.dcn != "none":
            later = [True] * (len(network["stage_sizes"]) - 1)
            options |= dict(modulated=config.dcn == "v2", stage_with_dcn=(False, *later))
        return lambda **more: ResNet(**network | options | more)
    if config.dcn != "none":
        raise TrainError(f"dcn (={config.dcn!r}) is of ResNets; {config.model} has none")
    options |= own | {"drop_rate": config.drop_rate}

    if config.model == "densenet-bc":
        depth = DEFAULT_DEPTH if config.depth is None else config.depth
        return lambda **more: densenet_cifar(depth, **options | more)
    if config.model not in DENSENETS:
        known = ", ".join(["densenet-bc", *DENSENETS, *NETWORKS])
        raise TrainError(f"model (={config.model!r}) must be one of {known}")
    return lambda **more: DenseNet(**DENSENETS[config.model] | options | more)


def make_schedule(config: Config, steps_per_epoch: int) -> optax.Schedule:
    """Cosine to zero, or a tenth after half and again after three quarters of the steps."""
    steps = config.epochs * steps_per_epoch
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(config.learning_rate, steps)
    return optax.piecewise_constant_schedule(
        config.learning_rate, {steps // 2: 0.1, steps * 3 // 4: 0.1}
    )


def make_optimizer(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """SGD with Nesterov momentum; weight decay pulls on kernels only.

    The scales and biases of batch norm, and the bias of the classifier, are not decayed: they are
    the parameters of rank one.
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
    """What learns: the model's structure in training and in evaluation, after a trial with one
    image, and the optimizer.

    Args:
        build: from `model_builder`.
        mean, std: of the pixels, [C].
        on_nan: as `finite.guarded` has it.

    Raises:
        TrainError: the model refuses its options, or images of that shape.
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
