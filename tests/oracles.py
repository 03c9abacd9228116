"""Operators by their definitions, for autodiff in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from effjax.ops.dropout import dropout


def batch_norm(
    x, scale=None, bias=None, mask=None, residual=None, relu=False, axes=(0, 1, 2), axis_name=None
):
    def total(v):
        v = v.sum(axes, keepdims=True)
        return v if axis_name is None else lax.psum(v, axis_name)

    counted = jnp.broadcast_to(True if mask is None else mask, x.shape)
    count = total(counted)
    mean = total(jnp.where(counted, x, 0)) / count
    var = total(jnp.where(counted, jnp.square(x - mean), 0)) / count
    y = (x - mean) / jnp.sqrt(var + 1e-5)
    y = y if scale is None else y * scale.reshape(mean.shape)
    y = y if bias is None else y + bias.reshape(mean.shape)
    y = y if residual is None else y + residual
    count = count.ravel()[0].astype(x.dtype)
    return jax.nn.relu(y) if relu else y, (mean.ravel(), var.ravel(), count)


def conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers, **options
    )


def dense_block(x, params, mask=None, dropout_rate=0.0, key=None, axis_name=None):
    statistics = []
    for i, p in enumerate(params):
        y, first = batch_norm(x, p.scale1, p.bias1, mask, relu=True, axis_name=axis_name)
        y, second = batch_norm(
            conv(y, p.kernel1), p.scale2, p.bias2, mask, relu=True, axis_name=axis_name
        )
        y = conv(y, p.kernel2)
        if dropout_rate:
            y = dropout(y, dropout_rate, jax.random.fold_in(key, i))
        x = jnp.concatenate([x, y], -1)
        statistics.append((first, second))
    return x, statistics


def attention(q, k, v, *, segment_ids=None, causal=True, window=None, scale=None, softcap=None):
    """Return attention with all scores."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = jnp.asarray(distance >= 0 if causal else distance == distance)
    if window is not None:
        seen &= distance < window
    if segment_ids is not None:
        seen &= (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("nhqk,nkhd->nqhd", p, v)


def expert_mlp(x, experts, weights, gate, up, down, *, activation="silu", transposed=False):
    """Return the sum of the MLPs of all experts, with weights of 0 for those that are not named."""
    if transposed:
        gate, up, down = (jnp.swapaxes(a, 1, 2) for a in (gate, up, down))
    f = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}[activation]
    y = jnp.zeros_like(x)
    for e in range(gate.shape[0]):
        share = jnp.where(experts == e, weights, 0).sum(-1, keepdims=True)
        y += share * ((f(x @ gate[e]) * (x @ up[e])) @ down[e])
    return y


def cross_entropy(
    x, kernel, labels, bias=0.0, mask=True, z_loss=0.0, label_smoothing=0.0, transposed=False,
    softcap=None,
):  # fmt: skip
    """Return the losses of all logits."""
    logits = x @ (kernel.T if transposed else kernel) + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, targets)
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(mask, losses, 0)


def round_to_8_bits(x, dtype):
    """Return x rounded to 8 bits, after a power of two brings its maximum into the range."""
    most = jnp.max(jnp.abs(jnp.where(jnp.isfinite(x), x, 0)), initial=0).astype(jnp.float64)
    ratio = float(jnp.finfo(dtype).max) / jnp.where(most > 0, most, 1)
    scale = 2.0 ** jnp.floor(jnp.log2(ratio))
    rounded = (x * scale).astype(jnp.float32).astype(dtype).astype(jnp.float64) / scale
    return jnp.where(jnp.isfinite(x), rounded, jnp.nan)


@jax.custom_vjp
def _round_gradient(y):
    return y


_round_gradient.defvjp(
    lambda y: (y, ()), lambda _, dy: (round_to_8_bits(dy, jnp.float8_e5m2).astype(dy.dtype),)
)


def fp8_linear(x, kernel, transposed=False):
    """Return the product of the rounded numbers in float64; rounding has the gradient 1."""
    x, kernel = (
        a + lax.stop_gradient(round_to_8_bits(a, jnp.float8_e4m3fn) - a)
        for a in (x.astype(jnp.float64), kernel.astype(jnp.float64))
    )
    return _round_gradient(x @ (kernel.T if transposed else kernel))
