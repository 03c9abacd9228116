"""Training steps of a model in the forms one can choose from, to be planned side by side."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...memory._compile import data_mesh
from ...models import DenseNet
from ...models.nnx.densenet import DenseLayer
from .config import Config
from .recipe import forms, make_optimizer, make_schedule, model_builder
from .steps import Batch, Task, TrainState, jit_step

DENSENET_FORMS = ("plain", "jax.checkpoint", "effjax conv", "effjax features")


def training_steps(
    config: Config, image_shape: tuple[int, int, int], num_classes: int, num_devices: int = 1
) -> Callable[[int], dict[str, tuple[Any, ...]]]:
    """For a batch size, the training step of each form with its arguments: `(fn, *args)` by name.

    The step is that of `effjax train`: SGD with momentum, the state donated, the batch sharded over
    the devices. Of a DenseNet, "plain" has Flax's BatchNorm and automatic differentiation;
    "jax.checkpoint" is the same with each dense layer under `jax.checkpoint`; the others are
    `efficient=True` with `save="conv"` and `save="features"`. Of another model they are its
    `forms`.
    """
    build = model_builder(config, image_shape, num_classes)
    optimizer = make_optimizer(config, make_schedule(config, steps_per_epoch=1))
    mesh = data_mesh(num_devices)

    others = {} if "densenet" in config.model else forms(config)

    def make(form: str) -> nnx.Module:
        if others:
            return build(**others[form], rngs=nnx.Rngs(0))
        if form.startswith("effjax"):
            return build(efficient=True, save=form.removeprefix("effjax "), rngs=nnx.Rngs(0))
        model: Any = build(efficient=False, rngs=nnx.Rngs(0))
        return with_flax_layers(model, checkpoint=form == "jax.checkpoint")

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        shape = (batch_size, *image_shape)
        batch, key = jax.eval_shape(
            lambda: (Batch(jnp.zeros(shape, jnp.uint8), jnp.zeros(batch_size, jnp.int32)),
                     jax.random.key(0))
        )  # fmt: skip
        found = {}
        for form in others or DENSENET_FORMS:
            graphdef, params, stats = nnx.split(
                nnx.eval_shape(lambda form=form: make(form)), nnx.Param, ...
            )
            channels = image_shape[-1]
            task = Task(graphdef, graphdef, optimizer, np.zeros(channels), np.ones(channels))
            state = jax.eval_shape(
                lambda p, s: TrainState(jnp.int32(0), p, s, optimizer.init(p)), params, stats
            )
            found[form] = (jit_step(task, mesh), state, batch, key)
        return found

    return steps


def with_flax_layers(model: DenseNet, checkpoint: bool) -> DenseNet:
    """The same network with Flax's BatchNorm, and each dense layer under `jax.checkpoint`."""
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
    """Flax's BatchNorm and a ReLU, with the options of effjax's."""

    def __init__(self, norm: Any):
        self.norm = nnx.BatchNorm(
            norm.scale.shape[0], momentum=norm.momentum, epsilon=norm.epsilon, dtype=norm.dtype,
            param_dtype=norm.param_dtype, use_running_average=False, rngs=nnx.Rngs(0),
        )  # fmt: skip

    def __call__(self, x: jax.Array, mask: None = None) -> jax.Array:
        return nnx.relu(self.norm(x).astype(x.dtype))


class _Checkpointed(nnx.Module):
    def __init__(self, layer: DenseLayer):
        self.layer = layer

    def __call__(self, x: jax.Array, *, mask: None) -> jax.Array:
        return nnx.remat(lambda layer, x: layer(x, mask=None))(self.layer, x)
