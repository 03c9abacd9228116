"""Attention that never forms the scores of all queries and keys."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..native.defaults import is_wrong
from ._common.arguments import as_array, as_integer, as_number, check_choice
from ._common.derivatives import forbid_forward_mode
from ._common.dtypes import accumulation_dtype
from ._common.platform import follow_arrays, known_sizes, traced_platform
from ._common.sharding import (
    manual_axes,
    match_varying,
    with_auto_axes_over_batch,
    zeros,
)

CHUNK_BYTES = 16 * 2**20
TILE = 128  # the default number of tokens of a chunk is this, times a power of two
MASK_BYTES = 256 * 2**20  # of a mask for cuDNN, which is the same for all heads
MASKED = -1e30  # a score; finite, so that the difference of two of them is not NaN


@follow_arrays
def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Compute ``softmax(scale * q @ k.T) @ v`` of each head, without the scores of all pairs.

    Groups of H / K successive heads of queries share a head of keys and values.

    Args:
        q: [N, T, H, D], floating point.
        k: [N, T, K, D], of the dtype of q, where K divides H.
        v: as k.
        segment_ids: integers [N, T]. Tokens attend only to tokens with the same id, such as the
            tokens of one document of a packed sequence. None means one segment.
        causal: whether a token attends only to itself and the tokens before it.
        window: the number of tokens that a token attends to, itself and those just before it. Needs
            `causal`. None means all.
        scale: factor of the scores. By default 1 / sqrt(D).
        softcap: the bound of the scores: a scaled score s becomes ``softcap * tanh(s / softcap)``.
            None means no bound.
        chunk_size: number of tokens of a chunk of "xla". By default the largest power of two from
            128 up whose scores (N × H × chunk²) take at most 16 MiB in float32; 128 if even these
            take more. At most T.
        implementation: one of the following, or None for the best available one.

            * "xla": a loop over pairs of chunks, on every platform. Pairs that `causal` or `window`
              exclude are left out. The backward pass recomputes the scores; kept for it are q, k,
              v, the result and logsumexp(scores) [N, T, H].
            * "cudnn": `jax.nn.dot_product_attention`, on NVIDIA GPUs, for bfloat16 and float16,
              without `softcap`. With `segment_ids` it reads a mask [N, 1, T, T] of the dtype of q.
              None selects it wherever it is supported and this mask takes at most 256 MiB. Its
              gradients may differ in the last bits from run to run, unless XLA_FLAGS has
              ``--xla_gpu_deterministic_ops=true``.
            * "splash": the Pallas kernel of JAX, on TPUs, for T a multiple of 128 and D of 64. None
              selects it on one TPU, and inside ``jax.shard_map`` with ``check_vma=False``. jit
              cannot partition it.
            * "tokamax": `tokamax.dot_product_attention`, if tokamax is installed. With
              `segment_ids` it reads a mask as "cudnn" does. None never selects it.

    Returns:
        [N, T, H, D], of the dtype of q. The softmax is computed in float32 (float64 for float64).

    Raises:
        TypeError: for arguments that are not arrays or numbers, or of different dtypes.
        ValueError: for mismatched shapes, options outside their ranges, and options that the
            chosen implementation does not support.
        ImportError: for "tokamax", if it is not installed.

    Reverse mode only (NotImplementedError in forward mode).

    References:
        Vaswani et al., 2017 (arXiv:1706.03762); Rabe & Staats, 2021 (arXiv:2112.05682); Dao, 2023
        (arXiv:2307.08691), FlashAttention-2; Ainslie et al., 2023 (arXiv:2305.13245), grouped
        queries.
    """
    q, k, v, segment_ids = _check(q, k, v, segment_ids)
    causal = bool(causal)
    if window is not None:
        window = as_integer("window", window, 1)
        if not causal:
            raise ValueError("`window` needs causal=True.")
        window = None if window >= q.shape[1] else window
    if scale is None:
        scale = max(q.shape[3], 1) ** -0.5
    scale = as_number("scale", scale, math.isfinite, "finite")
    if softcap is not None:
        softcap = as_number("softcap", softcap, lambda cap: 0 < cap < math.inf, "positive, finite")
    check_choice("implementation", implementation, None, *IMPLEMENTATIONS)
    if chunk_size is None:
        chunk_size = _default_chunk(q)
    chunk_size = min(as_integer("chunk_size", chunk_size, 1), q.shape[1])
    if not q.size:
        return q
    options = _Options(causal, window, scale, chunk_size, softcap)
    if implementation is None:
        implementation = _select(options, q, k, v, segment_ids)
    attend = IMPLEMENTATIONS[implementation]

    def run(q, k, v, segment_ids):
        q, k, v, segment_ids = match_varying((q, k, v, segment_ids))
        q, k, v = forbid_forward_mode("dot_product_attention", (q, k, v))
        return attend(options, q, k, v, segment_ids), ()

    return with_auto_axes_over_batch(run, q)(q, k, v, segment_ids)[0]


class _Options(NamedTuple):
    causal: bool
    window: int | None
    scale: float
    chunk_size: int
    softcap: float | None = None


def _check(q: Any, k: Any, v: Any, segment_ids: Any) -> tuple:
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"`q`, `k` and `v` must have the same dtype, not {q.dtype}, {k.dtype} and {v.dtype}."
        )
    if q.ndim != 4:
        raise ValueError(f"`q` of shape {q.shape} must be [N, T, H, D].")
    for name, a in (("k", k), ("v", v)):
        if a.ndim != 4 or a.shape != (*q.shape[:2], k.shape[2], q.shape[3]):
            raise ValueError(
                f"`{name}` of shape {a.shape} must be [N, T, K, D], with the N, T and D of `q` "
                f"{q.shape} and the same K in `k` and `v`."
            )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"The {k.shape[2]} heads of `k` must divide the {q.shape[2]} heads of `q`."
        )
    if segment_ids is not None:
        segment_ids = as_array("segment_ids", segment_ids, jnp.integer)
        if segment_ids.shape != q.shape[:2]:
            raise ValueError(f"`segment_ids` of shape {segment_ids.shape} must be {q.shape[:2]}.")
    return q, k, v, segment_ids


def _default_chunk(q: jax.Array) -> int:
    n, _, h, _ = known_sizes(*q.shape)
    size = TILE
    while 4 * max(n * h, 1) * (2 * size) ** 2 <= CHUNK_BYTES:
        size *= 2
    return size


def _select(options: _Options, q, k, v, segment_ids) -> str:
    """Return the best implementation; while tracing, because others cannot be traced everywhere."""
    args = options, q, k, v, segment_ids
    if traced_platform() == "cuda" and q.dtype.itemsize == 2 and options.softcap is None:
        n, t = known_sizes(*q.shape[:2])
        fits = segment_ids is None or n * t**2 * q.dtype.itemsize <= MASK_BYTES
        if fits and not is_wrong("dot_product_attention", q.dtype):
            return "cudnn" if _can_trace(_attend_cudnn, *args) else "xla"
        return "xla"
    if traced_platform() == "tpu" and not _unsupported_by_splash(q):
        # On one TPU, or inside shard_map over all axes. Elsewhere jit might have to partition the
        # kernel, which it cannot.
        one = jax.default_backend() == "tpu" and jax.device_count() == 1
        axes = frozenset(jax.sharding.get_abstract_mesh().axis_names)
        if axes == manual_axes() and (axes or one):
            return "splash" if _can_trace(_attend_splash, *args) else "xla"
    return "xla"


def _can_trace(attend: Callable, options: _Options, *arrays) -> bool:
    """Return True if the gradients of a library's kernel can be traced here."""
    # cuDNN checks shapes, its version and the GPU. Pallas kernels do not support shard_map with
    # check_vma=True.

    def loss(q, k, v, segment_ids):
        return attend(options, q, k, v, segment_ids).astype(jnp.float32).sum()

    shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    try:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), *shapes)
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


# The loop. With s = scale * q @ k.T, p = exp(s - logsumexp(s)), y = p @ v, and g the gradient of y:
#   dv = p.T @ g    dp = g @ v.T    ds = p * (dp - sum(g * y))    dq = scale * ds @ k
#   dk = scale * ds.T @ q
# With a soft cap c, s = c * tanh(r / c) of r = scale * q @ k.T, and ds is multiplied by
# ds/dr = 1 - (s / c)^2.
# Both passes visit the same pairs of a chunk of queries and a chunk of keys. All pairs of one chunk
# of queries follow each other, so that its sums are complete when the next chunk begins.
#
# If the chunk does not divide T, the last chunk begins earlier and overlaps the one before, which
# needs no padding. Overlapping queries are computed twice. Overlapping keys are masked, and
# overlapping queries do not contribute to dk and dv.


class _Chunks(NamedTuple):
    """The chunks of a sequence, and the pairs of them that are not excluded."""

    size: int
    starts: np.ndarray  # [B], the first token of each chunk
    pairs: np.ndarray  # [P, 3]: a chunk of queries, one of keys, whether the queries are new
    overlap: int  # number of tokens of the last chunk that the one before has

    @classmethod
    def of(cls, t: int, options: _Options) -> "_Chunks":
        size = options.chunk_size
        starts = np.minimum(np.arange(0, t, size), t - size)
        pairs = []
        for i, start in enumerate(starts):
            first = True
            for j, of_keys in enumerate(starts):
                if options.causal and of_keys >= start + size:
                    continue
                if options.window is not None and of_keys + size <= start - options.window + 1:
                    continue
                pairs.append((i, j, first))
                first = False
        return cls(size, starts, np.array(pairs, np.int32), len(starts) * size - t)

    def scan(self, body: Callable, carry: Any) -> Any:
        """Run ``carry = body(carry, queries, keys, is_new)`` on the first tokens of each pair."""
        i, j, new = self.pairs.T
        starts = self.starts.astype(np.int32)
        inputs = starts[i], starts[j], i, j, new.astype(bool)

        def step(carry, pair):
            start, of_keys, i, j, is_new = pair
            return body(carry, (start, i), (of_keys, j), is_new), None

        return lax.scan(step, carry, inputs)[0]

    def take(self, a: jax.Array, start, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, start, self.size, axis)

    def is_own(self, chunk) -> jax.Array:
        """Return whether each token of a chunk is in no chunk before it, [size]."""
        start, index = chunk
        return start + jnp.arange(self.size) >= index * self.size


def _write(a: jax.Array, chunk: jax.Array, start, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, chunk.astype(a.dtype), start, axis)


def _dot(a: jax.Array, b: jax.Array, contract: tuple, batch: tuple) -> jax.Array:
    """Contract axes of a and b, accumulating in float32 or wider."""
    wide = accumulation_dtype(a)
    return lax.dot_general(a, b, (contract, batch), preferred_element_type=wide)


def _chunk_scores(options: _Options, chunks: _Chunks, q, k, segment_ids, queries, keys):
    """Return the scores [N, K, chunk, G, chunk] of q [N, chunk, K, G, D] and k [N, chunk, K, D]."""
    # The second result is their derivative by the scores before the soft cap; None without one.
    scores, slope = _dot(q, k, ((4,), (3,)), ((0, 2), (0, 2))) * options.scale, None
    if options.softcap is not None:
        share = jnp.tanh(scores / options.softcap)
        scores, slope = options.softcap * share, 1 - jnp.square(share)
    rows = queries[0] + jnp.arange(chunks.size)[:, None]
    columns = keys[0] + jnp.arange(chunks.size)
    seen = jnp.ones((chunks.size, chunks.size), bool)
    if options.causal:
        seen &= rows >= columns
    if options.window is not None:
        seen &= rows - columns < options.window
    if chunks.overlap:
        seen &= chunks.is_own(keys)
    seen = seen[None]
    if segment_ids is not None:
        rows, columns = (chunks.take(segment_ids, b[0], 1) for b in (queries, keys))
        seen &= rows[:, :, None] == columns[:, None]
    return jnp.where(seen[:, None, :, None], scores, MASKED), slope


def _group(q: jax.Array, k: jax.Array) -> jax.Array:
    """Reshape [N, T, H, D] to [N, T, K, G, D]."""
    n, t, h, d = q.shape
    return q.reshape(n, t, k.shape[2], h // k.shape[2], d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_xla(options: _Options, q, k, v, segment_ids) -> Any:
    return _forward(options, q, k, v, segment_ids)[0]


def _forward(options: _Options, q, k, v, segment_ids):
    chunks = _Chunks.of(q.shape[1], options)
    grouped = _group(q, k)
    n, t, kv, groups, d = grouped.shape
    wide = accumulation_dtype(q)

    def body(carry, queries, keys, is_new):
        y, z, total, high, sums = carry
        q_chunk, (k_chunk, v_chunk) = (
            chunks.take(grouped, queries[0], 1),
            [chunks.take(a, keys[0], 1) for a in (k, v)],
        )
        s, _ = _chunk_scores(options, chunks, q_chunk, k_chunk, segment_ids, queries, keys)
        total, sums = jnp.where(is_new, 0, total), jnp.where(is_new, 0, sums)
        high = jnp.where(is_new, MASKED, high)
        # The maximum of all scores so far. If all were masked, the sums are of masked keys; the
        # first score that is not masked multiplies them by exp(MASKED - score) = 0.
        new = jnp.maximum(high, jnp.max(s, -1))
        p, decay = jnp.exp(s - new[..., None]), jnp.exp(high - new)
        total = total * decay + jnp.sum(p, -1)
        more = _dot(p.astype(v.dtype), v_chunk, ((4,), (1,)), ((0, 1), (0, 2)))
        sums = sums * decay[..., None] + more
        # Complete after the last pair of this chunk of queries, and overwritten until then.
        y = _write(y, jnp.moveaxis(sums / total[..., None], 1, 2), queries[0], 1)
        z = _write(z, new + jnp.log(total), queries[0], 2)
        return y, z, total, new, sums

    rows = zeros((n, kv, chunks.size, groups), wide, q)
    y, z, *_ = chunks.scan(
        body,
        (
            zeros(grouped.shape, q.dtype, q),
            zeros((n, kv, t, groups), wide, q),  # logsumexp(scores)
            rows,
            rows,
            zeros((*rows.shape, d), wide, q),
        ),
    )
    y = y.reshape(q.shape)
    return y, (q, k, v, segment_ids, y, z)


def _backward(options: _Options, residuals, g):
    q, k, v, segment_ids, y, z = residuals
    chunks = _Chunks.of(q.shape[1], options)
    grouped, g = _group(q, k), _group(g, k)
    wide = accumulation_dtype(q)
    products = g.astype(wide) * _group(y, k).astype(wide)
    delta = jnp.moveaxis(jnp.sum(products, -1), 1, 2)  # [N, K, T, G]

    def body(carry, queries, keys, is_new):
        dq, dk, dv, sums = carry
        q_chunk, g_chunk = (chunks.take(a, queries[0], 1) for a in (grouped, g))
        k_chunk, v_chunk = (chunks.take(a, keys[0], 1) for a in (k, v))
        z_chunk, delta_chunk = (chunks.take(a, queries[0], 2)[..., None] for a in (z, delta))
        s, slope = _chunk_scores(options, chunks, q_chunk, k_chunk, segment_ids, queries, keys)
        p = jnp.exp(s - z_chunk)
        dp = _dot(g_chunk, v_chunk, ((4,), (3,)), ((0, 2), (0, 2)))
        ds = p * (dp - delta_chunk) * options.scale
        ds = (ds if slope is None else ds * slope).astype(q.dtype)
        more = _dot(ds, k_chunk, ((4,), (1,)), ((0, 1), (0, 2)))  # [N, K, chunk, G, D]
        sums = jnp.where(is_new, 0, sums) + more
        dq = _write(dq, jnp.moveaxis(sums, 1, 2), queries[0], 1)
        if chunks.overlap:
            own = chunks.is_own(queries)[:, None, None, None]
            q_chunk, g_chunk = jnp.where(own, q_chunk, 0), jnp.where(own, g_chunk, 0)
        transposed = ((2, 3), (1, 3)), ((0, 1), (0, 2))
        dk_chunk = _dot(ds, q_chunk, *transposed)  # [N, K, chunk, D]
        dv_chunk = _dot(p.astype(g.dtype), g_chunk, *transposed)
        dk = _write(dk, chunks.take(dk, keys[0], 2) + dk_chunk, keys[0], 2)
        dv = _write(dv, chunks.take(dv, keys[0], 2) + dv_chunk, keys[0], 2)
        return dq, dk, dv, sums

    n, t, kv, groups, d = grouped.shape
    empty = zeros((n, kv, t, d), wide, q)
    sums = zeros((n, kv, chunks.size, groups, d), wide, q)
    dq, dk, dv, _ = chunks.scan(body, (zeros(grouped.shape, q.dtype, q), empty, empty, sums))
    dk, dv = (jnp.moveaxis(a, 1, 2).astype(q.dtype) for a in (dk, dv))
    return dq.reshape(q.shape), dk, dv, None


_attend_xla.defvjp(_forward, _backward)


# Kernels of libraries.


def _attend_cudnn(options: _Options, q, k, v, segment_ids) -> jax.Array:
    if options.softcap is not None:
        raise ValueError(
            f'implementation="cudnn" does not support `softcap` (={options.softcap}). Use "xla".'
        )
    return jax.nn.dot_product_attention(
        q, k, v, mask=_mask(segment_ids), scale=options.scale, is_causal=options.causal,
        implementation="cudnn", local_window_size=_local_window(options),
    )  # fmt: skip


def _attend_tokamax(options: _Options, q, k, v, segment_ids) -> jax.Array:
    tokamax: Any = importlib.import_module("tokamax")
    return tokamax.dot_product_attention(
        q, k, v, mask=_mask(segment_ids), scale=options.scale, is_causal=options.causal,
        local_window_size=_local_window(options), logits_soft_cap=options.softcap,
    )  # fmt: skip


def _mask(segment_ids: jax.Array | None) -> jax.Array | None:
    """Return which tokens are in the same segment, for all heads: [N, 1, T, T]."""
    if segment_ids is None:
        return None
    return (segment_ids[:, :, None] == segment_ids[:, None])[:, None]


def _local_window(options: _Options) -> tuple[int, int] | None:
    """Return the number of keys before and after a query's own."""
    return None if options.window is None else (options.window - 1, 0)


def _unsupported_by_splash(q: jax.Array) -> str:
    """Return why splash attention does not support queries of this shape, or nothing."""
    _, t, _, d = q.shape
    if t % TILE or d % 64:
        return f"T (={t}) must be a multiple of {TILE}, and D (={d}) a multiple of 64"
    return ""


def _attend_splash(options: _Options, q, k, v, segment_ids) -> jax.Array:
    if reason := _unsupported_by_splash(q):
        raise ValueError(f'implementation="splash": {reason}. Use "xla".')
    # Imported here, because `import effjax` does not import Pallas.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, t, h, _ = q.shape
    if options.window is not None:
        mask = splash.LocalMask((t, t), (options.window - 1, 0), 0)
    elif options.causal:
        mask = splash.CausalMask((t, t))
    else:
        mask = splash.FullMask((t, t))
    size = max(s for s in (128, 256, 512) if t % s == 0)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size, block_kv_dkv=size,
        block_kv_dkv_compute=size, block_q_dq=size, block_kv_dq=size,
    )  # fmt: skip
    kernel: Any = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * h), block_sizes=sizes, interpret=traced_platform() != "tpu",
        attn_logits_soft_cap=options.softcap,
    )  # fmt: skip

    def attend_one(q, k, v, ids):
        ids = None if ids is None else splash.SegmentIds(ids, ids)
        return kernel(q, k, v, segment_ids=ids)

    # The kernel does not scale: queries are scaled before it.
    scaled = q * jnp.asarray(options.scale, q.dtype)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (scaled, k, v))  # [N, heads, T, D]
    y: jax.Array = jax.vmap(attend_one)(q, k, v, segment_ids)
    return jnp.swapaxes(y, 1, 2).astype(q.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": _attend_xla,
    "cudnn": _attend_cudnn,
    "splash": _attend_splash,
    "tokamax": _attend_tokamax,
}
