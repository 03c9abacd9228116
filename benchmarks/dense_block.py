"""A training step of one DenseNet-BC block: planned memory by depth, and time.

The peers are plain autodiff, Flax's layers, ``jax.checkpoint`` in two forms, and PyTorch, plain and
checkpointed, if it is installed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen
from jax.ad_checkpoint import checkpoint_name

import effjax
from effjax import DenseLayerParams

from . import pytorch
from .measure import TARGET, need_compiler, plan_training, time_steps
from .results import Result, Size

REFERENCE = "plain autodiff"
GROWTH_RATE, CHANNELS = 12, 24
ROUNDS = 5
BATCH_SIZE = 64  # of plans


def init_params(
    layers: int, growth_rate: int = GROWTH_RATE, channels: int = CHANNELS
) -> list[DenseLayerParams]:
    """Initialize a block in the layout of `effjax.dense_block`."""
    normal = jax.nn.initializers.he_normal()
    ones, zeros = jnp.ones, jnp.zeros
    params = []
    for i, key in enumerate(jax.random.split(jax.random.key(0), layers)):
        c, b = channels + i * growth_rate, 4 * growth_rate
        key1, key2 = jax.random.split(key)
        kernel1 = normal(key1, (1, 1, c, b), jnp.float32)
        kernel2 = normal(key2, (3, 3, b, growth_rate), jnp.float32)
        params.append(DenseLayerParams(ones(c), zeros(c), kernel1, ones(b), zeros(b), kernel2))
    return params


def step_shapes(layers: int, batch_size: int) -> tuple:
    """Return the shapes of a step's arguments on 32x32 maps, for the planner."""
    shape = batch_size, 32, 32
    x = jax.ShapeDtypeStruct((*shape, CHANNELS), "float32")
    weights = jax.ShapeDtypeStruct((*shape, CHANNELS + GROWTH_RATE * layers), "float32")
    return jax.eval_shape(lambda: init_params(layers)), x, weights


def _conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _norm_relu(x, scale, bias):
    mean = x.mean((0, 1, 2))
    var = jnp.square(x - mean).mean((0, 1, 2))
    return jax.nn.relu((x - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + bias)


def _layer(features: list, p: DenseLayerParams):
    x = jnp.concatenate(features, -1)
    z = checkpoint_name(_conv(_norm_relu(x, p.scale1, p.bias1), p.kernel1), "conv1")
    return checkpoint_name(_conv(_norm_relu(z, p.scale2, p.bias2), p.kernel2), "conv2")


def plain(x, params):
    features = [x]
    for p in params:
        features.append(_layer(features, p))
    return jnp.concatenate(features, -1)


def checkpoint_layers(*names: str) -> Callable:
    """Wrap every layer in ``jax.checkpoint``, keeping the named results."""
    layer = jax.checkpoint(_layer, policy=jax.checkpoint_policies.save_only_these_names(*names))

    def block(x, params):
        features = [x]
        for p in params:
            features.append(layer(features, p))
        return jnp.concatenate(features, -1)

    return block


def checkpoint_pass_through(*names: str) -> Callable:
    """Wrap every layer in ``jax.checkpoint``, and return all features from it.

    XLA then adds up the gradients of the features layer by layer. This is the strongest form of
    ``jax.checkpoint`` for a dense block.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(lambda features, p: [*features, _layer(features, p)], policy=policy)

    def block(x, params):
        features = [x]
        for p in params:
            features = layer(features, p)
        return jnp.concatenate(features, -1)

    return block


class _FlaxBlock(linen.Module):
    """The same block made of Flax's layers."""

    layers: int
    growth_rate: int

    @linen.compact
    def __call__(self, x):
        for _ in range(self.layers):
            y = x
            for size, features in ((1, 4 * self.growth_rate), (3, self.growth_rate)):
                y = linen.relu(linen.BatchNorm(use_running_average=False)(y))
                y = linen.Conv(features, (size, size), use_bias=False)(y)
            x = jnp.concatenate([x, y], -1)
        return x


def flax_block(x, params):
    variables = {}
    for i, p in enumerate(params):
        variables[f"BatchNorm_{2 * i}"] = {"scale": p.scale1, "bias": p.bias1}
        variables[f"Conv_{2 * i}"] = {"kernel": p.kernel1}
        variables[f"BatchNorm_{2 * i + 1}"] = {"scale": p.scale2, "bias": p.bias2}
        variables[f"Conv_{2 * i + 1}"] = {"kernel": p.kernel2}
    block = _FlaxBlock(len(params), params[0].kernel2.shape[-1])
    return block.apply({"params": variables}, x, mutable=["batch_stats"])[0]


def effjax_block(save: Literal["conv", "features"]) -> Callable:
    return lambda x, params: effjax.dense_block(x, params, save=save)[0]


BLOCKS: dict[str, Callable] = {
    REFERENCE: plain,
    "Flax layers": flax_block,
    "jax.checkpoint a layer": checkpoint_layers("conv1", "conv2"),
    "jax.checkpoint pass-through": checkpoint_pass_through("conv1", "conv2"),
    "jax.checkpoint pass-through, recompute conv1": checkpoint_pass_through("conv2"),
    'effjax save="conv"': effjax_block("conv"),
    'effjax save="features"': effjax_block("features"),
}


def train_step(block: Callable) -> Callable:
    """Return loss and gradients; the weights of the loss stand for the rest of a network."""

    def loss(params, x, weights):
        return jnp.sum(block(x, params) * weights)

    return jax.value_and_grad(loss, argnums=(0, 1))


def make_arrays(
    layers: int, batch_size: int, image_size: int, growth_rate: int, channels: int
) -> tuple[list[DenseLayerParams], jax.Array, jax.Array]:
    """Return parameters, an input and the weights of the loss."""
    shape = batch_size, image_size, image_size
    x = jax.random.normal(jax.random.key(1), (*shape, channels))
    weights = jax.random.normal(jax.random.key(2), (*shape, channels + layers * growth_rate))
    return init_params(layers, growth_rate, channels), x, weights


def measure_block(
    layers: int,
    batch_size: int,
    image_size: int,
    growth_rate: int = GROWTH_RATE,
    channels: int = CHANNELS,
    rounds: int = ROUNDS,
) -> Result:
    args = make_arrays(layers, batch_size, image_size, growth_rate, channels)
    steps = {name: train_step(block) for name, block in BLOCKS.items()}
    missing = pytorch.missing("torch")
    return time_steps(
        f"dense_block_{layers}_float32",
        f"dense block, {layers} layers, batch {batch_size}, {image_size}x{image_size}, float32",
        {
            "layers": layers,
            "batch_size": batch_size,
            "image_size": image_size,
            "growth_rate": growth_rate,
            "channels": channels,
            "dtype": "float32",
        },
        steps,
        args,
        reference=REFERENCE,
        rounds=rounds,
        peers={} if missing else pytorch.block_steps(*args),
        notes=[
            missing,
            "XLA's CPU backend shows no savings of recomputation; the plans for a GPU do.",
        ],
    )


def plan_depth(
    layers: int,
    batch_size: int = BATCH_SIZE,
    target: str = TARGET,
    names: Sequence[str] = tuple(BLOCKS),
) -> Result:
    """Plan the peak of a training step."""
    args = step_shapes(layers, batch_size)
    return plan_training(
        f"memory_block_{layers}",
        f"step of a dense block of {layers} layers, batch {batch_size} of 32x32",
        {
            "layers": layers,
            "batch_size": batch_size,
            "growth_rate": GROWTH_RATE,
            "channels": CHANNELS,
            "image_size": 32,
        },
        {name: (train_step(BLOCKS[name]), *args) for name in names},
        target,
    )


def run(size: Size) -> Iterator[Result]:
    published = size == "published"
    depths, batch_size, image_size = ((24, 48), 16, 32) if published else ((6, 12), 4, 16)
    for layers in depths:
        yield measure_block(layers, batch_size, image_size)
    need_compiler()
    for layers in (12, 24, 48) if published else (3, 6, 12):
        yield plan_depth(layers)
