"""What the linen and the nnx `BatchNorm` have in common, as functions of arrays.

The adapters own the variables; everything they compute is here, so that both compute the same bits.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..ops._common.arguments import (
    as_array,
    as_callable,
    as_dtype,
    as_flag,
    as_number,
    check_choice,
)
from ..ops._common.sharding import as_axis_names
from ..ops.batch_norm.complex import complex_batch_norm, complex_inference
from ..ops.batch_norm.statistics import as_axes, as_index_groups
from ..ops.batch_norm.sync import BatchStats, batch_norm_inference, sync_batch_norm

Axes = int | Sequence[int]
Activation = Literal["relu"]
Stats = Literal["auto", "gather", "two_psum"]


MOST_AXES = 64  # of an array, in NumPy


def check_options(
    *,
    use_running_average: Any,
    axis: Any,
    momentum: Any,
    epsilon: Any,
    dtype: Any,
    param_dtype: Any,
    bias_init: Any,
    scale_init: Any,
    axis_name: Any,
    axis_index_groups: Any,
    activation: Any,
    stats: Any,
    **flags: Any,
) -> None:
    """Checks what a constructor was given: what would fail at the first call, or not at all."""
    if use_running_average is not None:
        as_flag("use_running_average", use_running_average)
    as_axes("axis", axis, MOST_AXES)
    check_momentum(momentum)
    as_number("epsilon", epsilon, lambda e: 0 <= e < math.inf, "at least 0")
    if dtype is not None:
        as_dtype("dtype", dtype, jnp.inexact)
    as_dtype("param_dtype", param_dtype, jnp.inexact)
    as_callable("bias_init", bias_init)
    as_callable("scale_init", scale_init)
    as_axis_names(axis_name)
    as_index_groups(axis_index_groups)
    check_choice("activation", activation, None, "relu", hint="; apply others to the result")
    check_choice("stats", stats, "auto", "gather", "two_psum")
    for name, value in flags.items():
        as_flag(name, value)


def check_momentum(momentum: Any) -> None:
    if momentum is not None:
        wanted = (
            "in [0, 1], or None for the mean over all batches; it is the share of the old value: "
            "PyTorch's 0.1 is 0.9 here"
        )
        as_number("momentum", momentum, lambda m: 0 <= m <= 1, wanted)


def converted_settings(
    axis_name: Any, axis_index_groups: Any, unbiased_running_var: Any, stats: Any
) -> dict[str, Any]:
    """What `convert_batch_norm` changes in every layer, checked; by default nothing."""
    settings: dict[str, Any] = {}
    if axis_name is not ...:
        settings["axis_name"] = hashable_axes(axis_name)
    if axis_name is None and axis_index_groups is ...:
        axis_index_groups = None  # without an axis there are no groups of it
    if axis_index_groups is not ...:
        settings["axis_index_groups"] = as_index_groups(axis_index_groups)
    if unbiased_running_var is not None:
        settings["unbiased_running_var"] = as_flag("unbiased_running_var", unbiased_running_var)
    if check_choice("stats", stats, None, "auto", "gather", "two_psum") is not None:
        settings["stats"] = stats
    return settings


def hashable_axes(axis_name: Any) -> Any:
    """`axis_name` as it is, but for a list: nnx hashes the attributes of a module."""
    as_axis_names(axis_name)
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def feature_axes(ndim: int, axis: Axes) -> tuple[int, ...]:
    """The feature axes of an array of rank `ndim`: positive, without duplicates, ascending."""
    return tuple(sorted(set(as_axes("axis", axis, ndim))))


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
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"`dtype` (={dtype}) must be complex, or None, for complex x ({x.dtype}).")
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
        activation=activation, residual=_as_residual(residual, x), feature_axis=axes,
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
    # A complex mean, which a complex batch has left, makes a real input complex.
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


def _as_residual(v: ArrayLike | None, x: jax.Array) -> jax.Array | None:
    """In x's dtype, which takes nothing away but precision."""
    if v is None:
        return None
    v = as_array("residual", v, jnp.number)
    if jnp.iscomplexobj(v) and not jnp.iscomplexobj(x):
        raise TypeError(f"`residual` is {v.dtype}, but `x` is {x.dtype}; pass its real part.")
    return v.astype(x.dtype)
