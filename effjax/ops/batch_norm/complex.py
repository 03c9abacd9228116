"""Batch norm of complex inputs, in plain differentiable JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import as_mask
from .statistics import BatchStats, check_epsilon, make_reduction, psum, reduced_axes


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
    """Normalize complex x with the complex mean E[x] and the real variance E|x - mean|².

    ``y = scale * (x - mean) / sqrt(var + epsilon) + bias + residual``

    Arguments and results are those of `effjax.sync_batch_norm` except that there is no `stats`, and
    `count` has one entry per feature. XLA compiles the forward pass to two all-reduces, or three
    with a mask.

    Raises:
        TypeError: with an activation, which is undefined for complex values.
    """
    reduction = make_reduction(axis_name, axis_index_groups, "two_psum")
    axes = reduced_axes(x, feature_axis)
    counted = jnp.broadcast_to(
        True if mask is None else as_mask("mask", mask, "x", x.shape), x.shape
    )
    # A masked value may be NaN. Its gradient is zero, but autodiff would multiply zero by NaN.
    is_kept = None if mask is None else counted | jnp.isfinite(x)
    finite_x = x if is_kept is None else jnp.where(is_kept, x, 0)

    def total(v: jax.Array) -> jax.Array:
        return psum(jnp.where(counted, v, 0).sum(axes), reduction)

    count = total(jnp.ones(x.shape, x.real.dtype))
    n = jnp.maximum(count, 1)
    mean = total(finite_x) / n
    centered = finite_x - jnp.expand_dims(mean, axes)
    var = total(jnp.square(centered.real) + jnp.square(centered.imag)) / n
    var = jnp.where(count > 0, var, 1)
    y = complex_inference(
        finite_x, mean, var, scale, bias, epsilon=check_epsilon(epsilon), activation=activation,
        residual=residual, feature_axis=feature_axis,
    )  # fmt: skip
    y = y if is_kept is None else jnp.where(is_kept, y, x)
    return y, BatchStats(*map(lax.stop_gradient, (mean, var, count)))


def complex_inference(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-5,
    activation: str | None = None,
    residual: jax.Array | None = None,
    feature_axis: tuple[int, ...] = (-1,),
) -> jax.Array:
    """Normalize complex x with given statistics, as `effjax.batch_norm_inference` does real x."""
    if activation is not None:
        raise TypeError(f"`activation` (={activation!r}) is not defined for complex x ({x.dtype}).")
    axes = reduced_axes(x, feature_axis)
    mean, inv = (jnp.expand_dims(v, axes) for v in (mean, lax.rsqrt(var + epsilon)))
    y = (x - mean) * inv
    y = y if scale is None else y * jnp.expand_dims(scale, axes)
    y = y if bias is None else y + jnp.expand_dims(bias, axes)
    y = y if residual is None else y + residual
    return y.astype(x.dtype)
