"""Averages over bins as an operator, with its gradient, under jit, vmap and over devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._common.derivatives import needs_xla, reverse_mode_only
from .._common.dispatch import native_platforms, result_type, select_kernel
from .._common.partitioning import add_example_axis, merge_example_axis, partition_over_images
from .._common.sharding import match_varying, run_per_device, zeros
from . import reference
from .bins import Bins
from .reference import Pooling


class Static(NamedTuple):
    """Static configuration of a pooling (everything that is not an array)."""

    operator: str  # its name in errors
    pooling: Pooling
    adds: bool  # to the result of an earlier call
    implementation: str | None
    platforms: tuple[str, ...]  # with native kernels
    deterministic: bool

    @property
    def is_differentiable(self) -> bool:
        """True if all derivatives exist: in XLA, and with loops of a static length."""
        return self.implementation == "xla" and self.pooling.samples > 0

    @property
    def derivatives_error(self) -> str:
        """The error for unsupported derivatives."""
        more = () if self.pooling.samples > 0 else ("a positive `sampling_ratio`",)
        return needs_xla(self.operator, *more)


def pool(
    operator: str,
    x: jax.Array,
    make_bins: Callable,
    arrays: tuple,
    pooling: Pooling,
    implementation: str | None,
    deterministic: bool,
    initial: jax.Array | None = None,
) -> jax.Array:
    """Average x [N, H, W, parts**2 * C] over the bins that are made from arrays.

    Args:
        operator: the name of the public function, for errors.
        x: images.
        make_bins: ``make_bins(*arrays) -> Bins``, a pure function; the same object for the same
            options.
        arrays: boxes, and offsets if any: [N, ...], float32 or float64.
        pooling: static configuration.
        implementation: None, "native" or "xla".
        deterministic: on a GPU, sum the gradient of x in a fixed order.
        initial: [N, R, P, C], to which the result is added: in place, and at no cost for boxes
            without samples.

    Returns:
        y [N, R, P, C].
    """
    dtypes = x.dtype, arrays[0].dtype
    kernel = "roi_pool_deterministic" if deterministic else "roi_pool"
    platforms = native_platforms(implementation, operator, kernel, dtypes)
    adds = initial is not None
    static = Static(operator, pooling, adds, implementation, platforms, bool(deterministic))
    return _pool(static, make_bins, x, arrays, initial)


@functools.partial(jax.jit, static_argnums=(0, 1))  # without jit, each call compiles its loops
def _pool(static: Static, make_bins: Callable, x: jax.Array, arrays: tuple, initial: Any):
    run = functools.partial(_pool_on_device, static, make_bins)
    return run_per_device(lambda images, _: run(*images), x)((x, arrays, initial), ())


def _pool_on_device(
    static: Static, make_bins: Callable, x: jax.Array, arrays: tuple, initial: Any
) -> jax.Array:
    dtype = arrays[0].dtype
    # Widened here, so that the gradient of x is summed over the samples in the wide dtype.
    wide_x = x.astype(dtype) if static.is_differentiable or dtype == jnp.float64 else x
    bins: Bins = make_bins(*arrays)
    if static.adds:
        initial = initial.astype(wide_x.dtype)
    else:
        initial = zeros((*bins.first.shape[:3], 0), wide_x.dtype, x)
    args = match_varying((wide_x, bins.first, bins.step, bins.count, initial))
    if static.is_differentiable:
        y: Any = reference.pool(*args, pooling=static.pooling)
    else:
        y = _average(static, *reverse_mode_only(static.derivatives_error, *args))
    return y.astype(x.dtype)


# For one bin at position p, y = mean_s x(p + s), where x(q) = sum_r w_r(q) x[r] is interpolated
# between the four pixels r around q. Its gradients are
#
#   dx[r] = sum_s w_r(p + s) dy / count         dp = sum_s <dy, grad x(p + s)> / count
#
# Samples are computed one after the other and never stored.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _average(static: Static, x, first, step, count, initial) -> jax.Array:
    return _partitioned_forward(static)(*add_example_axis(x, first, step, count, initial))[0][0]


def _average_forward(static: Static, *args):
    return _partitioned_forward(static)(*add_example_axis(*args))[0][0], args[:4]


def _average_backward(static: Static, residuals, dy):
    x, first, step, count = residuals
    gradients = _partitioned_backward(static)(*add_example_axis(*residuals, dy))
    dx, dfirst = (d[0] for d in gradients)
    dfirst = dfirst if static.pooling.has_position_gradients else jnp.zeros_like(first)
    dinitial = dy if static.adds else zeros((*dy.shape[:3], 0), dy.dtype, dy)
    return dx.astype(x.dtype), dfirst, jnp.zeros_like(step), jnp.zeros_like(count), dinitial


_average.defvjp(_average_forward, _average_backward)

# Axes of the operands; examples (d) and images (n) may be sharded.
_X, _BINS, _Y = "d n h w c", "d n r p g s, d n r t, d n r u", "d n r p o"


@functools.cache  # jit compares functions by identity
def _partitioned_forward(static: Static) -> Callable:
    kernel = select_kernel(
        _native_pool, reference.pool, static.implementation, static.platforms, static.operator
    )

    def run(*args):
        y = kernel(*map(merge_example_axis, args), pooling=static.pooling)
        return (y.reshape(*args[1].shape[:2], *y.shape[1:]),)

    rule = f"{_X}, {_BINS}, {_Y if static.adds else 'd n r p q'} -> {_Y}"
    return partition_over_images(run, lambda *_: rule, static.derivatives_error)


@functools.cache
def _partitioned_backward(static: Static) -> Callable:
    on_cuda = _deterministic_pool_backward if static.deterministic else _native_pool_backward
    kernel = select_kernel(
        _native_pool_backward, reference.pool_backward, static.implementation,
        static.platforms, static.operator, on_cuda,
    )  # fmt: skip

    def run(*args):
        gradients = kernel(*map(merge_example_axis, args), pooling=static.pooling)
        return tuple(d.reshape(*args[1].shape[:2], *d.shape[1:]) for d in gradients)

    rule = f"{_X}, {_BINS}, {_Y} -> {_X}, d n r p g m"
    return partition_over_images(run, lambda *_: rule, static.derivatives_error)


# The native versions of the functions in `reference.py`.


def _native_pool(*args, pooling: Pooling) -> jax.Array:
    x, first, *_, initial = args = match_varying(args)
    shape = (*first.shape[:3], x.shape[-1] // pooling.parts**2)
    aliases = {4: 0} if initial.shape == shape else {}  # added to in place
    call = jax.ffi.ffi_call("effjax_roi_pool", result_type(x, shape), input_output_aliases=aliases)
    return call(*args, pooling=_as_attribute(pooling))


def _native_pool_backward(
    *args, pooling: Pooling, target: str = "effjax_roi_pool_backward"
) -> tuple[jax.Array, jax.Array]:
    x, first, *_ = args = match_varying(args)
    shape = (*first.shape[:4], 2 if pooling.has_position_gradients else 0)
    results = result_type(x, dtype=first.dtype), result_type(first, shape)
    call = jax.ffi.ffi_call(target, results)
    dx, dfirst = call(*args, pooling=_as_attribute(pooling))
    return dx, dfirst


def _deterministic_pool_backward(*args, pooling: Pooling) -> tuple[jax.Array, jax.Array]:
    """Compute dx without atomic additions, whose order varies on a GPU.

    Each pixel adds up the bins that read it, in their order.
    """
    target = "effjax_roi_pool_backward_deterministic"
    return _native_pool_backward(*args, pooling=pooling, target=target)


def _as_attribute(pooling: Pooling) -> dict[str, Any]:
    """Return the struct `Attributes` of native/roi_ffi.h."""
    rows, columns = pooling.output_size
    sizes = dict(rows=rows, columns=columns, parts=pooling.parts)
    sizes["of_inside"] = pooling.average_inside_only
    return {name: np.int64(size) for name, size in sizes.items()} | {
        "margin": np.float64(pooling.margin)
    }
