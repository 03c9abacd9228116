"""A DenseNet-BC block whose memory is linear in its depth.

The batch statistics of a channel do not depend on the layer that reads it, so they are computed
once, when the channel is created. The backward pass first sums the gradients of all readers of a
channel in one buffer. The part of the gradient that flows through the batch statistics is linear in
this sum, so it is subtracted once per channel.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common.arguments import (
    as_array,
    as_key,
    as_number,
    check_choice,
    check_shape,
    describe,
)
from .._common.derivatives import forbid_forward_mode
from .._common.sharding import match_varying, with_auto_axes_over_batch
from ..batch_norm.statistics import (
    AXES,
    BatchStats,
    Reduction,
    check_epsilon,
    feature_sums,
    make_reduction,
    moments,
    normalize,
    project,
    psum,
)
from ..dropout import dropout
from .bn_relu_conv import (
    ConvOptions,
    as_batch_stats,
    as_features,
    bn_relu_conv_backward,
    check_pixel_mask,
)
from .bottleneck import Bottleneck, bottleneck_backward, bottleneck_forward, rows_per_chunk


class DenseLayerParams(NamedTuple):
    """Parameters of BN → ReLU → 1x1 conv to b channels → BN → ReLU → conv to k new channels.

    Attributes:
        scale1: [c], where c is the number of channels of all features before this layer.
        bias1: [c].
        kernel1: [1, 1, c, b].
        scale2: [b].
        bias2: [b].
        kernel2: [kh, kw, b, k].
    """

    scale1: jax.Array
    bias1: jax.Array
    kernel1: jax.Array
    scale2: jax.Array
    bias2: jax.Array
    kernel2: jax.Array


def dense_block(
    x: jax.Array,
    params: Sequence[DenseLayerParams],
    *,
    save: Literal["conv", "features"] = "conv",
    axis_name: Hashable | Sequence[Hashable] | None = None,
    axis_index_groups: int | Sequence[Sequence[int]] | None = None,
    mask: jax.Array | None = None,
    epsilon: float = 1e-5,
    stats: Literal["auto", "gather", "two_psum"] = "auto",
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    chunk_size: int | None = None,
    precision: Any = None,
) -> tuple[jax.Array, list[tuple[BatchStats, BatchStats]]]:
    """Apply a DenseNet-BC block in memory that is linear in its depth.

    ``f_0 = x``, ``f_l = dropout(conv2(relu(bn2(conv1(relu(bn1([f_0 … f_(l-1)])))))))``; the result
    is ``[f_0 … f_L]``.

    Function and gradients are mathematically equal to those of the plain network: nothing is
    approximated, only rounding differs. The batch statistics of every channel are computed only
    once, so the block also does less work.

    Args:
        x: [N, H, W, C0], floating point.
        params: one `DenseLayerParams` per layer; sizes may differ by layer. Cast to the dtype of x.
        save: what is kept for the backward pass in addition to the features: ``"conv"`` keeps the
            output of every 1x1 convolution, ``"features"`` recomputes it.
        axis_name: as in `sync_batch_norm`. Each layer does at most two all-reduces per pass, whose
            sizes do not grow with the depth.
        axis_index_groups: as in `sync_batch_norm`.
        mask: boolean, broadcastable to [N, H, W, 1]: the pixels to include in the statistics.
        epsilon: as in `sync_batch_norm`.
        stats: as in `sync_batch_norm`.
        dropout_rate: probability of dropping a new feature, in [0, 1).
        key: PRNG key for dropout; layer l uses ``fold_in(key, l)``. Under pmap or shard_map pass
            each device a different key.
        chunk_size: number of image rows of the full-width arrays that are processed at a time. By
            default as many as take about 8 MiB in float32.
        precision: of the convolutions, as in ``jax.lax``.

    Returns:
        The features [N, H, W, C0 + sum of k] of the dtype of x, and for each layer the `BatchStats`
        of its two norms (of c and of b features), through which no gradient flows.

    Raises:
        TypeError: for arguments that are not arrays or numbers, or not floating point, and dropout
            without a key.
        ValueError: for mismatched shapes, or an `axis_name` that is not mapped.

    Kept for the backward pass: the features (the result itself), their statistics, the parameters,
    per layer the statistics of bn2, and with ``save="conv"`` the output of conv1 (b channels). The
    gradients of all features share one buffer. Reverse mode only.

    References:
        Huang et al., 2017 (arXiv:1608.06993); Pleiss et al., 2017 (arXiv:1707.06990) and
        efficient_densenet_pytorch.
    """
    x = as_features(x)
    layers, channels = _check_params(x, params)
    check_choice("save", save, "conv", "features")
    mask = None if mask is None else check_pixel_mask(mask, x)
    config = _BlockConfig(
        make_reduction(axis_name, axis_index_groups, stats),
        check_epsilon(epsilon),
        save == "conv",
        _check_dropout(dropout_rate, key),
        rows_per_chunk(chunk_size, (*x.shape[:3], channels)),
        precision,
    )

    def run(x, params, mask, key):
        x, params, mask = match_varying((x, params, mask))
        x, params = forbid_forward_mode("dense_block", (x, params))
        result: Any = _dense_block(config, x, params, mask, key)
        return result[0], lax.stop_gradient(result[1])

    features, (mean, var, count, inner) = with_auto_axes_over_batch(run, x)(
        x, layers, mask, key if config.dropout_rate else None
    )
    result = []
    for p, (mean2, var2) in zip(layers, inner, strict=True):
        c = p.scale1.shape[0]
        first = as_batch_stats(mean[..., :c], var[..., :c], count)
        result.append((first, as_batch_stats(mean2, var2, count)))
    return features, result


class _BlockConfig(NamedTuple):
    reduction: Reduction
    epsilon: float
    save_conv: bool
    dropout_rate: float
    chunk_size: int
    precision: Any

    @property
    def conv2(self) -> ConvOptions:
        return ConvOptions(precision=self.precision)

    def drop(self, y: jax.Array, key: jax.Array | None, layer: int) -> jax.Array:
        if key is None:
            return y
        return dropout(y, self.dropout_rate, jax.random.fold_in(key, layer))


# Write dz_l for the gradient before the first ReLU of layer l. The gradient buffer contains, for
# every channel, its gradient from outside the block plus
#   g = sum_l inv * scale_l * dz_l
# over the layers l done so far. g is the channel's gradient with the batch statistics held fixed.
# After all readers of a channel, `project_channels` subtracts the part through the statistics:
#   dx = g - (sum(g) + xhat * sum(g * xhat)) / N
# The gradient from outside does not pass through the statistics, so both sums are those of the
# buffer minus those of the outside gradient. Sums of the buffer, and not of the addends, match its
# values, which are rounded to the dtype of x.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense_block(config: _BlockConfig, x, params, mask, key) -> Any:
    return _forward(config, x, params, mask, key)[0]


def _forward(config: _BlockConfig, x, params, mask, key):
    new = sum(p.kernel2.shape[-1] for p in params)
    buffer = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, new)))
    mean, var, count = moments(x, mask, AXES, config.reduction)
    inner, kept = [], []
    for i, p in enumerate(params):
        c = p.scale1.shape[0]
        inv = lax.rsqrt(var + config.epsilon)
        h = bottleneck_forward(
            Bottleneck(buffer, mean, inv, p.scale1, p.bias1, p.kernel1),
            config.chunk_size,
            config.precision,
        )
        mean2, var2, _ = moments(h, mask, AXES, config.reduction)
        inv2 = lax.rsqrt(var2 + config.epsilon)
        z = jax.nn.relu(normalize(h, mean2, inv2, p.scale2, p.bias2)).astype(h.dtype)
        y = config.drop(config.conv2(z, p.kernel2), key, i)
        if i + 1 < len(params):  # no layer of the block reads the last features
            new_mean, new_var, _ = moments(y, mask, AXES, config.reduction)
            mean, var = jnp.concatenate([mean, new_mean], -1), jnp.concatenate([var, new_var], -1)
        # The barrier saves memory where there is one chunk, because XLA removes loops of one
        # iteration: 170 instead of 176 MB for 6 layers, batch 64, 32x32 pixels, growth 12.
        buffer = lax.optimization_barrier(lax.dynamic_update_slice(buffer, y, (0, 0, 0, c)))
        inner.append((mean2, var2))
        kept.append((h if config.save_conv else None, mean2, inv2))
    inv = lax.rsqrt(var + config.epsilon)
    return (buffer, (mean, var, count, inner)), (buffer, params, mask, key, mean, inv, count, kept)


def _backward(config: _BlockConfig, residuals, cotangents):
    buffer, params, mask, key, mean, inv, count, kept = residuals
    grad = cotangents[0]
    read = mean.shape[-1]  # the channels that some layer reads: all but those of the last layer
    outside = feature_sums(grad[..., :read], buffer[..., :read], mean, inv, mask, AXES)
    dparams: list = [None] * len(params)

    def project_channels(dy, channels: slice):
        statistics = buffer[..., channels], mean[..., channels], inv[..., channels], mask
        sums = feature_sums(dy, *statistics, AXES) - outside[..., channels]
        return project(dy, psum(sums, config.reduction), *statistics, count).astype(dy.dtype)

    for i in reversed(range(len(params))):
        p, (h, mean2, inv2) = params[i], kept[i]
        c, k = p.scale1.shape[0], p.kernel2.shape[-1]
        dy = grad[..., c : c + k]
        if i + 1 < len(params):
            dy = project_channels(dy, slice(c, c + k))
        dy = config.drop(dy, key, i)
        # The barriers order the layers: the recomputation of a layer starts after the gradient of
        # the next one is done, and its parameters' gradients are done before the previous one
        # starts. Otherwise XLA keeps the activations of all layers alive.
        h, dy, grad = lax.optimization_barrier((h, dy, grad))
        # If h is recomputed and there is one chunk, XLA would merge this with the forward pass and
        # keep h (139 instead of 118 MB for the same layers). Loops are never merged.
        source, dy = (buffer, dy) if config.save_conv else lax.optimization_barrier((buffer, dy))
        op = Bottleneck(source, mean[..., :c], inv[..., :c], p.scale1, p.bias1, p.kernel1)
        if h is None:
            h = bottleneck_forward(op, config.chunk_size, config.precision)
        parameters2 = p.scale2, p.bias2, p.kernel2
        dh, second = bn_relu_conv_backward(
            config.conv2, dy, h, mean2, inv2, parameters2, mask, count, config.reduction
        )
        grad, first = bottleneck_backward(op, dh, grad, config.chunk_size, config.precision)
        dp = jax.tree.map(
            lambda d, v: d.reshape(v.shape).astype(v.dtype), DenseLayerParams(*first, *second), p
        )
        grad, dparams[i] = lax.optimization_barrier((grad, dp))
    channels = buffer.shape[-1] - sum(p.kernel2.shape[-1] for p in params)
    dx = grad[..., :channels]
    if params:
        dx = project_channels(dx, slice(0, channels))
    return dx, tuple(dparams), None, None


_dense_block.defvjp(_forward, _backward)


def _check_dropout(rate: Any, key: Any) -> float:
    rate = as_number("dropout_rate", rate, lambda r: 0 <= r < 1, "at least 0 and below 1")
    if rate:
        as_key("key", key)
    return rate


def _check_params(x: jax.Array, params: Any) -> tuple[tuple[DenseLayerParams, ...], int]:
    """Validate all layers; return them and the number of channels of the result."""
    layers, channels = [], x.shape[-1]
    for i, values in enumerate(params):
        if not isinstance(values, (tuple, list)):
            raise TypeError(f"`params[{i}]` must be DenseLayerParams, not {describe(values)}.")
        names = [f"params[{i}].{name}" for name in DenseLayerParams._fields]
        p = DenseLayerParams(*map(as_array, names, DenseLayerParams(*values)))
        b, k = p.kernel1.shape[-1:], p.kernel2.shape[-1:]
        shapes = (
            (channels,), (channels,), (1, 1, channels, *b),
            b, b, ("kh", "kw", *b, *k),
        )  # fmt: skip
        for name, value, shape in zip(names, p, shapes, strict=True):
            check_shape(name, value, shape, f"because layer {i} reads {channels} channels")
        layers.append(p)
        channels += k[0]
    return tuple(layers), channels
