"""Averages over bins as an operator, with its gradient, under jit, vmap and over devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._common.derivatives import needs_xla
from ..._common.sharding import match_varying, run_per_device, zeros
from ..core import differentiable, merge_examples, partition_over_images
from ..kernels import Choice, choose, select
from . import native, reference
from .bins import Bins
from .reference import Pooling


class Static(NamedTuple):
    """Static configuration of a pooling (everything that is not an array)."""

    pooling: Pooling
    adds: bool  # to the result of an earlier call
    choice: Choice

    @property
    def is_differentiable(self) -> bool:
        """True if all derivatives exist: in XLA, and with loops of a static length."""
        return self.choice.implementation == "xla" and self.pooling.samples > 0

    @property
    def derivatives_error(self) -> str:
        """The error for unsupported derivatives."""
        more = () if self.pooling.samples > 0 else ("a positive `sampling_ratio`",)
        return needs_xla(self.choice.operator, *more)


def pool(
    operator: str,
    x: jax.Array,
    make_bins: Callable,
    options: tuple,
    arrays: tuple,
    pooling: Pooling,
    implementation: str | None,
    deterministic: bool,
    initial: jax.Array | None = None,
) -> jax.Array:
    """Average x [N, H, W, parts**2 * C] over bins; return [N, R, P, C].

    Args:
        operator: the name of the public function, for errors.
        x: images.
        make_bins: a function ``(*options, *arrays) -> Bins`` of `bins.py`.
        options: its static arguments.
        arrays: boxes, and offsets if any: [N, ...], float32 or float64.
        pooling: static configuration.
        implementation: None, "native" or "xla".
        deterministic: on a GPU, sum the gradient of x in a fixed order.
        initial: [N, R, P, C], to which the result is added: in place, and at no cost for boxes
            without samples.
    """
    dtypes = x.dtype, arrays[0].dtype
    choice = choose(operator, "roi_pool", implementation, deterministic, dtypes)
    static = Static(pooling, initial is not None, choice)
    return _pool(static, make_bins, options, x, arrays, initial)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # without jit, each call compiles its loops
def _pool(static: Static, make_bins: Callable, options: tuple, x, arrays: tuple, initial: Any):
    run = functools.partial(_pool_on_device, static, make_bins, options)
    return run_per_device(lambda images, _: run(*images), x)((x, arrays, initial), ())


def _pool_on_device(
    static: Static, make_bins: Callable, options: tuple, x: jax.Array, arrays: tuple, initial: Any
) -> jax.Array:
    dtype = arrays[0].dtype
    # Widened here, so that the gradient of x is summed over the samples in the wide dtype.
    wide_x = x.astype(dtype) if static.is_differentiable or dtype == jnp.float64 else x
    bins: Bins = make_bins(*options, *arrays)
    if static.adds:
        initial = initial.astype(wide_x.dtype)
    else:
        initial = zeros((*bins.first.shape[:3], 0), wide_x.dtype, x)
    args = match_varying((wide_x, bins.first, bins.step, bins.count, initial))
    if static.is_differentiable:
        y = reference.pool(*args, pooling=static.pooling)
    else:
        y = _operator(static)(*args)
    return y.astype(x.dtype)


# For one bin at position p, y = mean_s x(p + s), where x(q) = sum_r w_r(q) x[r] is interpolated
# between the four pixels r around q. Its gradients are
#
#   dx[r] = sum_s w_r(p + s) dy / count         dp = sum_s <dy, grad x(p + s)> / count
#
# Samples are computed one after the other and never stored.


KERNELS = {
    "xla": (reference.pool, reference.pool_backward),
    "cpu": (native.pool, native.pool_backward),
    "cuda": (native.pool, native.pool_backward),
    "cuda, deterministic": (native.pool, native.deterministic_pool_backward),
}

# Axes of the operands; examples (d) and images (n) may be sharded.
_X, _BINS, _Y = "d n h w c", "d n r p g s, d n r t, d n r u", "d n r p o"


@functools.cache  # jit compares functions by identity
def _operator(static: Static) -> Callable:
    error = static.derivatives_error
    forward, backward = (
        merge_examples(functools.partial(run, pooling=static.pooling))
        for run in select(KERNELS, static.choice)
    )
    initial = _Y if static.adds else "d n r p q"

    def complete(gradients, residuals, dy):
        (dx, dfirst), (_, first, step, count) = gradients, residuals
        dfirst = dfirst if static.pooling.has_position_gradients else jnp.zeros_like(first)
        dinitial = dy if static.adds else zeros((*dy.shape[:3], 0), dy.dtype, dy)
        return dx, dfirst, jnp.zeros_like(step), jnp.zeros_like(count), dinitial

    return differentiable(
        partition_over_images(forward, f"{_X}, {_BINS}, {initial} -> {_Y}", error),
        partition_over_images(backward, f"{_X}, {_BINS}, {_Y} -> {_X}, d n r p g m", error),
        error,
        kept=4,
        complete=complete,
        barrier=False,
    )
