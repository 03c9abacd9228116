"""Cross entropy of a linear layer whose logits never exist at full size."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._common.arguments import as_array, as_integer, as_mask, as_number
from ._common.derivatives import forbid_forward_mode
from ._common.dtypes import accumulation_dtype
from ._common.platform import known_sizes
from ._common.sharding import match_varying, with_auto_axes_over_batch, zeros

CHUNK_BYTES = 64 * 2**20
TILE = 128  # chunks are multiples of this number of columns, which suits matrix units


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    transposed: bool = False,
    precision: Any = None,
) -> jax.Array:
    """Compute the softmax cross entropy of every token with ``logits = x @ kernel + bias``.

    ``loss = logsumexp(logits) - sum(targets * logits) + z_loss * logsumexp(logits)**2``, with
    ``targets = (1 - label_smoothing) * one_hot(labels) + label_smoothing / V``

    Both passes process the vocabulary in chunks: only the logits of one chunk exist at a time, and
    the backward pass recomputes them. Tokens are not split, so that jit may shard any of their
    axes: no token is gathered, and the gradient of a replicated kernel is summed over devices once.
    A kernel that is sharded along V is gathered.

    Args:
        x: [..., D], floating point: the input of the last layer.
        kernel: [D, V], floating point; cast to the dtype of x. Products accumulate in float32.
        labels: integers [...] in [0, V). The loss of any other label is NaN.
        bias: [V], floating point. None means 0.
        mask: boolean, broadcastable to labels: the tokens to include. The others have loss 0 and
            no gradient, whatever their labels.
        label_smoothing: the share in [0, 1] of the target that is spread over the vocabulary, as in
            `optax.smooth_labels`.
        z_loss: weight of the square of logsumexp, which keeps it near 0.
        softcap: the bound of the logits, which become ``softcap * tanh(logits / softcap)``. None
            means no bound.
        chunk_size: number of columns of a chunk. By default the logits of a chunk take 64 MiB in
            float32, or a chunk has D columns if that is more.
        transposed: whether the kernel is [V, D], as an embedding is, or the weight of a linear
            layer of PyTorch. No transposed copy of it or of its gradient exists.
        precision: of the matrix products, as in ``jax.lax``.

    Returns:
        The losses [...], float32 (float64 for float64 x).

    Raises:
        TypeError: for arguments that are not arrays or numbers, or of the wrong kind of dtype.
        ValueError: for mismatched shapes, and options outside their ranges.

    Kept for the backward pass: x, kernel, bias, labels, and logsumexp(logits) [...]. The gradient
    of x accumulates in float32. Reverse mode only (NotImplementedError in forward mode).

    References:
        Wijmans et al., 2024 (arXiv:2411.09009); Hsu et al., 2024 (arXiv:2410.10989), Liger Kernel;
        Milakov & Gimelshein, 2018 (arXiv:1805.02867); z_loss: Chowdhery et al., 2022
        (arXiv:2204.02311); label smoothing: Szegedy et al., 2016 (arXiv:1512.00567).
    """
    x, kernel, labels, bias = _check(x, kernel, labels, bias, transposed)
    mask = None if mask is None else as_mask("mask", mask, "labels", labels.shape)
    vocab_axis = 0 if transposed else 1
    vocab_size, width = kernel.shape[vocab_axis], x.shape[-1]
    if chunk_size is None:
        chunk_size = _default_chunk(math.prod(known_sizes(*labels.shape)), width)
    if softcap is not None:
        softcap = as_number("softcap", softcap, lambda cap: 0 < cap < math.inf, "positive, finite")
    static = _Static(
        min(as_integer("chunk_size", chunk_size, 1), vocab_size),
        as_number("label_smoothing", label_smoothing, lambda a: 0 <= a <= 1, "in [0, 1]"),
        as_number("z_loss", z_loss, lambda z: 0 <= z < math.inf, "at least 0 and finite"),
        precision,
        vocab_axis,
        softcap,
    )

    def run(x, kernel, bias, labels, mask):
        *arrays, labels, mask = match_varying((x, kernel, bias, labels, mask))
        arrays = forbid_forward_mode("linear_cross_entropy", arrays)
        losses: Any = _linear_cross_entropy(static, *arrays, labels)
        return losses if mask is None else jnp.where(mask, losses, 0), ()

    return with_auto_axes_over_batch(run, x)(x, kernel, bias, labels, mask)[0]


class _Static(NamedTuple):
    chunk_size: int
    label_smoothing: float
    z_loss: float
    precision: Any
    vocab_axis: int  # of the kernel
    softcap: float | None

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
        """Contract these axes of a and b, accumulating in float32 or wider."""
        return lax.dot_general(
            a,
            b,
            (axes, ((), ())),
            precision=self.precision,
            preferred_element_type=accumulation_dtype(a),
        )

    def scan_chunks(self, body: Callable, carry: Any, vocab_size: int) -> Any:
        """Run ``carry = body(carry, start, size)`` on every chunk; the last may be smaller."""
        size = self.chunk_size
        count, rest = divmod(vocab_size, size)
        carry = lax.fori_loop(0, count, lambda i, carry: body(carry, i * size, size), carry)
        return body(carry, vocab_size - rest, rest) if rest else carry

    def chunk_logits(self, x, kernel, bias, labels, start, size: int) -> tuple:
        """Return the columns of the kernel, their logits, and whether a column is the label."""
        axis = self.vocab_axis
        columns = lax.dynamic_slice_in_dim(kernel, start, size, axis)  # [D, size] or [size, D]
        columns = columns.astype(x.dtype)
        logits = self.dot(x, columns, ((x.ndim - 1,), (1 - axis,)))  # [..., size]
        if bias is not None:
            logits += lax.dynamic_slice_in_dim(bias, start, size).astype(logits.dtype)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        indices = (start + jnp.arange(size)).astype(labels.dtype)
        return columns, logits, labels[..., None] == indices

    def weigh_by_target(self, values: jax.Array, is_label: jax.Array, vocab_size: int) -> jax.Array:
        """Multiply values by the targets of the columns of a chunk."""
        smoothing = self.label_smoothing
        if smoothing == 0:
            return jnp.where(is_label, values, 0)
        every = smoothing / vocab_size
        return values * jnp.where(is_label, 1 - smoothing + every, every)


# With p = softmax(logits), g the gradient of a token's loss, and z = logsumexp(logits):
#   dlogits = p * g * (1 + 2 * z_loss * z) - targets * g
#   dx = dlogits @ kernel.T    dkernel = x.T @ dlogits    dbias = sum(dlogits)
# With a soft cap c, logits = c * tanh(r / c), and dlogits is multiplied by 1 - (logits / c)^2.
# dx is a sum over chunks. dkernel and dbias of a chunk are complete, and are written once.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_cross_entropy(static: _Static, x, kernel, bias, labels) -> Any:
    return _forward(static, x, kernel, bias, labels)[0]


def _forward(static: _Static, x, kernel, bias, labels):
    vocab_size = kernel.shape[static.vocab_axis]

    def body(carry, start, size):
        z, target_logit = carry  # sum(targets * logits)
        _, logits, is_label = static.chunk_logits(x, kernel, bias, labels, start, size)
        target_logit += jnp.sum(static.weigh_by_target(logits, is_label, vocab_size), -1)
        return jnp.logaddexp(z, jax.nn.logsumexp(logits, -1)), target_logit

    zero = zeros(labels.shape, accumulation_dtype(x), x)
    z, target_logit = static.scan_chunks(body, (zero - jnp.inf, zero), vocab_size)
    losses = z - target_logit + static.z_loss * jnp.square(z)
    losses = jnp.where((labels >= 0) & (labels < vocab_size), losses, jnp.nan)
    return losses, (x, kernel, bias, labels, z)


def _backward(static: _Static, residuals, g):
    x, kernel, bias, labels, z = residuals
    tokens = tuple(range(labels.ndim))
    axis, vocab_size = static.vocab_axis, kernel.shape[static.vocab_axis]
    dz = g * (1 + 2 * static.z_loss * z)

    def body(carry, start, size):
        dx, dkernel, dbias = carry
        columns, logits, is_label = static.chunk_logits(x, kernel, bias, labels, start, size)
        dlogits = jnp.exp(logits - z[..., None]) * dz[..., None]
        dlogits -= static.weigh_by_target(g[..., None], is_label, vocab_size)
        if static.softcap is not None:
            dlogits *= 1 - jnp.square(logits / static.softcap)
        if dbias is not None:
            dbias = _write_chunk(dbias, jnp.sum(dlogits, tokens), start, 0)
        dlogits = dlogits.astype(x.dtype)
        dx += static.dot(dlogits, columns, ((x.ndim - 1,), (axis,)))
        factors = (x, dlogits) if axis == 1 else (dlogits, x)
        dcolumns = static.dot(*factors, (tokens, tokens))
        return dx, _write_chunk(dkernel, dcolumns, start, axis), dbias

    # XLA would share constant zeros with the gradient of an embedding of the kernel's shape, and
    # keep them during the backward pass of all layers between.
    zero = lax.optimization_barrier(zeros((), kernel.dtype, x))
    empty = (
        zeros(x.shape, z.dtype, x),
        jnp.broadcast_to(zero, kernel.shape),
        None if bias is None else zeros(bias.shape, bias.dtype, x),
    )
    dx, dkernel, dbias = static.scan_chunks(body, empty, vocab_size)
    return dx.astype(x.dtype), dkernel, dbias, None


_linear_cross_entropy.defvjp(_forward, _backward)


def _write_chunk(gradient: jax.Array, part: jax.Array, start, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(gradient, part.astype(gradient.dtype), start, axis)


def _default_chunk(num_tokens: int, width: int) -> int:
    tiles = CHUNK_BYTES // (4 * TILE * max(num_tokens, 1))
    return max(tiles * TILE, width, 1)


def _check(x: Any, kernel: Any, labels: Any, bias: Any, transposed: bool) -> tuple:
    x, kernel = as_array("x", x), as_array("kernel", kernel)
    labels = as_array("labels", labels, jnp.integer)
    axes, vocab_axis = ("[V, D]", 0) if transposed else ("[D, V]", 1)
    if kernel.ndim != 2 or not kernel.shape[vocab_axis]:
        raise ValueError(f"`kernel` of shape {kernel.shape} must be {axes}, with V at least 1.")
    vocab_size, width = kernel.shape[vocab_axis], kernel.shape[1 - vocab_axis]
    if x.shape[-1:] != (width,):
        raise ValueError(
            f"`x` of shape {x.shape} must be [..., D] for the `kernel` {axes} of {kernel.shape}."
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"`labels` of shape {labels.shape} must be {x.shape[:-1]}, one for each token of `x`."
        )
    if bias is not None:
        bias = as_array("bias", bias)
        if bias.shape != (vocab_size,):
            raise ValueError(
                f"`bias` of shape {bias.shape} must be {(vocab_size,)}, the V of `kernel`."
            )
    # A narrow dtype such as int8 cannot represent all columns.
    return x, kernel, labels.astype("int64" if labels.dtype.itemsize == 8 else "int32"), bias
