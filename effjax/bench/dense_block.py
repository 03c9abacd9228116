"""A training step of one DenseNet-BC block: effjax beside plain autodiff, Flax,
``jax.checkpoint`` in both forms, and PyTorch, plain and checkpointed, where that is importable.

The pass-through form of ``jax.checkpoint`` returns the features from every checkpointed layer,
which makes XLA add up gradients layer by layer: the strongest form of the incumbent, and little
known.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import typer
from flax import linen
from jax.ad_checkpoint import checkpoint_name

import effjax
from effjax import DenseLayerParams

from . import _torch
from ._measure import measure, threads
from ._result import Result, Size, publish


def init(
    layers: int, growth_rate: int, channels: int, dtype=jnp.float32, seed: int = 0
) -> list[DenseLayerParams]:
    """Parameters of a block in the layout of `effjax.dense_block`."""
    normal = jax.nn.initializers.he_normal()
    params = []
    for i, key in enumerate(jax.random.split(jax.random.key(seed), layers)):
        c, b = channels + i * growth_rate, 4 * growth_rate
        key1, key2 = jax.random.split(key)
        kernel1 = normal(key1, (1, 1, c, b), dtype)
        kernel2 = normal(key2, (3, 3, b, growth_rate), dtype)
        ones, zeros = jnp.ones, jnp.zeros
        params.append(
            DenseLayerParams(
                ones(c, dtype), zeros(c, dtype), kernel1, ones(b, dtype), zeros(b, dtype), kernel2
            )
        )
    return params


def _conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _norm_relu(x, scale, bias):
    x = x.astype(jnp.float32)
    mean = x.mean((0, 1, 2))
    var = jnp.square(x - mean).mean((0, 1, 2))
    return jax.nn.relu((x - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + bias)


def _layer(features: list, p: DenseLayerParams):
    x = jnp.concatenate(features, -1)
    z = checkpoint_name(_conv(_norm_relu(x, p.scale1, p.bias1).astype(x.dtype), p.kernel1), "conv1")
    z = _norm_relu(z, p.scale2, p.bias2).astype(x.dtype)
    return checkpoint_name(_conv(z, p.kernel2), "conv2")


def plain(x, params):
    """What one writes without thinking of memory."""
    features = [x]
    for p in params:
        features.append(_layer(features, p))
    return jnp.concatenate(features, -1)


def checkpoint_layers(*names: str) -> Callable:
    """``jax.checkpoint`` around every layer, keeping what `names` name."""
    layer = jax.checkpoint(_layer, policy=jax.checkpoint_policies.save_only_these_names(*names))

    def block(x, params):
        features = [x]
        for p in params:
            features.append(layer(features, p))
        return jnp.concatenate(features, -1)

    return block


def checkpoint_pass_through(*names: str) -> Callable:
    """The same, but a layer returns the features as well."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(lambda features, p: [*features, _layer(features, p)], policy=policy)

    def block(x, params):
        features = [x]
        for p in params:
            features = layer(features, p)
        return jnp.concatenate(features, -1)

    return block


class _FlaxBlock(linen.Module):
    """The same block of Flax's own layers."""

    layers: int
    growth_rate: int

    @linen.compact
    def __call__(self, x):
        norm = lambda: linen.BatchNorm(use_running_average=False, dtype=x.dtype)  # noqa: E731
        conv = lambda k, n: linen.Conv(n, (k, k), use_bias=False, dtype=x.dtype)  # noqa: E731
        for _ in range(self.layers):
            y = conv(1, 4 * self.growth_rate)(linen.relu(norm()(x)))
            y = conv(3, self.growth_rate)(linen.relu(norm()(y)))
            x = jnp.concatenate([x, y], -1)
        return x


def flax(x, params):
    tree = {}
    for i, p in enumerate(params):
        tree[f"BatchNorm_{2 * i}"] = {"scale": p.scale1, "bias": p.bias1}
        tree[f"Conv_{2 * i}"] = {"kernel": p.kernel1}
        tree[f"BatchNorm_{2 * i + 1}"] = {"scale": p.scale2, "bias": p.bias2}
        tree[f"Conv_{2 * i + 1}"] = {"kernel": p.kernel2}
    block = _FlaxBlock(len(params), params[0].kernel2.shape[-1])
    return block.apply({"params": tree}, x, mutable=["batch_stats"])[0]


def ours(save: Literal["conv", "features"], num_chunks: int | None = None) -> Callable:
    return lambda x, params: effjax.dense_block(x, params, save=save, num_chunks=num_chunks)[0]


BLOCKS: dict[str, Callable] = {
    "plain autodiff": plain,
    "Flax layers": flax,
    "jax.checkpoint a layer": checkpoint_layers("conv1", "conv2"),
    "jax.checkpoint pass-through": checkpoint_pass_through("conv1", "conv2"),
    "jax.checkpoint pass-through, recompute conv1": checkpoint_pass_through("conv2"),
    'effjax save="conv"': ours("conv"),
    'effjax save="features"': ours("features"),
}


def train_step(block: Callable) -> Callable:
    """Loss and gradients of a block; the weights of the loss stand for the rest of the network."""

    def loss(params, x, weights):
        return jnp.sum((block(x, params) * weights).astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 1))


def make_arrays(
    layers: int, batch_size: int, image_size: int, growth_rate: int, channels: int, dtype: str
) -> tuple:
    """Parameters, an input and the weights of the loss."""
    params = init(layers, growth_rate, channels, dtype=jnp.dtype(dtype))
    shape = (batch_size, image_size, image_size)
    x = jax.random.normal(jax.random.key(1), (*shape, channels), jnp.dtype(dtype))
    weights = jax.random.normal(
        jax.random.key(2), (*shape, channels + layers * growth_rate), jnp.dtype(dtype)
    )
    return params, x, weights


def bench(
    layers: int,
    batch_size: int,
    image_size: int,
    growth_rate: int,
    channels: int,
    dtype: str,
    rounds: int,
) -> Result:
    """Times a step in every form, and reads XLA's temporary bytes."""
    args = make_arrays(layers, batch_size, image_size, growth_rate, channels, dtype)
    steps = {name: train_step(block) for name, block in BLOCKS.items()}
    foreign, notes = {}, []
    if dtype == "float32":
        torch, why = _torch.find("torch")
        foreign = {} if torch is None else _torch.block_steps(*args)
        notes = [f"Without PyTorch: {why}."] if torch is None else []
    reference = "plain autodiff"
    rows = measure(steps, args, reference=reference, rounds=rounds, foreign=foreign)
    config = {
        "layers": layers, "batch_size": batch_size, "image_size": image_size,
        "growth_rate": growth_rate, "channels": channels, "dtype": dtype, "rounds": rounds,
        "threads": threads(), "reference": reference,
    }  # fmt: skip
    title = f"dense block, {layers} layers, batch {batch_size}, {image_size}x{image_size}, {dtype}"
    notes.append(
        "XLA's CPU backend shows no savings of recomputation; `depth` has the memory of a GPU."
    )
    return Result(f"dense_block_{layers}_{dtype}", title, config, rows, notes=notes)


def results(size: Size) -> Iterator[Result]:
    if size == "published":
        depths, batch_size, image_size = (24, 48), 16, 32
    else:
        depths, batch_size, image_size = (6, 12), 4, 16
    for layers in depths:
        yield bench(layers, batch_size, image_size, 12, 24, "float32", 5)


def main(
    layers: Annotated[list[int], typer.Option(help="Depths, each a table.")] = [24, 48],  # noqa: B006
    batch_size: int = 16,
    image_size: int = 32,
    growth_rate: int = 12,
    channels: Annotated[int, typer.Option(help="Channels that enter the block.")] = 24,
    dtype: str = "float32",
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a depth.")] = None,
) -> None:
    """Times a step of the block in every form, and reads XLA's temporary bytes, in one run."""
    for depth in layers:
        publish(bench(depth, batch_size, image_size, growth_rate, channels, dtype, rounds), json)


if __name__ == "__main__":
    typer.run(main)
