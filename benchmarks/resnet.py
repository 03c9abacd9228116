"""Planned memory of a training step of a ResNet: Flax's own layers and effjax's."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from effjax.models.linen import ResNet

from .measure import TARGET, need_compiler, plan_training
from .results import Result, Size

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": dict(bottleneck=False, stage_sizes=(2, 2, 2, 2)),
    "resnet50": dict(bottleneck=True, stage_sizes=(3, 4, 6, 3)),
}


def flax_conv(features: int, size: int, strides: int = 1, *, dtype: Any) -> nn.Conv:
    return nn.Conv(features, (size, size), strides, size // 2, use_bias=False, dtype=dtype)


def flax_norm(dtype: Any) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)


class FlaxBlock(nn.Module):
    """A bottleneck or basic block made of Flax's layers."""

    bottleneck: bool
    width: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(flax_conv, dtype=self.dtype)
        norm = functools.partial(flax_norm, self.dtype)
        features = self.width * (4 if self.bottleneck else 1)
        if self.bottleneck:
            h = nn.relu(norm()(conv(self.width, 1)(x)))
            h = nn.relu(norm()(conv(self.width, 3, self.strides)(h)))
            h = norm()(conv(features, 1)(h))
        else:
            h = nn.relu(norm()(conv(self.width, 3, self.strides)(x)))
            h = norm()(conv(features, 3)(h))
        if x.shape != h.shape:
            x = norm()(conv(features, 1, self.strides)(x))
        return nn.relu(x + h)


class FlaxResNet(nn.Module):
    """A ResNet of torchvision's layout made of Flax's layers, in training mode."""

    bottleneck: bool
    stage_sizes: Sequence[int]
    num_classes: int
    dtype: Any
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        block = nn.remat(FlaxBlock) if self.checkpoint else FlaxBlock
        x = flax_conv(64, 7, 2, dtype=self.dtype)(x)
        x = nn.relu(flax_norm(self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # type: ignore[arg-type]
        for stage, size in enumerate(self.stage_sizes):
            for i in range(size):
                strides = 2 if stage and not i else 1
                x = block(self.bottleneck, 64 << stage, strides, self.dtype)(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)).astype(jnp.float32))


def make_networks(name: str, num_classes: int, dtype: Any) -> dict[str, nn.Module]:
    common: dict[str, Any] = dict(**NETWORKS[name], num_classes=num_classes, dtype=dtype)
    return {
        "Flax": FlaxResNet(**common),
        "Flax, jax.checkpoint a block": FlaxResNet(**common, checkpoint=True),
        "effjax efficient=False": ResNet(**common, efficient=False),
        'effjax save="conv"': ResNet(**common, save="conv"),
        'effjax save="features"': ResNet(**common, save="features"),
    }


def training_step(model: nn.Module, batch_size: int, side: int) -> tuple[Callable, Any, Any, Any]:
    """Return a step of SGD with momentum that donates its state, and its arguments' shapes."""
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    images = jax.ShapeDtypeStruct((batch_size, side, side, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def init(key: jax.Array) -> Any:
        variables = model.init(key, jnp.zeros((1, side, side, 3)))
        return variables, optimizer.init(variables["params"])

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        variables, moments = state

        def loss(params: Any) -> Any:
            logits, stats = model.apply(
                {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, **stats}, moments), value

    state = jax.eval_shape(init, jax.random.key(0))
    return jax.jit(step, donate_argnums=0), state, images, labels


def plan_networks(
    name: str,
    batch_size: int,
    image_size: int,
    num_classes: int,
    dtype: str = "bfloat16",
    target: str = TARGET,
    forms: Sequence[str] | None = None,
) -> Result:
    """Plan training steps of some forms of a network, or of all."""
    networks = make_networks(name, num_classes, jnp.dtype(dtype))
    steps = {
        form: training_step(networks[form], batch_size, image_size) for form in forms or networks
    }
    return plan_training(
        f"{name}_{batch_size}",
        f"{name}, batch {batch_size} of {image_size}x{image_size}",
        {"batch_size": batch_size, "image_size": image_size, "dtype": dtype},
        steps,
        target,
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        yield plan_networks("resnet50", 256, 224, 1000)
    else:
        yield plan_networks("resnet18", 32, 64, 10)
