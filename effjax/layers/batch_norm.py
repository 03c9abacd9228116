"""Batch norm of the linen and nnx modules, as functions of arrays.

The modules own the variables. All computation is here, so both compute the same bits.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from numpy.lib.array_utils import normalize_axis_tuple

from ..ops._common.arguments import (
    as_array,
    as_number,
    as_real_array,
    check_choice,
    check_features,
)
from ..ops._common.sharding import as_axis_names
from ..ops.batch_norm.complex import complex_batch_norm, complex_inference
from ..ops.batch_norm.statistics import as_index_groups
from ..ops.batch_norm.sync import BatchStats, batch_norm_inference, sync_batch_norm

Axes = int | Sequence[int]
Activation = Literal["relu"]
Stats = Literal["auto", "gather", "two_psum"]


def check_momentum(momentum: Any) -> None:
    """Raise an error unless momentum is None or in [0, 1]."""
    if momentum is not None:
        expected = (
            "in [0, 1], or None for the mean over all batches. It is the weight of the old value: "
            "PyTorch's 0.1 is 0.9 here"
        )
        as_number("momentum", momentum, lambda m: 0 <= m <= 1, expected)


def conversion_settings(
    axis_name: Any, axis_index_groups: Any, unbiased_running_var: Any, stats: Any
) -> dict[str, Any]:
    """Return the attributes that `convert_batch_norm` changes in every layer."""
    settings: dict[str, Any] = {}
    if axis_name is not ...:
        settings["axis_name"] = hashable_axes(axis_name)
    if axis_name is None and axis_index_groups is ...:
        axis_index_groups = None  # groups divide an axis
    if axis_index_groups is not ...:
        settings["axis_index_groups"] = as_index_groups(axis_index_groups)
    if unbiased_running_var is not None:
        settings["unbiased_running_var"] = bool(unbiased_running_var)
    if check_choice("stats", stats, None, "auto", "gather", "two_psum") is not None:
        settings["stats"] = stats
    return settings


def hashable_axes(axis_name: Any) -> Any:
    """Return `axis_name` with a list as a tuple, because nnx hashes the attributes of a module."""
    as_axis_names(axis_name)
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def feature_axes(ndim: int, axis: Axes) -> tuple[int, ...]:
    """Return the feature axes of an array of rank `ndim`, nonnegative, unique and ascending."""
    return tuple(sorted(set(normalize_axis_tuple(axis, ndim, "axis", allow_duplicate=True))))


def check_num_features(x: jax.Array, axis: Axes, *arrays: Any) -> None:
    """Raise ValueError unless x has as many features as the parameters and running statistics."""
    for a in arrays:
        if a is not None:
            check_features(x, a.size, feature_axes(x.ndim, axis))


def output_dtype(x: jax.Array, dtype: DTypeLike | None, *params: jax.Array | None) -> jnp.dtype:
    """Return `dtype`, or by default the dtype of half-precision x and else the promoted dtype."""
    # Flax promotes half-precision inputs with float32 parameters to float32, which doubles the
    # memory of everything after the layer. Here the statistics are float32 in any case.
    if dtype is not None:
        dtype, is_complex = jnp.dtype(dtype), jnp.iscomplexobj(x)
        # A cast of complex x to a real dtype would drop the imaginary part.
        if not jnp.issubdtype(dtype, jnp.complexfloating if is_complex else jnp.inexact):
            expected = "complex for complex `x`" if is_complex else "floating point or complex"
            raise ValueError(f"`dtype` (={dtype}) must be {expected}.")
        return dtype
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return x.dtype
    dtype = jnp.result_type(x, *(p for p in params if p is not None))
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)
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
    """Normalize x with its own statistics; return the result and the statistics."""
    out = output_dtype(x, dtype, scale, bias)
    axes = feature_axes(x.ndim, axis)
    x = x.astype(jnp.promote_types(x.dtype, out))  # keeps the precision of x for the statistics
    scale, bias = (_features(p, x, axes) for p in (scale, bias))
    kwargs: dict[str, Any] = dict(
        axis_name=axis_name, axis_index_groups=axis_index_groups, mask=mask, epsilon=epsilon,
        activation=activation, residual=_as_residual(residual, x), feature_axis=axes,
    )  # fmt: skip
    if jnp.iscomplexobj(x):
        y, batch = complex_batch_norm(x, scale, bias, **kwargs)
    else:
        y, batch = sync_batch_norm(x, scale, bias, stats=stats, **kwargs)
    return y.astype(out), batch


def normalize_inference(
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
    """Normalize x with given (running) statistics."""
    # A complex running mean, from complex batches, makes a real input complex.
    out = output_dtype(x, dtype, scale, bias, mean if jnp.iscomplexobj(mean) else None)
    axes = feature_axes(x.ndim, axis)
    x = x.astype(jnp.promote_types(x.dtype, out))
    mean, var, scale, bias = (_features(p, x, axes) for p in (mean, var, scale, bias))
    normalized = complex_inference if jnp.iscomplexobj(x) else batch_norm_inference
    y = normalized(
        x, mean, var, scale, bias, epsilon=epsilon, activation=activation,
        residual=_as_residual(residual, x), feature_axis=axes,
    )  # fmt: skip
    return y.astype(out)


def update_running_stats(
    mean: jax.Array,
    var: jax.Array,
    num_batches: jax.Array | None,
    batch: BatchStats,
    *,
    momentum: float | None,
    unbiased: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the running statistics after one batch.

    ``r = momentum * r + (1 - momentum) * batch``, or with ``momentum=None`` the mean over all
    batches, ``r + (batch - r) / k``, where k is the number of batches that had a value of the
    channel. Channels with a count of 0 keep their statistics. With `unbiased`, the variance is
    first multiplied by n / (n - 1), or by 1 for n = 1. No gradient flows through the result.
    """
    batch_mean, batch_var, count = batch
    count = count.astype(batch_var.dtype)
    if unbiased:
        batch_var = batch_var * (count / jnp.maximum(count - 1, 1))
    has_values = _flat(count > 0, mean)
    if momentum is None:
        assert num_batches is not None
        num_batches = num_batches + has_values.astype(num_batches.dtype)
        keep = 1 - 1 / jnp.maximum(num_batches, 1)
    else:
        keep = momentum

    def merge(old: jax.Array, new: jax.Array) -> jax.Array:
        new = keep * old + (1 - keep) * _flat(new, old)
        dtype = jnp.promote_types(old.dtype, jnp.complex64) if jnp.iscomplexobj(new) else old.dtype
        return lax.stop_gradient(jnp.where(has_values, new, old).astype(dtype))

    return merge(mean, batch_mean), merge(var, batch_var), num_batches


def _features(p: Any, x: jax.Array, axes: tuple[int, ...]) -> Any:
    # nnx stores the parameters of several feature axes as one flat axis.
    return None if p is None else jnp.reshape(p, tuple(x.shape[a] for a in axes))


def _flat(v: jax.Array, like: jax.Array) -> jax.Array:
    return v if v.ndim == 0 else v.reshape(like.shape)


def _as_residual(v: ArrayLike | None, x: jax.Array) -> jax.Array | None:
    if v is None:
        return None
    if jnp.iscomplexobj(x):
        return as_array("residual", v, jnp.number).astype(x.dtype)
    return as_real_array("residual", v).astype(x.dtype)
