"""Batch statistics over devices, and what they take away from a gradient.

Arrays of statistics keep their reduced axes (``keepdims``), so that any set of feature axes
broadcasts against x.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .._common.arguments import as_integer, as_mask, as_number, check_choice, describe
from .._common.dtypes import accumulation_dtype
from .._common.sharding import (
    AxisNames,
    as_axis_names,
    cast_to_varying,
    get_axis_sizes,
    manual_axes,
    varying_axes,
)

AXES = (0, 1, 2)  # of [N, H, W, C], what the statistics of a feature are over

# Above this traffic two small all-reduces are cheaper than one that grows with the devices.
GATHER_BYTES = 256 * 1024


class BatchStats(NamedTuple):
    """Statistics of one batch, over all devices that took part. No gradient flows through them.

    Attributes:
        mean: mean of each feature, float32 or wider.
        var: biased variance of each feature, of the same dtype as `mean`.
        count: how many values each mean is over: a scalar, or one number a feature where the mask
            differs by feature. Where it is 0 the mean is 0 and the variance is 1.
    """

    mean: jax.Array
    var: jax.Array
    count: jax.Array


class Reduction(NamedTuple):
    """Over which devices statistics are taken, and how. Hashable: a static argument."""

    axis_names: AxisNames = ()
    axis_sizes: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    stats: str = "auto"

    @property
    def size(self) -> int:
        """How many devices share one set of statistics."""
        return len(self.groups[0]) if self.groups else math.prod(self.axis_sizes)


def make_reduction(
    axis_name: Hashable | Sequence[Hashable] | None, axis_index_groups: Any, stats: str
) -> Reduction:
    """Validates the arguments that all synchronized operators share."""
    names = as_axis_names(axis_name)
    check_choice("stats", stats, "auto", "gather", "two_psum")
    groups = index_groups(axis_index_groups)
    if groups is None:
        return Reduction(names, get_axis_sizes(names), None, stats)
    if len(names) != 1:
        raise ValueError(
            f"`axis_index_groups` divides one axis, but `axis_name` is {axis_name!r}; name exactly "
            "one axis, or use a mesh with an axis for the groups and one inside them."
        )
    if isinstance(groups, int):
        sizes = get_axis_sizes(names)
        return Reduction(names, sizes, _neighbors(groups, names[0], sizes[0]), stats)
    members = sorted(i for group in groups for i in group)
    if members != list(range(len(members))) or len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"`axis_index_groups` (={axis_index_groups!r}) must hold every device index once, in "
            "groups of one size."
        )
    sizes = get_axis_sizes(names)
    if len(members) != sizes[0]:
        raise ValueError(
            f"`axis_index_groups` (={groups}) must hold all {sizes[0]} devices of the axis "
            f"{names[0]!r}, but holds {len(members)}."
        )
    return Reduction(names, sizes, groups, stats)


def _neighbors(group_size: int, axis_name: Hashable, axis_size: int) -> tuple:
    """Groups of this size along an axis."""
    if axis_size % group_size:
        raise ValueError(
            f"`axis_index_groups` (={group_size}) must divide the {axis_size} devices of the axis "
            f"{axis_name!r}, or be lists of device indices."
        )
    return tuple(tuple(range(i, i + group_size)) for i in range(0, axis_size, group_size))


def index_groups(groups: Any) -> int | tuple[tuple[int, ...], ...] | None:
    """`axis_index_groups` as tuples, which can be hashed, or as the size of a group."""
    if groups is None:
        return None
    if hasattr(groups, "__index__") and not getattr(groups, "ndim", 0):
        return as_integer("axis_index_groups", groups, 1)
    try:
        return tuple(tuple(operator.index(i) for i in group) for group in groups)
    except TypeError:
        raise TypeError(
            "`axis_index_groups` must be lists of device indices, like [[0, 1], [2, 3]], or the "
            f"size of a group, not {describe(groups)}."
        ) from None


def psum(v: jax.Array, reduction: Reduction) -> jax.Array:
    """Sums v over the devices of `reduction`: one all-reduce, or none without an axis."""
    if not reduction.axis_names:
        return v
    if not isinstance(v, Tracer):  # a constant; JAX would ask for the axis, which may be gone
        return v * reduction.size
    if varying_axes(v):  # the types are checked: they must name all the axes that are summed over
        of_mesh = manual_axes().intersection(reduction.axis_names)
        _check_mapped(reduction.axis_names, of_mesh)
        v = cast_to_varying(v, of_mesh)
    try:
        return lax.psum(v, reduction.axis_names, axis_index_groups=reduction.groups)
    except NotImplementedError as error:  # JAX has groups under pmap and without types alone
        if reduction.groups is None:
            raise
        axis = reduction.axis_names[0]
        raise ValueError(
            "`axis_index_groups` does not work under vmap or shard_map(check_vma=True). Make a "
            f"mesh of shape ({len(reduction.groups)}, {len(reduction.groups[0])}) with axes "
            f"('group', {axis!r}) in its place, and pass axis_name={axis!r} alone: statistics are "
            "then taken inside each group."
        ) from error


def _check_mapped(names: tuple[Hashable, ...], of_mesh: frozenset) -> None:
    """Raises ValueError for axes of vmap, over which JAX has no sums where types are checked."""
    mapped = [name for name in names if name not in of_mesh]
    if mapped:
        raise ValueError(
            f"`axis_name` has {mapped[0]!r}, which is not an axis of the mesh but of vmap: inside "
            "shard_map(check_vma=True) JAX has no sum over that. Make the mapped axis part of the "
            "batch, or pass check_vma=False to shard_map."
        )


def local_moments(x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...]) -> tuple:
    """Mean, sum of squared deviations (M2) and count on this device, by two passes over x.

    The second pass also sums the deviations themselves: what is left of the rounding error of the
    first pass, which corrects both results (Chan, Golub & LeVeque, 1983). This is what keeps mean
    >> std accurate in float32.
    """
    if mask is None:
        count = jnp.full([1] * x.ndim, math.prod(x.shape[a] for a in axes), x.dtype)
    else:
        repeats = math.prod(x.shape[a] // mask.shape[a] for a in axes if mask.shape[a])
        count = (jnp.sum(mask, axes, dtype=jnp.int32, keepdims=True) * repeats).astype(x.dtype)

    def total(v):
        return jnp.sum(v if mask is None else jnp.where(mask, v, 0), axes, keepdims=True)

    n = jnp.maximum(count, 1)
    mean = total(x) / n
    left = total(x - mean) / n
    m2 = jnp.maximum(total(jnp.square(x - mean)) - n * jnp.square(left), 0)
    return mean + left, m2, count


def moments(
    x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...], reduction: Reduction
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and count of x over `axes` and the devices of `reduction`.

    In float32, or in x's dtype where that is wider; the reduced axes are kept. Where nothing is
    counted the mean is 0 and the variance is 1.
    """
    mean, m2, count = local_moments(x.astype(accumulation_dtype(x)), mask, axes)
    if reduction.axis_names:
        mean, m2, count = _merge(mean, m2, count, mask is None, reduction)
    var = jnp.where(count > 0, m2 / jnp.maximum(count, 1), 1)
    return mean, var, count


def _merge(mean, m2, count, equal_counts: bool, reduction: Reduction) -> tuple:
    """Merges (mean, M2, count) of all devices by Chan's formula, in one or two all-reduces."""
    size = reduction.size
    counted = (mean, m2) if equal_counts else (mean, m2, count)
    message = jnp.concatenate([v.ravel() for v in counted])
    small = size * message.size * message.dtype.itemsize <= GATHER_BYTES
    if reduction.stats == "gather" or (reduction.stats == "auto" and small):
        parts = _gather(message, size, reduction)
        means = parts[:, : mean.size].reshape(size, *mean.shape)
        m2s = parts[:, mean.size : 2 * mean.size].reshape(size, *mean.shape)
        if equal_counts:
            counts, total = count[None], count * size
        else:
            counts = parts[:, 2 * mean.size :].reshape(size, *count.shape)
            total = counts.sum(0)
        n = jnp.maximum(total, 1)
        merged = (counts * means).sum(0) / n
        merged += (counts * (means - merged)).sum(0) / n  # takes back the rounding of the first sum
        return merged, (m2s + counts * jnp.square(means - merged)).sum(0), total
    if equal_counts:
        total = count * size
        merged = psum(mean, reduction) / size
    else:
        sums = psum(jnp.concatenate([(count * mean).ravel(), count.ravel()]), reduction)
        total = sums[mean.size :].reshape(count.shape)
        merged = sums[: mean.size].reshape(mean.shape) / jnp.maximum(total, 1)
    return merged, psum(m2 + count * jnp.square(mean - merged), reduction), total


def _gather(v: jax.Array, size: int, reduction: Reduction) -> jax.Array:
    """``all_gather`` as a sum of one-hot rows: its type says that every device has the same."""
    index: Any = 0
    for name, length in zip(reduction.axis_names, reduction.axis_sizes, strict=True):
        index = index * length + lax.axis_index(name)
    if reduction.groups:
        members = [i for group in reduction.groups for i in group]
        positions = [members.index(i) % size for i in range(len(members))]
        index = jnp.asarray(positions)[index]
    mine = jnp.arange(size)[:, None] == index  # [size, 1]
    return psum(jnp.where(mine, v, jnp.zeros_like(v)), reduction)


def normalize(x: jax.Array, mean, inv, scale, bias) -> jax.Array:
    """``(x - mean) * inv * scale + bias`` in the statistics' dtype; scale and bias may be None."""
    y = (x.astype(mean.dtype) - mean) * (inv if scale is None else inv * scale.astype(inv.dtype))
    return y if bias is None else y + bias.astype(inv.dtype)


def feature_sums(g, x, mean, inv, mask, axes) -> jax.Array:
    """``[sum(g), sum(g * xhat)]`` of every feature on this device: [2, 1, .., C, .., 1]."""
    g = g.astype(inv.dtype)
    xhat = (x.astype(inv.dtype) - mean) * inv
    if mask is not None:  # padding without a gradient has no part in the sums, whatever it holds
        xhat = jnp.where(mask | (g != 0), xhat, 0)
    return jnp.stack([jnp.sum(v, axes, keepdims=True) for v in (g, g * xhat)])


def project(g, total, x, mean, inv, mask, count) -> jax.Array:
    """The gradient of x from g, its gradient with the batch statistics held fixed.

    ``g - [counted] * (sum(g) + xhat * sum(g * xhat)) / count``, `total` being the two sums over all
    devices. In the statistics' dtype.
    """
    xhat = (x.astype(inv.dtype) - mean) * inv
    share = (total[0] + xhat * total[1]) / jnp.maximum(count, 1)
    return g.astype(inv.dtype) - (share if mask is None else jnp.where(mask, share, 0))


def normalize_backward(
    g, x, mean, inv, scale, mask, count, axes, reduction: Reduction, one_scale: bool = False
) -> tuple:
    """The gradient of x from g, the gradient of ``normalize(x, ...)``, with one all-reduce.

    Returns dx, the sums ``[sum(g), sum(g * xhat)]`` (the gradients of bias and scale) of this
    device, and of all devices if `one_scale` says that they have the same scale. If not, every
    device weighs its sums with its own scale before they are added up.
    """
    local = feature_sums(g, x, mean, inv, mask, axes)
    slope = inv if scale is None else inv * scale.astype(inv.dtype)
    total = psum(local, reduction) if one_scale else None
    weighted = psum(local * slope, reduction) if total is None else total * slope
    return project(g * slope, weighted, x, mean, inv, mask, count), local, total


def check_mask(mask: Any, x: jax.Array) -> jax.Array:
    """The mask with x's rank."""
    return as_mask("mask", mask, "x", x.shape)


def check_epsilon(epsilon: Any) -> float:
    return as_number("epsilon", epsilon, lambda e: 0 < e < math.inf, "positive")


def as_axes(name: str, value: Any, rank: int) -> tuple[int, ...]:
    """One axis, or several, of an input of this rank: each counted from the front."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    axes = tuple(as_integer(name, a, -rank) for a in (value if several else (value,)))
    if any(a >= rank for a in axes):
        raise ValueError(
            f"`{name}` (={value}) is out of range for an input of rank {rank}: every entry must "
            f"lie in [{-rank}, {rank - 1}]."
        )
    return tuple(a % rank for a in axes)


def reduced_axes(x: jax.Array, feature_axis: Any, needs_batch: bool) -> tuple[int, ...]:
    """The axes of x that are not features'; none for a single example, unless x needs a batch."""
    if x.ndim < 1 + needs_batch:
        raise ValueError(
            f"`x` of shape {x.shape} must have a batch and a feature axis: rank 2 or more, or rank "
            "1 where `axis_name` names the axis of the batch."
        )
    features = as_axes("feature_axis", feature_axis, x.ndim)
    axes = tuple(a for a in range(x.ndim) if a not in features)
    if len(set(features)) != len(features) or not features or (needs_batch and not axes):
        raise ValueError(
            f"`feature_axis` (={feature_axis}) must name some axes of `x`, each once, but not all."
        )
    return axes
