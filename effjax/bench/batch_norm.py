"""Batch norm forward and backward: effjax beside Flax, in time, accuracy and bytes kept."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from flax import linen, nnx

import effjax
from effjax.memory import residual_bytes

from ._measure import measure, threads
from ._result import Result, Size, publish

Norm = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def flax_norm(fast: bool, relu: bool) -> Norm:
    def norm(x, scale, bias):
        module = linen.BatchNorm(use_running_average=False, use_fast_variance=fast, dtype=x.dtype)
        variables = {"params": {"scale": scale, "bias": bias}}
        y = module.apply(variables, x, mutable=["batch_stats"])[0]
        return linen.relu(y) if relu else y

    return norm


def flax_nnx_norm(relu: bool) -> Norm:
    def norm(x, scale, bias):
        module = nnx.BatchNorm(
            x.shape[-1], use_running_average=False, dtype=x.dtype, rngs=nnx.Rngs(0)
        )
        module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
        y = module(x)
        return nnx.relu(y) if relu else y

    return norm


def our_norm(relu: bool) -> Norm:
    activation = "relu" if relu else None
    return lambda x, scale, bias: effjax.sync_batch_norm(x, scale, bias, activation=activation)[0]


def train_step(norm: Norm) -> Callable:
    def loss(x, scale, bias, weights):
        return jnp.sum((norm(x, scale, bias) * weights).astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def bench(shape: tuple[int, ...], dtype: str, relu: bool, rounds: int) -> Result:
    """Time, and what autodiff keeps between forward and backward pass."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
    weights = jax.random.normal(jax.random.key(1), shape, jnp.dtype(dtype))
    scale, bias = jnp.ones(shape[-1]), jnp.zeros(shape[-1])
    norms = {
        "Flax BatchNorm": flax_norm(True, relu),
        "Flax BatchNorm, use_fast_variance=False": flax_norm(False, relu),
        "Flax nnx.BatchNorm": flax_nnx_norm(relu),
        "effjax.sync_batch_norm": our_norm(relu),
    }
    steps = {name: train_step(norm) for name, norm in norms.items()}
    reference = "Flax BatchNorm"
    rows = measure(steps, (x, scale, bias, weights), reference=reference, rounds=rounds)
    for row in rows:
        kept = residual_bytes(norms[row["name"]], x, scale, bias).bytes
        row["kept"] = round(kept / x.nbytes, 2)
    config = {"shape": shape, "dtype": dtype, "relu": relu, "rounds": rounds}
    return Result(
        f"batch_norm_{dtype}",
        f"batch norm{' + ReLU' if relu else ''}, {shape}, {dtype}",
        config | {"threads": threads(), "reference": reference},
        rows,
        notes=["kept: for the backward pass, in multiples of the input's bytes."],
    )


def results(size: Size) -> Iterator[Result]:
    shape, rounds = ((32, 56, 56, 64), 10) if size == "published" else ((8, 28, 28, 64), 7)
    for dtype in ("float32", "bfloat16"):
        yield bench(shape, dtype, True, rounds)


def main(
    batch_size: int = 32,
    image_size: int = 56,
    channels: int = 64,
    dtype: str = "float32",
    relu: Annotated[bool, typer.Option(help="With the ReLU that follows.")] = True,
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Times forward and backward, and counts the bytes that autodiff keeps in between."""
    publish(bench((batch_size, image_size, image_size, channels), dtype, relu, rounds), json)


if __name__ == "__main__":
    typer.run(main)
