"""Batch norm of complex inputs, in plain differentiable JAX: rare, so simple rather than lean."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .sync import BatchStats


def complex_batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    mask: jax.Array | None = None,
    epsilon: float = 1e-5,
    activation: str | None = None,
    residual: jax.Array | None = None,
    feature_axis: tuple[int, ...] = (-1,),
) -> tuple[jax.Array, BatchStats]:
    """`y = scale · (x − μ)/sqrt(σ² + ε) + bias` with complex μ = E[x] and real σ² = E|x − μ|².

    Arguments and results are those of `effjax.sync_batch_norm`. Two all-reduces in the forward
    pass.

    Raises:
        TypeError: with an activation, which has no meaning for complex values.
    """
    if activation is not None:
        raise TypeError(f"`activation` (={activation!r}) is not defined for complex x ({x.dtype}).")
    axes = tuple(a % x.ndim for a in feature_axis)
    reduced = tuple(a for a in range(x.ndim) if a not in axes)
    shape = tuple(x.shape[a] if a in axes else 1 for a in range(x.ndim))
    valid = jnp.broadcast_to(True if mask is None else mask, x.shape)

    def total(v: jax.Array) -> jax.Array:
        v = jnp.where(valid, v, 0).sum(reduced)
        return (
            v if axis_name is None else lax.psum(v, axis_name, axis_index_groups=axis_index_groups)
        )

    count = total(jnp.ones(x.shape, x.real.dtype))
    n = jnp.maximum(count, 1)
    mean = total(x) / n
    centered = x - mean.reshape(shape)
    var = total(jnp.square(centered.real) + jnp.square(centered.imag)) / n
    var = jnp.where(count > 0, var, 1)
    y = centered * lax.rsqrt(var + epsilon).reshape(shape)
    if scale is not None:
        y = y * scale.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    if residual is not None:
        y = y + residual
    batch = BatchStats(*map(lax.stop_gradient, (mean, var, count)))
    return y.astype(x.dtype), batch
