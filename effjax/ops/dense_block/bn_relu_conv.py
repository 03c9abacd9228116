"""Concatenation → batch norm → ReLU → convolution that keeps only its raw inputs."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import (
    as_array,
    as_integer,
    as_mask,
    as_padding,
    as_pair,
    check_shape,
)
from .._common.derivatives import forbid_forward_mode
from .._common.sharding import match_varying, with_auto_axes_over_batch, zeros
from ..batch_norm.statistics import (
    AXES,
    BatchStats,
    Reduction,
    check_epsilon,
    feature_sums,
    make_reduction,
    moments,
    normalize,
    normalize_backward,
    project,
    psum,
)
from .bottleneck import Bottleneck, bottleneck_backward, bottleneck_forward, rows_per_chunk


def bn_relu_conv(
    x: jax.Array | Sequence[jax.Array],
    scale: jax.Array,
    bias: jax.Array,
    kernel: jax.Array,
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    axis_index_groups: int | Sequence[Sequence[int]] | None = None,
    mask: jax.Array | None = None,
    epsilon: float = 1e-5,
    stats: Literal["auto", "gather", "two_psum"] = "auto",
    strides: int | Sequence[int] = 1,
    padding: Any = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    chunk_size: int | None = None,
    precision: Any = None,
) -> tuple[jax.Array, BatchStats]:
    """Apply batch norm, ReLU and a convolution to the concatenation of x.

    ``y = conv(relu(batch_norm(concatenate(x))), kernel)``

    This is the first half of a DenseNet layer, or a transition. Neither the concatenation nor the
    normalized features are kept for the backward pass. A 1x1 convolution processes a few image rows
    at a time, so that the normalized features and their gradient never exist at full size.

    Args:
        x: [N, H, W, C], or a list of such arrays to be concatenated along C; floating point, of one
            dtype.
        scale: [C].
        bias: [C].
        kernel: [kh, kw, C / feature_group_count, O]; cast to the dtype of x.
        axis_name: as in `sync_batch_norm`.
        axis_index_groups: as in `sync_batch_norm`.
        mask: boolean, broadcastable to [N, H, W, 1]: the pixels to include in the statistics.
        epsilon: as in `sync_batch_norm`.
        stats: as in `sync_batch_norm`.
        strides: as in ``jax.lax.conv_general_dilated``; an integer is for both spatial axes.
        padding: likewise.
        kernel_dilation: likewise.
        feature_group_count: likewise.
        chunk_size: number of image rows that a 1x1 convolution processes at a time. By default as
            many as take about 8 MiB of x in float32.
        precision: as in ``jax.lax.conv_general_dilated``.

    Returns:
        y [N, H', W', O] of the dtype of x, and the `BatchStats` of the C features.

    Raises:
        TypeError: for arguments that are not arrays or numbers, or not floating point.
        ValueError: for mismatched shapes, or an `axis_name` that is not mapped.

    Kept for the backward pass: the arrays of x as passed, scale, bias, kernel, and the statistics.
    The backward pass recomputes the activations from the same statistics: it is exact and needs no
    second all-reduce for them. Reverse mode only.

    References:
        efficient_densenet_pytorch; Pleiss et al., 2017 (arXiv:1707.06990).
    """
    groups = as_integer("feature_group_count", feature_group_count, 1)
    features, parameters = _check(x, scale, bias, kernel, groups)
    conv = ConvOptions(
        as_pair("strides", strides, 1),
        as_padding(padding),
        as_pair("kernel_dilation", kernel_dilation, 1),
        groups,
        precision,
    )
    # Only a convolution that multiplies each pixel by one matrix can process chunks of rows.
    shape = *features[0].shape[:3], parameters[0].shape[0]
    rows: int | None = rows_per_chunk(chunk_size, shape)
    if parameters[2].shape[:2] != (1, 1) or not conv.is_pointwise():
        rows = None
    config = _LayerConfig(
        make_reduction(axis_name, axis_index_groups, stats), check_epsilon(epsilon), conv, rows
    )
    mask = None if mask is None else check_pixel_mask(mask, features[0])

    def run(features, parameters, mask):
        features, parameters, mask = match_varying((features, parameters, mask))
        features, parameters = forbid_forward_mode("bn_relu_conv", (features, parameters))
        result: Any = _bn_relu_conv(config, features, parameters, mask)
        return result[0], lax.stop_gradient(result[1])

    y, statistics = with_auto_axes_over_batch(run, features[0])(features, parameters, mask)
    return y, as_batch_stats(*statistics)


class ConvOptions(NamedTuple):
    """A convolution of [N, H, W, C] with a kernel [kh, kw, C / groups, O]."""

    strides: tuple[int, int] = (1, 1)
    padding: Any = "SAME"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    precision: Any = None

    def __call__(self, z: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return the convolution of z, in the dtype of z."""
        return lax.conv_general_dilated(
            z,
            kernel.astype(z.dtype),
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
            precision=self.precision,
        )

    def is_pointwise(self) -> bool:
        """Return True if a 1x1 kernel multiplies each pixel by the same matrix."""
        unpadded = self.padding in ("SAME", "SAME_LOWER", "VALID", ((0, 0), (0, 0)))
        return unpadded and self.strides == (1, 1) and self.groups == 1


class _LayerConfig(NamedTuple):
    reduction: Reduction
    epsilon: float
    conv: ConvOptions
    chunk_size: int | None  # None if the convolution is not pointwise


# With y the normalized features, z = relu(y) and dz the gradient of z by the convolution:
#   g = dz where y > 0    dbias = sum(g)    dscale = sum(g * xhat)
# and dx follows from g as in batch norm. For a pointwise convolution, `bottleneck_backward` returns
# inv * scale * g, rounded to the dtype of x, and both sums. `project` completes dx.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bn_relu_conv(config: _LayerConfig, features, parameters, mask) -> Any:
    return _forward(config, features, parameters, mask)[0]


def _forward(config: _LayerConfig, features, parameters, mask):
    scale, bias, kernel = parameters
    x = jnp.concatenate(features, -1)
    mean, var, count = moments(x, mask, AXES, config.reduction)
    inv = lax.rsqrt(var + config.epsilon)
    if config.chunk_size is not None:
        y = bottleneck_forward(
            Bottleneck(x, mean, inv, *parameters), config.chunk_size, config.conv.precision
        )
    else:
        y = config.conv(jax.nn.relu(normalize(x, mean, inv, scale, bias)).astype(x.dtype), kernel)
    return (y, (mean, var, count)), (features, parameters, mask, mean, inv, count)


def _backward(config: _LayerConfig, residuals, cotangents):
    features, (scale, bias, kernel), mask, mean, inv, count = residuals
    # Without the barrier, XLA merges the recomputation with the forward pass and keeps the results.
    features, dy = lax.optimization_barrier((features, cotangents[0]))
    x = jnp.concatenate(features, -1)
    if config.chunk_size is not None:
        op = Bottleneck(x, mean, inv, scale, bias, kernel)
        dx = zeros(x.shape, x.dtype, x)
        dx, (dscale, dbias, dkernel) = bottleneck_backward(
            op, dy, dx, config.chunk_size, config.conv.precision
        )
        # New sums, because those for dx must match its rounded values.
        sums = psum(feature_sums(dx, x, mean, inv, mask, AXES), config.reduction)
        dx = project(dx, sums, x, mean, inv, mask, count)
    else:
        dx, (dscale, dbias, dkernel) = bn_relu_conv_backward(
            config.conv, dy, x, mean, inv, (scale, bias, kernel), mask, count, config.reduction
        )
    ends = [sum(f.shape[-1] for f in features[: i + 1]) for i in range(len(features) - 1)]
    dfeatures = tuple(jnp.split(dx.astype(x.dtype), ends, -1))
    dparameters = tuple(
        d.reshape(p.shape).astype(p.dtype)
        for d, p in zip((dscale, dbias, dkernel), (scale, bias, kernel), strict=True)
    )
    return dfeatures, dparameters, None


_bn_relu_conv.defvjp(_forward, _backward)


def bn_relu_conv_backward(
    conv: ConvOptions, dy, x, mean, inv, parameters: tuple, mask, count, reduction: Reduction
) -> tuple:
    """Return dx, and the gradients of ``parameters = (scale, bias, kernel)`` on this device."""
    # The activations are recomputed from x and its statistics, for all pixels at once.
    scale, bias, kernel = parameters
    y = normalize(x, mean, inv, scale, bias)
    _, conv_backward = jax.vjp(conv, jax.nn.relu(y).astype(x.dtype), kernel)
    dz, dkernel = conv_backward(dy)
    g = jnp.where(y > 0, dz.astype(inv.dtype), 0)
    dx, (dbias, dscale), _ = normalize_backward(
        g, x, mean, inv, scale, mask, count, AXES, reduction
    )
    return dx.astype(x.dtype), (dscale, dbias, dkernel)


def as_batch_stats(mean: jax.Array, var: jax.Array, count: jax.Array) -> BatchStats:
    """Return statistics of shape [1, 1, 1, C] as `BatchStats` of shape [C]."""
    return BatchStats(mean.reshape(-1), var.reshape(-1), count.reshape(()))


def check_pixel_mask(mask: Any, x: jax.Array) -> jax.Array:
    """Return a mask that broadcasts to [N, H, W, 1]."""
    return as_mask("mask", mask, "x[..., :1]", (*x.shape[:3], 1))


def as_features(x: Any) -> jax.Array:
    """Return a floating-point array [N, H, W, C]."""
    x = as_array("x", x)
    check_shape("x", x, "NHWC")
    return x


def _check(x, scale, bias, kernel, groups: int) -> tuple[tuple[jax.Array, ...], tuple]:
    features = tuple(map(as_features, x if isinstance(x, (tuple, list)) else (x,)))
    if len({(f.shape[:3], f.dtype) for f in features}) != 1:
        raise ValueError(
            "The arrays of `x` must agree in [N, H, W] and dtype, but are "
            f"{[f'{f.dtype}{f.shape}' for f in features]}."
        )
    channels = sum(f.shape[-1] for f in features)
    parameters = as_array("scale", scale), as_array("bias", bias), as_array("kernel", kernel)
    shapes = (channels,), (channels,), ("kh", "kw", channels // groups, "O")
    for name, p, shape in zip(("scale", "bias", "kernel"), parameters, shapes, strict=True):
        check_shape(name, p, shape, f"for the {channels} channels of `x`")
    return features, parameters
