"""What the linen and the nnx `BatchNorm` have in common, as functions of arrays.

The adapters own the variables; everything they compute is here, so that both compute the same bits.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..ops.batch_norm.complex import complex_batch_norm
from ..ops.batch_norm.sync import BatchStats, batch_norm_inference, sync_batch_norm

Axes = int | Sequence[int]
Activation = Literal["relu"]
Stats = Literal["auto", "gather", "two_psum"]


def feature_axes(ndim: int, axis: Axes) -> tuple[int, ...]:
    """The feature axes of an array of rank `ndim`: positive, without duplicates, ascending."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                f"`axis` (={axis}) is out of range for an input of rank {ndim}: "
                f"every entry must lie in [{-ndim}, {ndim - 1}]."
            )
    return tuple(sorted({a % ndim for a in axes}))


def output_dtype(x: jax.Array, dtype: DTypeLike | None, *params: jax.Array | None) -> jnp.dtype:
    """`dtype` where it is given; else x's dtype for float16 and bfloat16, or the promoted dtype.

    Flax promotes half inputs with float32 parameters to float32, which doubles the memory of
    everything after the layer; the statistics are float32 here in any case.
    """
    if dtype is not None:
        dtype = jnp.dtype(dtype)
    elif jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        dtype = x.dtype
    else:
        dtype = jnp.result_type(x, *(p for p in params if p is not None))
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(dtype, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"`dtype` (={dtype}) must be a floating-point or complex dtype.")
    return dtype


def normalize_batch(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    dtype: DTypeLike | None,
    axis: Axes,
    epsilon: float,
    activation: Activation | None,
    residual: ArrayLike | None,
    mask: ArrayLike | None,
    axis_name: Any,
    axis_index_groups: Any,
    stats: Stats,
) -> tuple[jax.Array, BatchStats]:
    """Training form: `x` normalized with its own statistics, and these statistics."""
    out = output_dtype(x, dtype, scale, bias)
    axes = feature_axes(x.ndim, axis)
    x = x.astype(jnp.promote_types(x.dtype, out))  # statistics at x's own precision or better
    scale, bias = (_features(p, x, axes) for p in (scale, bias))
    kwargs: dict[str, Any] = dict(
        axis_name=axis_name, axis_index_groups=axis_index_groups, mask=mask, epsilon=epsilon,
        activation=activation, residual=_cast(residual, x.dtype), feature_axis=axes,
    )  # fmt: skip
    if jnp.iscomplexobj(x):
        y, batch = complex_batch_norm(x, scale, bias, **kwargs)
    else:
        y, batch = sync_batch_norm(x, scale, bias, stats=stats, **kwargs)
    return y.astype(out), batch


def normalize_with(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    dtype: DTypeLike | None,
    axis: Axes,
    epsilon: float,
    activation: Activation | None,
    residual: ArrayLike | None,
) -> jax.Array:
    """Inference form: `x` normalized with the given (running) statistics."""
    out = output_dtype(x, dtype, scale, bias)
    axes = feature_axes(x.ndim, axis)
    x = x.astype(jnp.promote_types(x.dtype, out))
    mean, var, scale, bias = (_features(p, x, axes) for p in (mean, var, scale, bias))
    y = batch_norm_inference(
        x, mean, var, scale, bias, epsilon=epsilon, activation=activation,
        residual=_cast(residual, x.dtype), feature_axis=axes,
    )  # fmt: skip
    return y.astype(out)


def updated_running_stats(
    mean: jax.Array,
    var: jax.Array,
    num_batches: jax.Array | None,
    batch: BatchStats,
    *,
    momentum: float | None,
    unbiased: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Running statistics after one batch; channels with a count of 0 keep theirs.

    `r ← momentum·r + (1 − momentum)·batch`, or with `momentum=None` the mean over all batches so
    far, `r ← r + (batch − r)/k` with k the number of batches that had a value of this channel. With
    `unbiased` the variance is first multiplied by n/(n − 1) (by 1 where n is 1).
    Nothing here is differentiated: `stop_gradient` stands before the results.
    """
    batch_mean, batch_var, count = batch
    count = count.astype(batch_var.dtype)
    if unbiased:
        batch_var = batch_var * (count / jnp.maximum(count - 1, 1))
    seen = _flat(count > 0, mean)
    if momentum is None:
        assert num_batches is not None
        num_batches = num_batches + seen.astype(num_batches.dtype)
        keep = 1 - 1 / jnp.maximum(num_batches, 1)
    else:
        keep = momentum

    def merge(old: jax.Array, new: jax.Array) -> jax.Array:
        new = keep * old + (1 - keep) * _flat(new, old)
        dtype = jnp.promote_types(old.dtype, jnp.complex64) if jnp.iscomplexobj(new) else old.dtype
        return lax.stop_gradient(jnp.where(seen, new, old).astype(dtype))

    return merge(mean, batch_mean), merge(var, batch_var), num_batches


def _features(p: Any, x: jax.Array, axes: tuple[int, ...]) -> Any:
    """A parameter in the shape of the feature axes (nnx keeps several feature axes flat)."""
    return None if p is None else jnp.reshape(p, tuple(x.shape[a] for a in axes))


def _flat(v: jax.Array, like: jax.Array) -> jax.Array:
    return v if v.ndim == 0 else v.reshape(like.shape)


def _cast(v: ArrayLike | None, dtype: DTypeLike) -> jax.Array | None:
    return None if v is None else jnp.asarray(v, dtype)
