"""Device memory of a training step of ResNet-50 on a GPU that need not be there: Flax's own layers
beside effjax's, at batch 256 of 224x224 images in bfloat16."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import linen as nn

from ..memory.compare import plan_all
from ..models import RESNETS
from ..models.linen import ResNet
from ._result import Bars, Result, Size, need_compiler, publish
from .memory import rows_of


class FlaxBlock(nn.Module):
    """A bottleneck, or a basic block, of Flax's own layers."""

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
    """A ResNet of torchvision's layout, of Flax's own layers, in training."""

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


def flax_conv(features: int, size: int, strides: int = 1, *, dtype: Any) -> nn.Conv:
    return nn.Conv(features, (size, size), strides, size // 2, use_bias=False, dtype=dtype)


def flax_norm(dtype: Any) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)


def forms(name: str, num_classes: int, dtype: Any) -> dict[str, nn.Module]:
    """The network in every form."""
    common: dict[str, Any] = dict(**RESNETS[name], num_classes=num_classes, dtype=dtype)
    return {
        "Flax": FlaxResNet(**common),
        "Flax, jax.checkpoint a block": FlaxResNet(**common, checkpoint=True),
        "effjax efficient=False": ResNet(**common, efficient=False),
        'effjax save="conv"': ResNet(**common, save="conv"),
        'effjax save="features"': ResNet(**common, save="features"),
    }


def training_step(model: nn.Module, batch_size: int, side: int) -> tuple[Callable, Any, Any, Any]:
    """A step of SGD with momentum, whose state is donated, and the shapes of its arguments."""
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    images = jax.ShapeDtypeStruct((batch_size, side, side, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def init(key: jax.Array) -> Any:
        variables = model.init(key, jnp.zeros((1, side, side, 3)))
        return variables, optimizer.init(variables["params"])

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        variables, moments = state

        def loss(params: Any) -> Any:
            logits, new = model.apply(
                {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, **new}, moments), value

    state = jax.eval_shape(init, jax.random.key(0))
    return jax.jit(step, donate_argnums=0), state, images, labels


def bench(
    model: str, batch_size: int, image_size: int, num_classes: int, dtype: str, target: str
) -> Result:
    """Plans a training step in every form."""
    found = forms(model, num_classes, jnp.dtype(dtype))
    steps = {name: training_step(net, batch_size, image_size) for name, net in found.items()}
    plans = plan_all(steps, target=target, progress=True)
    config = {
        "target": target, "batch_size": batch_size, "image_size": image_size, "dtype": dtype,
    }  # fmt: skip
    title = f"{model}, batch {batch_size} of {image_size}x{image_size}, compiled for {target}"
    plot = Bars("peak_bytes", "peak of a training step [bytes]")
    return Result(f"{model}_{batch_size}_{target}", title, config, rows_of(plans), plot)


def results(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        yield bench("resnet50", 256, 224, 1000, "bfloat16", "h200")
    else:
        yield bench("resnet18", 32, 64, 10, "bfloat16", "h200")


def main(
    model: str = "resnet50",
    batch_size: int = 256,
    image_size: int = 224,
    num_classes: int = 1000,
    dtype: str = "bfloat16",
    target: str = "h200",
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file.")] = None,
) -> None:
    """Plans a training step in every form."""
    publish(bench(model, batch_size, image_size, num_classes, dtype, target), json)


if __name__ == "__main__":
    typer.run(main)
