"""Batch statistics over devices, and the gradients of normalization.

Arrays of statistics keep their reduced axes (``keepdims``), so that they broadcast against x for
any feature axes.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType
from numpy.lib.array_utils import normalize_axis_tuple

from .._common.arguments import as_integer, as_number, check_choice
from .._common.dtypes import accumulation_dtype
from .._common.platform import known_sizes
from .._common.sharding import (
    AxisNames,
    as_axis_names,
    cast_to_varying,
    explicit_spec,
    manual_axes,
    reshape,
    shard_like_features,
    varying_axes,
)

AXES = (0, 1, 2)  # the reduced axes of [N, H, W, C]

# Above this traffic two small all-reduces are cheaper than one that grows with the devices.
GATHER_BYTES = 256 * 1024


class BatchStats(NamedTuple):
    """Statistics of one batch over all participating devices. They carry no gradient.

    Attributes:
        mean: mean of each feature, float32 or wider.
        var: biased variance of each feature, of the dtype of `mean`.
        count: number of values behind each mean: a scalar, or one number per feature if the mask
            differs by feature. Where it is 0, the mean is 0 and the variance is 1.
    """

    mean: jax.Array
    var: jax.Array
    count: jax.Array


class Reduction(NamedTuple):
    """Devices that share statistics, and how they are merged. Hashable: a static argument."""

    axis_names: AxisNames = ()
    axis_sizes: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    stats: str = "auto"

    @property
    def size(self) -> int:
        """Number of devices that share one set of statistics."""
        return len(self.groups[0]) if self.groups else math.prod(self.axis_sizes)


# Mean and variance


def moments(
    x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...], reduction: Reduction
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean, biased variance and count of x over `axes` and the devices of `reduction`.

    They are float32 or wider and keep the reduced axes. Where the count is 0, the mean is 0 and the
    variance is 1.
    """
    x = x.astype(accumulation_dtype(x))
    blocks, axis = find_blocks(x, axes)
    features = math.prod(n for a, n in enumerate(x.shape) if a not in axes)
    row_bytes = (2 if mask is None else 3) * features * x.dtype.itemsize
    if blocks > 1 and _gathers(blocks * row_bytes, reduction):
        mean, m2, count = _block_moments(x, mask, axes, blocks, axis)
    else:
        mean, m2, count = _local_moments(x, mask, axes)
    if reduction.axis_names:
        mean, m2, count = _merge(mean, m2, count, mask is None, reduction)
    var = jnp.where(count > 0, m2 / jnp.maximum(count, 1), 1)
    return mean, var, count


def _gathers(message_bytes: int, reduction: Reduction) -> bool:
    """Return True if one all-reduce of every device's statistics replaces two small ones."""
    is_small = message_bytes <= GATHER_BYTES
    return reduction.stats == "gather" or (reduction.stats == "auto" and is_small)


def _local_moments(x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...]) -> tuple:
    """Return mean, sum of squared deviations (M2) and count on this device."""
    if mask is None:
        count = jnp.full([1] * x.ndim, math.prod(x.shape[a] for a in axes), x.dtype)
    else:
        repeats = math.prod(x.shape[a] // mask.shape[a] for a in axes if mask.shape[a])
        count = (jnp.sum(mask, axes, dtype=jnp.int32, keepdims=True) * repeats).astype(x.dtype)

    def total(v):
        return jnp.sum(v if mask is None else jnp.where(mask, v, 0), axes, keepdims=True)

    # Two passes over x. The second pass also sums the deviations themselves, which is the rounding
    # error of the first; it corrects both results (Chan, Golub & LeVeque, 1983). This keeps float32
    # accurate where the mean is much larger than the deviation.
    n = jnp.maximum(count, 1)
    mean = total(x) / n
    error = total(x - mean) / n
    m2 = jnp.maximum(total(jnp.square(x - mean)) - n * jnp.square(error), 0)
    return mean + error, m2, count


def _block_moments(x, mask, axes: tuple[int, ...], blocks: int, axis: int) -> tuple:
    """Return the result of `_local_moments`, for an x that jit may shard along `axis`."""
    # Two passes over a sharded x would be two all-reduces, one after the other. Inside the blocks
    # of `find_blocks` both passes stay on the device, and one all-reduce merges the blocks.
    inner = tuple(a + (a >= axis) for a in axes)  # without the axis of the blocks
    counted = None if mask is None else split_blocks(mask, blocks, axis)
    mean, m2, count = _local_moments(split_blocks(x, blocks, axis), counted, inner)
    arrays = [mean, m2]
    if mask is not None:  # a count that is the same for all features is repeated to stack it
        repeated = jnp.broadcast_to(count, mean.shape)
        arrays.append(shard_like_features(repeated, mean, range(mean.ndim)))
    rows = jnp.stack(arrays)  # [2 or 3, .., blocks, ..]
    # A sum of one-hot rows gathers the blocks. XLA makes it one all-reduce, on every backend.
    others = [a for a in range(rows.ndim + 1) if a not in (0, axis + 2)]
    is_own_row = jnp.expand_dims(jnp.eye(blocks, dtype=bool), others)
    rows = jnp.sum(jnp.where(is_own_row, rows, 0), axis + 2)  # [blocks, 2 or 3, .., 1, ..]
    if mask is None:
        return _merge_rows(rows[:, 0], rows[:, 1], jnp.squeeze(count, axis)[None], blocks)
    merged, m2, total = _merge_rows(rows[:, 0], rows[:, 1], rows[:, 2])
    shape = count.shape[:axis] + count.shape[axis + 1 :]
    repeated = tuple(a for a, n in enumerate(shape) if n < total.shape[a])
    return merged, m2, jnp.max(total, repeated, keepdims=True)


def _merge(mean, m2, count, equal_counts: bool, reduction: Reduction) -> tuple:
    """Merge (mean, M2, count) of all devices by Chan's formula, with one or two all-reduces."""
    # ``M2 = sum_i M2_i + count_i * (mean_i - mean)**2``
    size = reduction.size
    arrays = (mean, m2) if equal_counts else (mean, m2, count)
    message = jnp.concatenate([v.ravel() for v in arrays])
    if _gathers(size * message.size * message.dtype.itemsize, reduction):
        # [devices, 2C], plus 1 to C counts with a mask
        rows = _all_gather(message, size, reduction)
        means = rows[:, : mean.size].reshape(size, *mean.shape)
        m2s = rows[:, mean.size : 2 * mean.size].reshape(size, *mean.shape)
        if equal_counts:
            return _merge_rows(means, m2s, count[None], size)
        return _merge_rows(means, m2s, rows[:, 2 * mean.size :].reshape(size, *count.shape))
    if equal_counts:
        total = count * size
        merged = psum(mean, reduction) / size
    else:
        sums = psum(jnp.concatenate([(count * mean).ravel(), count.ravel()]), reduction)
        total = sums[mean.size :].reshape(count.shape)
        merged = sums[: mean.size].reshape(mean.shape) / jnp.maximum(total, 1)
    return merged, psum(m2 + count * jnp.square(mean - merged), reduction), total


def _merge_rows(means, m2s, counts, repeats: int = 1) -> tuple:
    """Merge the rows of arrays [devices, ...]; one row of counts may stand for `repeats` rows."""
    total = counts.sum(0) * repeats
    n = jnp.maximum(total, 1)
    merged = (counts * means).sum(0) / n
    merged += (counts * (means - merged)).sum(0) / n  # corrects the rounding of the first sum
    return merged, (m2s + counts * jnp.square(means - merged)).sum(0), total


# Blocks of an array that jit shards


def find_blocks(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, int]:
    """Return a number of blocks along the first reduced axis of x, and that axis."""
    # A multiple of the number of shards, so that each block is on one device. It is 1 where the
    # type of x has no mesh, and inside shard_map and pmap.
    if not axes or not x.size:
        return 1, 0
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = [mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual]
    (size,) = known_sizes(x.shape[axes[0]])
    return math.gcd(math.prod(free), size), axes[0]


def split_blocks(v: jax.Array, blocks: int, axis: int) -> jax.Array:
    """Reshape [.., n, ..] to [.., blocks, n / blocks, ..], and [.., 1, ..] to [.., 1, 1, ..]."""
    outer = math.gcd(blocks, v.shape[axis])
    shape = (*v.shape[:axis], outer, v.shape[axis] // outer, *v.shape[axis + 1 :])
    spec = explicit_spec(v)
    return reshape(v, shape, (*spec[: axis + 1], None, *spec[axis + 1 :]))


# Collectives


def psum(v: jax.Array, reduction: Reduction) -> jax.Array:
    """Sum v over the devices of `reduction`."""
    if not reduction.axis_names:
        return v
    # For a constant, JAX would look up the size of the axis, which fails where the axis is out of
    # scope (see `get_axis_sizes`).
    if not isinstance(v, Tracer):
        return v * reduction.size
    # With check_vma=True, the type of v must vary over every axis that is summed over.
    if varying_axes(v):
        v = cast_to_varying(v, manual_axes().intersection(reduction.axis_names))
    if reduction.groups is None:
        return lax.psum(v, reduction.axis_names)
    try:
        return lax.psum(v, reduction.axis_names, axis_index_groups=reduction.groups)
    except NotImplementedError as error:  # JAX supports groups only under pmap and check_vma=False
        axis = reduction.axis_names[0]
        raise ValueError(
            "`axis_index_groups` does not work under vmap or shard_map(check_vma=True). Make a "
            f"mesh of shape ({len(reduction.groups)}, {len(reduction.groups[0])}) with axes "
            f"('group', {axis!r}) instead, and pass only axis_name={axis!r}: statistics are then "
            "computed inside each group."
        ) from error


def _all_gather(v: jax.Array, size: int, reduction: Reduction) -> jax.Array:
    """Return v of all devices, [size, len(v)]."""
    index: Any = 0
    for name, length in zip(reduction.axis_names, reduction.axis_sizes, strict=True):
        index = index * length + lax.axis_index(name)
    if reduction.groups:
        members = [i for group in reduction.groups for i in group]
        positions = [members.index(i) % size for i in range(len(members))]
        index = jnp.asarray(positions)[index]
    # A sum of one-hot rows, because the result of a sum has the type of a replicated value. That of
    # lax.all_gather varies over the axis.
    is_own_row = jnp.arange(size)[:, None] == index  # [size, 1]
    return psum(jnp.where(is_own_row, v, jnp.zeros_like(v)), reduction)


# Normalization and its gradient. With xhat = (x - mean) * inv, y = xhat * scale + bias and N values
# counted over all devices, the gradient g of y gives
#   dx = scale * inv * (g - [counted] * (sum(g) + xhat * sum(g * xhat)) / N)


def normalize(x: jax.Array, mean, inv, scale, bias) -> jax.Array:
    """Return ``(x - mean) * inv * scale + bias`` in the dtype of the statistics."""
    y = (x.astype(mean.dtype) - mean) * (inv if scale is None else inv * scale.astype(inv.dtype))
    return y if bias is None else y + bias.astype(inv.dtype)


def feature_sums(g, x, mean, inv, mask, axes) -> jax.Array:
    """Return this device's ``[sum(g), sum(g * xhat)]`` of every feature, [2, 1, .., C, .., 1]."""
    g = g.astype(inv.dtype)
    xhat = (x.astype(inv.dtype) - mean) * inv
    # A masked value may be NaN. If it has no gradient, it must not make the sum NaN.
    if mask is not None:
        xhat = jnp.where(mask | (g != 0), xhat, 0)
    values = [g, g * xhat]
    blocks, axis = find_blocks(x, axes)
    if blocks == 1:
        return jnp.stack([jnp.sum(v, axes, keepdims=True) for v in values])
    # The sums of blocks stay on the device under jit, and XLA partitions the last sum into one
    # all-reduce. Two sums of a sharded x would be two, which not every backend combines.
    inner = tuple(a + (a >= axis) for a in axes)
    sums = [jnp.sum(split_blocks(v, blocks, axis), inner, keepdims=True) for v in values]
    return jnp.sum(jnp.stack(sums), axis + 1)


def project(dx, total, x, mean, inv, mask, count) -> jax.Array:
    """Subtract the part through the batch statistics from the gradient of x.

    Args:
        dx: the gradient of x with the batch statistics held fixed, ``inv * scale * dy``.
        total: ``[sum(dx), sum(dx * xhat)]`` over all devices, without the part of dx that did not
            pass through the normalization.
        x: the input.
        mean: its mean.
        inv: its inverse standard deviation.
        mask: the values that were counted, or None.
        count: their number.

    Returns:
        ``dx - [counted] * (total[0] + xhat * total[1]) / count`` in the dtype of the statistics.
    """
    xhat = (x.astype(inv.dtype) - mean) * inv
    share = (total[0] + xhat * total[1]) / jnp.maximum(count, 1)
    return dx.astype(inv.dtype) - (share if mask is None else jnp.where(mask, share, 0))


def normalize_backward(
    g, x, mean, inv, scale, mask, count, axes, reduction: Reduction, same_scale: bool = False
) -> tuple:
    """Return the gradients of ``normalize(x, ...)`` from g, with one all-reduce.

    Returns:
        dx; this device's ``[sum(g), sum(g * xhat)]``, the gradients of bias and scale; and the same
        sums over all devices if all of them have the same scale (`same_scale`), otherwise None.
    """
    local = feature_sums(g, x, mean, inv, mask, axes)
    slope = inv if scale is None else inv * scale.astype(inv.dtype)
    total = psum(local, reduction) if same_scale else None
    # If the scales differ, each device weighs its sums with its own scale before they are added.
    weighted = psum(local * slope, reduction) if total is None else total * slope
    return project(g * slope, weighted, x, mean, inv, mask, count), local, total


# Arguments


def get_axis_sizes(names: AxisNames) -> tuple[int, ...]:
    """Return the number of devices along each axis."""
    # Call this outside of a custom_vjp. When JAX differentiates jit, checkpoint or scan of a vmap,
    # the rules run where vmap's axes are out of scope: only `psum` and `axis_index` with a single
    # name still work.
    try:
        return tuple(int(lax.axis_size(name)) for name in names)
    except NameError:
        shown = names[0] if len(names) == 1 else names
        raise ValueError(
            f"`axis_name` (={shown!r}) is not mapped here. Call this inside pmap, shard_map or "
            "vmap over an axis of that name, or pass None: under plain jit the statistics are of "
            "the whole batch already. A BatchNorm needs its axis where it takes statistics: in "
            "training, and with track_running_stats=False always. For evaluation with running "
            "statistics call model.eval() or pass use_running_average=True."
        ) from None


def make_reduction(
    axis_name: Hashable | Sequence[Hashable] | None, axis_index_groups: Any, stats: str
) -> Reduction:
    """Validate the arguments that all synchronized operators share."""
    names = as_axis_names(axis_name)
    check_choice("stats", stats, "auto", "gather", "two_psum")
    sizes, groups = get_axis_sizes(names), as_index_groups(axis_index_groups)
    if groups is None:
        return Reduction(names, sizes, None, stats)
    devices = math.prod(sizes)
    if isinstance(groups, int):
        groups = tuple(tuple(range(i, i + groups)) for i in range(0, devices, groups))
    members = sorted(i for group in groups for i in group)
    is_equal = len({len(group) for group in groups}) == 1
    if len(names) != 1 or members != list(range(devices)) or not is_equal:
        raise ValueError(
            f"`axis_index_groups` (={axis_index_groups!r:.80}) must contain each of the {devices} "
            f"devices of one axis (`axis_name`={axis_name!r}) once, in groups of equal size. For "
            "more axes, use a mesh with one axis for the groups and one inside them."
        )
    return Reduction(names, sizes, groups, stats)


def as_index_groups(groups: Any) -> int | tuple[tuple[int, ...], ...] | None:
    """Return `axis_index_groups` as hashable tuples, or as the size of a group."""
    if groups is None:
        return None
    if hasattr(groups, "__index__") and not getattr(groups, "ndim", 0):
        return as_integer("axis_index_groups", groups, 1)
    return tuple(tuple(operator.index(i) for i in group) for group in groups)


def check_epsilon(epsilon: Any) -> float:
    """Return a positive float."""
    return as_number("epsilon", epsilon, lambda e: 0 < e < math.inf, "positive")


def reduced_axes(x: jax.Array, feature_axis: Any) -> tuple[int, ...]:
    """Return the axes of x that are not feature axes. A single example has none."""
    features = normalize_axis_tuple(feature_axis, x.ndim, "feature_axis")
    if not features:
        raise ValueError(f"`feature_axis` (={feature_axis}) must name at least one axis.")
    return tuple(a for a in range(x.ndim) if a not in features)
