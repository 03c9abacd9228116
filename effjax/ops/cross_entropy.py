"""Cross entropy of the logits of a linear layer, which never exist all at once."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._common.arguments import as_array, as_integer, as_mask, as_number, as_precision
from ._common.dtypes import accumulation_dtype
from ._common.sharding import auto_shard_batch, match_varying, zeros

SLICE_BYTES = 64 * 2**20
TILE = 128  # columns: what matrix units like slices to be a multiple of


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    where: jax.Array | None = None,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    precision: Any = None,
) -> jax.Array:
    """The softmax cross entropy of every token by ``logits = x @ kernel + bias``.

    ``loss = logsumexp(logits) - logits[labels] + z_loss * logsumexp(logits)**2``

    The vocabulary is worked through in slices, in both passes: the logits of one slice exist at a
    time, and in the backward pass they are computed again. Tokens are not sliced, so that under jit
    any of their axes may be sharded: no token is gathered, and the gradient of a replicated kernel
    is summed over devices once. A kernel that is sharded along V would be gathered.

    Args:
        x: [..., D], floating point: what the last layer returns.
        kernel: [D, V], floating point; computed in x's dtype, summed in float32.
        labels: integers [...] in [0, V). The loss of another one, negative ones too, is NaN.
        bias: [V], floating point, or None for 0.
        where: boolean, broadcastable to labels: which tokens count. The loss of the others is 0,
            whatever their labels, and they have no gradient.
        z_loss: weight of the square of logsumexp, which keeps it near 0.
        chunk_size: columns of a slice. By default its logits take 64 MiB in float32, or it has as
            many columns as x where that is more.
        precision: of the matrix products, as in ``jax.lax``.

    Returns:
        The losses [...], float32 (float64 for float64 x).

    Raises:
        TypeError: for what is no array, or of another kind of dtype.
        ValueError: for shapes that do not fit and options outside their ranges.

    Kept for the backward pass: x, kernel, bias, labels, and logsumexp(logits) [...]. There the
    gradient of x is summed in float32. Reverse mode only.

    References:
        Wijmans et al., 2024 (arXiv:2411.09009); Hsu et al., 2024 (arXiv:2410.10989), Liger Kernel;
        Milakov & Gimelshein, 2018 (arXiv:1805.02867); z_loss: Chowdhery et al., 2022
        (arXiv:2204.02311).
    """
    x, kernel, labels, bias = _check(x, kernel, labels, bias)
    mask = None if where is None else as_mask("where", where, "labels", labels.shape)
    width, vocab_size = kernel.shape
    if chunk_size is None:
        chunk_size = _default_chunk(labels.size, width)
    static = _Static(
        min(as_integer("chunk_size", chunk_size, 1), vocab_size),
        as_number("z_loss", z_loss, lambda z: 0 <= z < math.inf, "at least 0 and finite"),
        as_precision(precision, x.dtype),
    )

    def run(*arrays):
        *arrays, labels, mask = match_varying(arrays)
        losses: Any = _linear_cross_entropy(static, *arrays, labels)
        return losses if mask is None else jnp.where(mask, losses, 0), ()

    return auto_shard_batch(run, x)(x, kernel, bias, labels, mask)[0]


class _Static(NamedTuple):
    chunk_size: int
    z_loss: float
    precision: Any

    def dot(self, a: jax.Array, b: jax.Array, over: tuple) -> jax.Array:
        """The product over these axes of a and b, in float32 or wider."""
        return lax.dot_general(
            a,
            b,
            (over, ((), ())),
            precision=self.precision,
            preferred_element_type=accumulation_dtype(a),
        )

    def over_slices(self, add: Callable, carry: Any, vocab_size: int) -> Any:
        """``carry = add(carry, start, size)`` for every slice; the last one may be smaller."""
        size = self.chunk_size
        count, rest = divmod(vocab_size, size)
        carry = lax.fori_loop(0, count, lambda i, carry: add(carry, i * size, size), carry)
        return add(carry, vocab_size - rest, rest) if rest else carry

    def slice(self, x, kernel, bias, labels, start, size: int) -> tuple:
        """Of these columns: kernel, logits, and which is a token's label."""
        part = lax.dynamic_slice_in_dim(kernel, start, size, 1).astype(x.dtype)
        logits = self.dot(x, part, ((x.ndim - 1,), (0,)))
        if bias is not None:
            logits += lax.dynamic_slice_in_dim(bias, start, size).astype(logits.dtype)
        columns = (start + jnp.arange(size)).astype(labels.dtype)
        return part, logits, labels[..., None] == columns


# With p = softmax(logits), g the gradient of a token's loss, and z = logsumexp(logits):
#   dlogits = p * g * (1 + 2 * z_loss * z) - [column is the label] * g
#   dx = dlogits @ kernel.T    dkernel = x.T @ dlogits    dbias = sum(dlogits)
# A column's part in dx is added up; its own gradients are complete, and are written once.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_cross_entropy(static: _Static, x, kernel, bias, labels) -> Any:
    return _forward(static, x, kernel, bias, labels)[0]


def _forward(static: _Static, x, kernel, bias, labels):
    def add(carry, start, size):
        total, of_label = carry
        _, logits, is_label = static.slice(x, kernel, bias, labels, start, size)
        of_label += jnp.sum(jnp.where(is_label, logits, 0), -1)
        return jnp.logaddexp(total, jax.nn.logsumexp(logits, -1)), of_label

    none = zeros(labels.shape, accumulation_dtype(x), x)
    total, of_label = static.over_slices(add, (none - jnp.inf, none), kernel.shape[1])
    losses = total - of_label + static.z_loss * jnp.square(total)
    losses = jnp.where((labels >= 0) & (labels < kernel.shape[1]), losses, jnp.nan)
    return losses, (x, kernel, bias, labels, total)


def _backward(static: _Static, kept, g):
    x, kernel, bias, labels, total = kept
    tokens = tuple(range(labels.ndim))
    of_total = g * (1 + 2 * static.z_loss * total)

    def add(carry, start, size):
        dx, dkernel, dbias = carry
        part, logits, is_label = static.slice(x, kernel, bias, labels, start, size)
        dlogits = jnp.exp(logits - total[..., None]) * of_total[..., None]
        dlogits -= jnp.where(is_label, g[..., None], 0)
        if dbias is not None:
            dbias = _write(dbias, jnp.sum(dlogits, tokens), start)
        dlogits = dlogits.astype(x.dtype)
        dx += static.dot(dlogits, part, ((x.ndim - 1,), (1,)))
        return dx, _write(dkernel, static.dot(x, dlogits, (tokens, tokens)), start), dbias

    empty = (
        zeros(x.shape, total.dtype, x),
        *(None if p is None else zeros(p.shape, p.dtype, x) for p in (kernel, bias)),
    )
    dx, dkernel, dbias = static.over_slices(add, empty, kernel.shape[1])
    return dx.astype(x.dtype), dkernel, dbias, None


_linear_cross_entropy.defvjp(_forward, _backward)


def _write(gradient: jax.Array, columns: jax.Array, start) -> jax.Array:
    columns = columns.astype(gradient.dtype)
    return lax.dynamic_update_slice_in_dim(gradient, columns, start, gradient.ndim - 1)


def _default_chunk(num_tokens: int, width: int) -> int:
    tiles = SLICE_BYTES // (4 * TILE * max(num_tokens, 1))
    return max(tiles * TILE, width, 1)


def _check(x: Any, kernel: Any, labels: Any, bias: Any) -> tuple:
    """The arrays; labels are of a dtype that holds V."""
    x, kernel = as_array("x", x), as_array("kernel", kernel)
    labels = as_array("labels", labels, jnp.integer)
    if kernel.ndim != 2 or not kernel.shape[1]:
        raise ValueError(f"`kernel` of shape {kernel.shape} must be [D, V], with V at least 1.")
    if x.shape[-1:] != kernel.shape[:1]:
        raise ValueError(
            f"`x` of shape {x.shape} must be [..., D] for the `kernel` [D, V] of {kernel.shape}."
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"`labels` of shape {labels.shape} must be {x.shape[:-1]}, one for each token of `x`."
        )
    if bias is not None:
        bias = as_array("bias", bias)
        if bias.shape != kernel.shape[1:]:
            raise ValueError(
                f"`bias` of shape {bias.shape} must be {kernel.shape[1:]}, the columns of `kernel`."
            )
    return x, kernel, labels.astype("int64" if labels.dtype.itemsize == 8 else "int32"), bias
