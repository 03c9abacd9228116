"""The means of bins as an operator: with its gradient, under jit, vmap and over devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._common.derivatives import reverse_mode_only
from .._common.dispatch import available_platforms, select_by_platform, unavailable_message
from .._common.partitioning import add_example_axis, merge_example_axis, partition_over_images
from .._common.platform import traced_platform
from .._common.sharding import match_varying, run_per_device, zeros
from . import custom_call, reference
from .bins import Bins
from .reference import Pooling

# CUDA joins when its kernels have run on a GPU: so far they have been compiled, and emulated.
_PLATFORMS = {None: ("cpu",), "native": ("cpu", "cuda"), "xla": ()}

# Axes of examples (d) and images (n) by operand; the others are worked through whole.
_X, _BINS, _Y = "d n h w c", "d n r p g s, d n r t, d n r u", "d n r p o"


def pool(
    x: jax.Array,
    make_bins: Callable,
    arrays: tuple,
    pooling: Pooling,
    implementation: str | None,
    so_far: jax.Array | None = None,
) -> jax.Array:
    """Y [N, R, P, C] of x [N, H, W, parts**2 * C] and of ``make_bins(*arrays)``, where arrays
    [N, ...] are of float32 or float64: a pure function that gives `Bins` and is always the same
    object for the same options. y is added to `so_far`: in place, and for other boxes at no cost.
    """
    if implementation == "native" and not available_platforms():
        raise RuntimeError(unavailable_message(custom_call.OPERATOR, traced_platform()))
    # Open to every derivative, but for loops whose length the boxes say.
    open_ = implementation == "xla" and pooling.samples > 0
    platforms = tuple(p for p in _PLATFORMS[implementation] if p in available_platforms())
    static = make_bins, pooling, open_, (implementation == "native", platforms)
    return _pool(static, x, arrays, so_far)


@functools.partial(jax.jit, static_argnums=0)
def _pool(static: tuple, x: jax.Array, arrays: tuple, so_far: jax.Array | None) -> jax.Array:
    run = functools.partial(_of_images, static)
    return run_per_device(lambda images, _: run(*images), x)((x, arrays, so_far), ())


def _of_images(static: tuple, x: jax.Array, arrays: tuple, so_far: jax.Array | None) -> jax.Array:
    make_bins, pooling, open_, chosen = static
    dtype = arrays[0].dtype
    # Open to derivatives: nothing is rounded to x's dtype in between, as its gradient would be.
    wide = x.astype(dtype) if open_ or dtype == jnp.float64 else x
    bins: Bins = make_bins(*arrays)
    adds = so_far is not None
    more = so_far.astype(wide.dtype) if adds else zeros((*bins.first.shape[:3], 0), wide.dtype, x)
    args = match_varying((wide, bins.first, bins.step, bins.count, more))
    if open_:
        y = reference.pool(*args, pooling=pooling)
    else:
        y: Any = _core((pooling, adds, chosen), *reverse_mode_only(_name(pooling), *args))
    return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(static: tuple, x, first, step, count, so_far) -> jax.Array:
    return _forward_of(static)(*add_example_axis(x, first, step, count, so_far))[0][0]


def _forward(static: tuple, *args):
    return _core(static, *args), args[:4]


def _backward(static: tuple, kept, dy):
    x, first, step, count = kept
    pooling, adds, _ = static
    dx, dfirst = (d[0] for d in _backward_of(static)(*add_example_axis(*kept, dy)))
    dfirst = dfirst if pooling.moves else jnp.zeros_like(first)
    more = dy if adds else zeros((*dy.shape[:3], 0), dy.dtype, dy)
    return dx.astype(x.dtype), dfirst, jnp.zeros_like(step), jnp.zeros_like(count), more


_core.defvjp(_forward, _backward)


@functools.cache
def _forward_of(static: tuple) -> Callable:
    pooling, adds, (native, platforms) = static
    rule = f"{_X}, {_BINS}, {_Y if adds else 'd n r p q'} -> {_Y}"
    elsewhere = custom_call.nowhere[0] if native else reference.pool
    run = select_by_platform(dict.fromkeys(platforms, custom_call.pool), elsewhere)

    def merged(x, first, *rest):
        y = run(*map(merge_example_axis, (x, first, *rest)), pooling=pooling)
        return (y.reshape(*first.shape[:2], *y.shape[1:]),)

    return partition_over_images(merged, lambda *_: rule, _name(pooling))


@functools.cache
def _backward_of(static: tuple) -> Callable:
    pooling, _, (native, platforms) = static
    elsewhere = custom_call.nowhere[1] if native else reference.pool_backward
    run = select_by_platform(dict.fromkeys(platforms, custom_call.pool_backward), elsewhere)

    def merged(x, first, *rest):
        dx, dfirst = run(*map(merge_example_axis, (x, first, *rest)), pooling=pooling)
        return tuple(a.reshape(*first.shape[:2], *a.shape[1:]) for a in (dx, dfirst))

    rule = f"{_X}, {_BINS}, {_Y} -> {_X}, d n r p g m"
    return partition_over_images(merged, lambda *_: rule, _name(pooling))


def _name(pooling: Pooling) -> str:
    """Of the operator that speaks of itself in errors."""
    return "deform_psroi_pool" if pooling.of_inside else "roi_align"
