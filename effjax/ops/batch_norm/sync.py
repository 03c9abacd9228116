"""Batch norm with statistics over all devices and a memory-efficient backward pass."""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._common.arguments import (
    as_array,
    as_mask,
    as_number,
    check_choice,
    check_shape,
    with_torch_hints,
)
from .._common.derivatives import forbid_forward_mode
from .._common.dtypes import accumulation_dtype
from .._common.sharding import (
    cast_to_varying,
    match_varying,
    shard_like_features,
    sum_cotangent,
    varying_axes,
)
from .statistics import BatchStats as BatchStats
from .statistics import (
    Reduction,
    check_epsilon,
    make_reduction,
    moments,
    normalize,
    normalize_backward,
    reduced_axes,
)

# Name of the statistics for policies of `jax.checkpoint`. Saving them avoids a second all-reduce.
STATISTICS = "effjax.batch_norm.statistics"


@with_torch_hints
def sync_batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    axis_index_groups: int | Sequence[Sequence[int]] | None = None,
    mask: jax.Array | None = None,
    epsilon: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: jax.Array | None = None,
    feature_axis: int | Sequence[int] = -1,
    stats: Literal["auto", "gather", "two_psum"] = "auto",
) -> tuple[jax.Array, BatchStats]:
    """Normalize x with the statistics of the whole batch, over all devices of `axis_name`.

    ``y = act((x - mean) / sqrt(var + epsilon) * scale + bias + residual)``

    The statistics are float32 for half-precision x and of the dtype of x otherwise. Local means and
    squared deviations are merged by their counts, which stays accurate where the mean is much
    larger than the deviation. The forward pass does one all-reduce (two small ones above a traffic
    threshold), the backward pass one of two numbers per feature. This holds under ``jit`` too, if
    the type of x names the mesh, as it does where the arguments of ``jit`` are sharded arrays.

    Args:
        x: floating point; sizes may be 0. With `axis_name`, x may be a single example without a
            batch axis. Without it, such an example is its own mean, and y is ``act(bias +
            residual)``.
        scale: gamma, of the shape of the feature axes. None means 1.
        bias: beta, of the shape of the feature axes. None means 0.
        axis_name: name or names of the mapped axes (pmap, shard_map, vmap) that share statistics.
            None means the values on this device; under plain ``jit`` with a sharded x, that is the
            global batch.
        axis_index_groups: groups of device indices along the single `axis_name`, each with its own
            statistics, or the number of neighboring devices in a group. Supported by pmap and
            ``shard_map(check_vma=False)``; elsewhere use a mesh with two axes.
        mask: boolean, broadcastable to x: the values to include in the statistics. All values are
            normalized.
        epsilon: added to the variance; positive.
        activation: ``"relu"`` or None.
        residual: added before the activation; of the shape and dtype of x.
        feature_axis: the axis or axes that are not reduced.
        stats: how statistics are merged. ``"gather"`` is one all-reduce of 2C·devices numbers,
            ``"two_psum"`` two of C numbers; with a mask the counts are added to the first one.
            ``"auto"`` chooses the former up to 256 KiB. Under ``jit`` the devices are those of the
            mesh.

    Returns:
        y of the shape and dtype of x, and `BatchStats` (with the biased variance), through which no
        gradient flows. A feature without counted values has mean 0 and variance 1.

    Raises:
        TypeError: for arguments that are not arrays or numbers, arrays that are not floating point
            (boolean for `mask`), or a `residual` whose dtype differs from that of x.
        ValueError: for mismatched shapes, an unknown `activation` or `stats`, an invalid
            `feature_axis`, `epsilon` or `axis_index_groups`, or an `axis_name` that is not mapped.

    Kept for the backward pass: x in its own dtype, mean, inverse standard deviation, count, scale,
    bias and the mask. With a residual and an activation, y is kept too. Neither the normalized
    value nor a ReLU mask is kept.

    Gradients are those of the sum of the losses of all devices, as for ``jax.grad`` of a loss that
    is local to each device. Reverse mode only.

    References:
        SyncBatchNorm of NVIDIA apex; Ioffe & Szegedy, 2015 (arXiv:1502.03167); Chan, Golub &
        LeVeque, 1983.
    """
    epsilon = check_epsilon(epsilon)
    reduction = make_reduction(axis_name, axis_index_groups, stats)
    x, scale, bias, residual, axes = _check(x, scale, bias, residual, activation, feature_axis)
    static = _Static(reduction, axes, epsilon, activation == "relu", residual is not None)
    mask = None if mask is None else as_mask("mask", mask, "x", x.shape)
    x, residual, mask = match_varying((x, residual, mask))
    features = tuple(a for a in range(x.ndim) if a not in axes)
    scale, bias = (
        None if p is None else shard_like_features(cast_to_varying(p), x, features)
        for p in (scale, bias)
    )
    arrays = forbid_forward_mode("sync_batch_norm", (x, scale, bias, residual))
    result: Any = _batch_norm(static, *arrays, mask)
    shape = feature_shape(x, axes)
    y, (mean, var, count) = result[0], lax.stop_gradient(result[1])
    if count.size == 1:
        count = count.reshape(())
    else:  # a mask may differ along one feature axis and not along another
        count = jnp.broadcast_to(count, mean.shape).reshape(shape)
    return y, BatchStats(mean.reshape(shape), var.reshape(shape), count)


@with_torch_hints
def batch_norm_inference(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: jax.Array | None = None,
    feature_axis: int | Sequence[int] = -1,
) -> jax.Array:
    """Normalize x with given statistics, as batch norm does in evaluation.

    ``y = act((x - mean) / sqrt(var + epsilon) * scale + bias + residual)``

    Plain JAX: differentiable in every argument, in forward and reverse mode, without collectives.

    Args:
        x: floating point, rank 1 or more.
        mean: floating point, of the shape of the feature axes.
        var: floating point, of the shape of the feature axes.
        scale: gamma, of the shape of the feature axes. None means 1.
        bias: beta, of the shape of the feature axes. None means 0.
        epsilon: added to the variance; 0 or positive.
        activation: ``"relu"`` or None.
        residual: added before the activation; of the shape and dtype of x.
        feature_axis: the axis or axes that `mean` and `var` describe.

    Returns:
        y of the shape and dtype of x, computed in float32 or wider.

    Raises:
        TypeError: as in `sync_batch_norm`.
        ValueError: as in `sync_batch_norm`.
    """
    x, scale, bias, residual, axes = _check(x, scale, bias, residual, activation, feature_axis)
    epsilon = as_number("epsilon", epsilon, lambda e: 0 <= e < math.inf, "at least 0")
    features = feature_shape(x, axes)
    dtype = accumulation_dtype(x)
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    mean, var = (
        _as_feature_array(name, v, features).astype(dtype).reshape(shape)
        for name, v in (("mean", mean), ("var", var))
    )
    y = normalize(x, mean, lax.rsqrt(var + epsilon), *_keepdims(shape, scale, bias))
    y = y if residual is None else y + residual.astype(dtype)
    return (jax.nn.relu(y) if activation else y).astype(x.dtype)


class _Static(NamedTuple):
    reduction: Reduction
    axes: tuple[int, ...]  # the reduced axes
    epsilon: float
    relu: bool
    has_residual: bool


# With xhat = (x - mean) * inv, g = dy where y > 0, and N values counted over all devices:
#   dbias = sum(g)    dscale = sum(g * xhat)
#   dx = scale * inv * (g - [counted] * (sum(g) + xhat * sum(g * xhat)) / N)
# The two sums over all devices are one all-reduce of 2C numbers. They are also the gradients of
# replicated parameters.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batch_norm(static: _Static, x, scale, bias, residual, mask) -> Any:
    return _forward(static, x, scale, bias, residual, mask)[0]


def _forward(static: _Static, x, scale, bias, residual, mask):
    mean, var, count = checkpoint_name(moments(x, mask, static.axes, static.reduction), STATISTICS)
    inv = lax.rsqrt(var + static.epsilon)
    y = normalize(x, mean, inv, *_keepdims(mean.shape, scale, bias))
    y = y if residual is None else y + residual.astype(y.dtype)
    y = (jnp.maximum(y, 0) if static.relu else y).astype(x.dtype)
    # The backward pass needs the sign of y. Without a residual it is recomputed from x.
    kept_y = y if static.relu and static.has_residual else None
    return (y, (mean, var, count)), (x, scale, bias, mask, mean, inv, count, kept_y)


def _backward(static: _Static, residuals, cotangents):
    x, scale, bias, mask, mean, inv, count, kept_y = residuals
    dy, _ = cotangents
    wide_scale, wide_bias = _keepdims(mean.shape, scale, bias)
    g = dy.astype(mean.dtype)
    if static.relu:
        y = normalize(x, mean, inv, wide_scale, wide_bias) if kept_y is None else kept_y
        g = jnp.where(y > 0, g, 0)
    # If the types say that a parameter is replicated, its gradient is the sum over all devices,
    # which the gradient of x needs anyway.
    names = set(static.reduction.axis_names)
    has_types = bool(names) and not static.reduction.groups and names <= varying_axes(x)
    replicated = [
        has_types and p is not None and not names & varying_axes(p) for p in (bias, scale)
    ]
    same_scale = scale is None or replicated[1]
    dx, local, total = normalize_backward(
        g, x, mean, inv, wide_scale, mask, count, static.axes, static.reduction, same_scale
    )
    dx = sum_cotangent(dx, x).astype(x.dtype)
    dbias, dscale = (
        None
        if p is None
        else sum_cotangent(total[i] if replicated[i] and same_scale else local[i], p)
        .reshape(p.shape)
        .astype(p.dtype)
        for i, p in enumerate((bias, scale))
    )
    dresidual = sum_cotangent(g, x).astype(x.dtype) if static.has_residual else None
    return dx, dscale, dbias, dresidual, None


_batch_norm.defvjp(_forward, _backward)


def feature_shape(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the axes that are not reduced."""
    return tuple(n for a, n in enumerate(x.shape) if a not in axes)


def _keepdims(shape, *parameters):
    return (None if p is None else p.reshape(shape) for p in parameters)


def _check(x, scale, bias, residual, activation, feature_axis) -> tuple:
    """Validate the shared arguments; return the arrays and the reduced axes."""
    x = as_array("x", x)
    axes = reduced_axes(x, feature_axis)
    features = feature_shape(x, axes)
    scale, bias = (
        None if p is None else _as_feature_array(name, p, features)
        for name, p in (("scale", scale), ("bias", bias))
    )
    check_choice("activation", activation, None, "relu", hint="; apply others to the result")
    if residual is not None:
        residual = as_array("residual", residual)
        check_shape("residual", residual, x.shape, "the shape of `x`")
        if residual.dtype != x.dtype:
            raise TypeError(
                f"`residual` must have the dtype of `x`, {x.dtype}, but has {residual.dtype}; cast "
                "one of them."
            )
    return x, scale, bias, residual, axes


def _as_feature_array(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    value = as_array(name, value)
    check_shape(name, value, shape, "the shape of the feature axes, by default the last one")
    return value
