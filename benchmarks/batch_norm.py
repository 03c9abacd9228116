"""Batch norm forward and backward, effjax's and Flax's: time, accuracy and bytes kept."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import linen, nnx

import effjax
from effjax.memory import residual_bytes

from .measure import time_steps
from .results import Result, Size

REFERENCE = "Flax BatchNorm"
Norm = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of x, scale and bias


def linen_norm(use_fast_variance: bool) -> Norm:
    def norm(x, scale, bias):
        module = linen.BatchNorm(
            use_running_average=False, use_fast_variance=use_fast_variance, dtype=x.dtype
        )
        variables = {"params": {"scale": scale, "bias": bias}}
        return linen.relu(module.apply(variables, x, mutable=["batch_stats"])[0])

    return norm


def nnx_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    module = nnx.BatchNorm(x.shape[-1], use_running_average=False, dtype=x.dtype, rngs=nnx.Rngs(0))
    module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
    return nnx.relu(module(x))


def effjax_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return effjax.sync_batch_norm(x, scale, bias, activation="relu")[0]


NORMS: dict[str, Norm] = {
    REFERENCE: linen_norm(use_fast_variance=True),
    "Flax BatchNorm, use_fast_variance=False": linen_norm(use_fast_variance=False),
    "Flax nnx.BatchNorm": nnx_norm,
    "effjax.sync_batch_norm": effjax_norm,
}


def train_step(norm: Norm) -> Callable:
    def loss(x, scale, bias, weights):
        return jnp.sum((norm(x, scale, bias) * weights).astype(jnp.float32))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def measure_norms(shape: tuple[int, ...], dtype: str, rounds: int) -> Result:
    """Time all norms, and count the bytes autodiff keeps between forward and backward pass."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
    weights = jax.random.normal(jax.random.key(1), shape, jnp.dtype(dtype))
    scale, bias = jnp.ones(shape[-1]), jnp.zeros(shape[-1])
    steps = {name: train_step(norm) for name, norm in NORMS.items()}
    result = time_steps(
        f"batch_norm_{dtype}",
        f"batch norm + ReLU, {shape}, {dtype}",
        {"shape": shape, "dtype": dtype, "relu": True},
        steps,
        (x, scale, bias, weights),
        reference=REFERENCE,
        rounds=rounds,
        notes=["kept: for the backward pass, in multiples of the input's bytes."],
    )
    for row in result.rows:
        kept = residual_bytes(NORMS[row["name"]], x, scale, bias).bytes
        row["kept"] = round(kept / x.nbytes, 2)
    return result


def run(size: Size) -> Iterator[Result]:
    shape, rounds = ((32, 56, 56, 64), 10) if size == "published" else ((8, 28, 28, 64), 7)
    for dtype in ("float32", "bfloat16"):
        yield measure_norms(shape, dtype, rounds)
