"""Concat → batch norm → ReLU → convolution that keeps only its raw inputs for the backward pass."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common.arguments import as_array, as_integer, as_padding, as_pair, as_precision
from .._common.sharding import auto_shard_batch, match_varying, zeros
from ..batch_norm.statistics import (
    AXES,
    BatchStats,
    Reduction,
    check_epsilon,
    check_mask,
    feature_sums,
    make_reduction,
    moments,
    normalize,
    normalize_backward,
    project,
    psum,
)
from .wide import Wide, default_chunks, wide_conv, wide_conv_backward


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
    num_chunks: int | None = None,
    precision: Any = None,
) -> tuple[jax.Array, BatchStats]:
    """Convolves the normalized, rectified concatenation of x, and keeps neither of the two.

    ``y = conv(relu(batch_norm(concatenate(x))), kernel)``

    This is the bottleneck of a DenseNet. A 1x1 convolution is worked through in slices of rows, so
    that neither the normalized features nor their gradient exist at full size in either pass.

    Args:
        x: [N, H, W, C], or a list of such arrays that are concatenated along C; floating point, one
            dtype.
        scale, bias: [C].
        kernel: [kh, kw, C / feature_group_count, O]; computed in x's dtype.
        axis_name, axis_index_groups, epsilon, stats: as in `sync_batch_norm`.
        mask: boolean, broadcastable to [N, H, W, 1]: which pixels count in the statistics.
        strides, padding, kernel_dilation, feature_group_count, precision: as in
            ``jax.lax.conv_general_dilated``; a single number stands for both spatial axes.
        num_chunks: slices of rows of a 1x1 convolution; by default slices of about 8 MiB in
            float32.

    Returns:
        y [N, H', W', O] of x's dtype, and the `BatchStats` of the C features.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values; an `axis_name` that is not
            mapped.

    Kept for the backward pass: the arrays of x as they came (not their concatenation), scale, bias,
    kernel, and the statistics. The recompute reuses the statistics: it is exact, and does no second
    all-reduce. Reverse mode only.

    References:
        efficient_densenet_pytorch; Pleiss et al., 2017 (arXiv:1707.06990).
    """
    groups = as_integer("feature_group_count", feature_group_count, 1)
    features, parameters = _check(x, scale, bias, kernel, groups)
    conv = _Conv(
        as_pair("strides", strides, 1),
        as_padding(padding),
        as_pair("kernel_dilation", kernel_dilation, 1),
        groups,
        as_precision(precision, features[0].dtype),
    )
    slices: int | None = check_chunks(num_chunks, (*features[0].shape[:3], parameters[0].shape[0]))
    if parameters[2].shape[:2] != (1, 1) or conv.changes_pixels():
        slices = None
    static = _Static(
        make_reduction(axis_name, axis_index_groups, stats), check_epsilon(epsilon), conv, slices
    )
    mask = None if mask is None else check_pixel_mask(mask, features[0])

    def run(features, parameters, mask):
        result: Any = _bn_relu_conv(static, *match_varying((features, parameters, mask)))
        return result[0], lax.stop_gradient(result[1])

    y, statistics = auto_shard_batch(run, features[0])(features, parameters, mask)
    return y, as_batch_stats(*statistics)


class _Conv(NamedTuple):
    strides: tuple[int, int]
    padding: Any
    dilation: tuple[int, int]
    groups: int
    precision: Any

    def __call__(self, z: jax.Array, kernel: jax.Array) -> jax.Array:
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

    def changes_pixels(self) -> bool:
        """Whether a 1x1 kernel would do more than multiply every pixel by one matrix."""
        padded = self.padding not in ("SAME", "SAME_LOWER", "VALID", ((0, 0), (0, 0)))
        return padded or self.strides != (1, 1) or self.groups != 1


class _Static(NamedTuple):
    reduction: Reduction
    epsilon: float
    conv: _Conv
    num_chunks: int | None  # None: not a 1x1 convolution, done in one piece


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bn_relu_conv(static: _Static, features, parameters, mask) -> Any:
    return _forward(static, features, parameters, mask)[0]


def _forward(static: _Static, features, parameters, mask):
    scale, bias, kernel = parameters
    x = jnp.concatenate(features, -1)
    mean, var, count = moments(x, mask, AXES, static.reduction)
    inv = lax.rsqrt(var + static.epsilon)
    if static.num_chunks:
        y = wide_conv(Wide(x, mean, inv, *parameters), static.num_chunks, static.conv.precision)
    else:
        y = static.conv(jax.nn.relu(normalize(x, mean, inv, scale, bias)).astype(x.dtype), kernel)
    return (y, (mean, var, count)), (features, parameters, mask, mean, inv, count)


def _backward(static: _Static, kept, cotangents):
    features, (scale, bias, kernel), mask, mean, inv, count = kept
    # The barrier keeps the recompute from being merged with the forward pass.
    features, dy = lax.optimization_barrier((features, cotangents[0]))
    x = jnp.concatenate(features, -1)
    if static.num_chunks:
        wide = Wide(x, mean, inv, scale, bias, kernel)
        dx = zeros(x.shape, x.dtype, x)
        dx, (dscale, dbias, dkernel) = wide_conv_backward(
            wide, dy, dx, static.num_chunks, static.conv.precision
        )
        sums = psum(feature_sums(dx, x, mean, inv, mask, AXES), static.reduction)
        dx = project(dx, sums, x, mean, inv, mask, count)
    else:
        y = normalize(x, mean, inv, scale, bias)
        _, conv_backward = jax.vjp(static.conv, jax.nn.relu(y).astype(x.dtype), kernel)
        dz, dkernel = conv_backward(dy)
        g = jnp.where(y > 0, dz.astype(inv.dtype), 0)
        dx, (dbias, dscale), _ = normalize_backward(
            g, x, mean, inv, scale, mask, count, AXES, static.reduction
        )
    ends = [sum(f.shape[-1] for f in features[: i + 1]) for i in range(len(features) - 1)]
    dfeatures = tuple(jnp.split(dx.astype(x.dtype), ends, -1))
    dparameters = tuple(
        d.reshape(p.shape).astype(p.dtype)
        for d, p in zip((dscale, dbias, dkernel), (scale, bias, kernel), strict=True)
    )
    return dfeatures, dparameters, None


_bn_relu_conv.defvjp(_forward, _backward)


def as_batch_stats(mean: jax.Array, var: jax.Array, count: jax.Array) -> BatchStats:
    return BatchStats(mean.reshape(-1), var.reshape(-1), count.reshape(()))


def check_chunks(num_chunks: int | None, shape: tuple[int, ...]) -> int:
    """The number of slices, by default from the shape of the wide array."""
    if num_chunks is None:
        return default_chunks(shape)
    whole = isinstance(num_chunks, (int, np.integer)) and not isinstance(num_chunks, bool)
    if not whole or num_chunks < 1:
        raise ValueError(
            f"`num_chunks` (={num_chunks!r:.80}) must be an integer of at least 1, or None."
        )
    return int(num_chunks)


def check_pixel_mask(mask: Any, x: jax.Array) -> jax.Array:
    mask = check_mask(mask, x)
    if mask.shape[-1] != 1:
        raise ValueError(
            f"`mask` of shape {mask.shape} must have one value a pixel: its last axis must be 1."
        )
    return mask


def as_features(x: Any) -> jax.Array:
    x = as_array("x", x)
    if x.ndim != 4:
        raise ValueError(f"`x` of shape {x.shape} must be [N, H, W, C].")
    return x


def _check(x, scale, bias, kernel, groups: int) -> tuple[tuple[jax.Array, ...], tuple]:
    """Checks the arrays; returns those of x, and the three parameters."""
    features = tuple(map(as_features, x if isinstance(x, (tuple, list)) else (x,)))
    if not features:
        raise ValueError("`x` is an empty list; give at least one array.")
    for f in features:
        if f.shape[:3] != features[0].shape[:3] or f.dtype != features[0].dtype:
            raise ValueError(
                f"The arrays of `x` must agree in [N, H, W] and dtype: "
                f"{[f'{f.dtype}{f.shape}' for f in features]}."
            )
    channels = sum(f.shape[-1] for f in features)
    scale, bias, kernel = (
        as_array(name, value)
        for name, value in (("scale", scale), ("bias", bias), ("kernel", kernel))
    )
    for name, value in (("scale", scale), ("bias", bias)):
        if value.shape != (channels,):
            raise ValueError(
                f"`{name}` of shape {value.shape} must be ({channels},), the channels of `x`."
            )
    if kernel.ndim != 4 or kernel.shape[2] * groups != channels or kernel.shape[3] % groups:
        raise ValueError(
            f"`kernel` of shape {kernel.shape} must be [kh, kw, C / feature_group_count, O] for "
            f"the {channels} channels of `x` and feature_group_count={groups}."
        )
    if 0 in kernel.shape[:2]:
        raise ValueError(f"`kernel` of shape {kernel.shape} must have at least one tap.")
    return features, (scale, bias, kernel)
