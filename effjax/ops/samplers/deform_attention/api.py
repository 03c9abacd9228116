"""Multi-scale deformable attention that keeps only its inputs for the backward pass."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..._common.arguments import as_float_array, as_integer, check_shape, check_size
from ..._common.derivatives import needs_xla
from ..._common.platform import follow_arrays, traced_platform
from ..._common.sharding import match_varying, run_per_device
from ..core import differentiable, merge_examples, partition_over_images
from ..kernels import Choice, choose, select
from . import native, reference
from .reference import Levels

CPU_CHUNK_BYTES = 4 * 2**20  # larger chunks do not fit into a CPU's caches; a GPU is unaffected
TPU_CHUNK_BYTES = 32 * 2**20  # larger ones do not fit into the memory on the chip (as planned)


@follow_arrays
def ms_deform_attn(
    value: jax.Array,
    spatial_shapes: Sequence[tuple[int, int]],
    sampling_locations: jax.Array,
    attention_weights: jax.Array,
    *,
    implementation: Literal["native", "xla"] | None = None,
    deterministic: bool = False,
    chunk_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Sum weighted samples of each level at the locations of each query and head.

    ``y[n, q, m] = sum_lp attention_weights[n, q, m, l, p] * level_l[n, m](sampling_locations[n, q,
    m, l, p])``

    A location is (x, y), with (0, 0) at the outer corner of a level's first pixel and (1, 1) at
    that of its last: in pixels ``x * W - 0.5, y * H - 0.5`` (PyTorch's ``align_corners=False``).
    Between pixels a level is interpolated bilinearly; beyond its border it is zero. The result and
    its gradients are zero for NaN and infinite locations.

    Args:
        value: [N, S, M, D], the S pixels of all levels, level by level and row by row, for M heads
            of D channels; float32, float64, bfloat16 or float16.
        spatial_shapes: (H, W) of each of the L levels, whose products sum to S.
        sampling_locations: [N, Q, M, L, P, 2] for P points per level. The order is (x, y), as in
            the original. (`effjax.deform_conv2d` takes offsets as (y, x), the order of
            torchvision.) Positions are computed in float32, or in float64 if any of the three
            arrays is float64.
        attention_weights: [N, Q, M, L, P], finite; they need not sum to 1.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (all
            platforms), None for native on a CPU if available, on a GPU if `effjax doctor --gpu`
            validated it there (see `effjax.native.set_default`), and XLA otherwise. Forward-mode
            and second derivatives need "xla".
        deterministic: on a GPU, sum the gradient of value in a fixed order. On a CPU it always is;
            "xla" on a GPU follows XLA's own ``--xla_gpu_deterministic_ops``.
        chunk_bytes: upper limit for the samples where XLA computes them (for each example of a
            vmap with "xla"), and for the sort of `deterministic`. Queries are computed in chunks
            that fit, of at least one query. On a CPU chunks are at most 4 MiB, which is faster, and
            on a TPU 32 MiB, with padding (see docs/planner.md). Native code stores no samples.

    Returns:
        y [N, Q, M * D] of value's dtype.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
        RuntimeError: "native" is not available; the message has the reason.
        NotImplementedError: forward-mode or second derivatives without "xla".

    Kept for the backward pass: the three arrays. The samples are computed again. On a CPU gradients
    are bitwise reproducible, for any number of threads. Native code on a GPU sums the gradient of
    value in no fixed order, unless `deterministic`.

    References:
        Zhu et al., Deformable DETR, 2020 (arXiv:2010.04159).
    """
    value = as_float_array("value", value)
    locations = as_float_array("sampling_locations", sampling_locations)
    weights = as_float_array("attention_weights", attention_weights)
    shapes = as_spatial_shapes(spatial_shapes)
    _check_shapes(value, shapes, locations, weights)
    levels = Levels(shapes, normalized=True)
    dtypes = value.dtype, locations.dtype, weights.dtype
    static = make_static(
        "ms_deform_attn", levels, dtypes, implementation, deterministic, chunk_bytes
    )
    return _ms_deform_attn(static, value, locations, weights)


@functools.partial(jax.jit, static_argnums=0)  # without jit, each call compiles its loops
def _ms_deform_attn(static: "Static", *arrays) -> jax.Array:
    def run(arrays, _):
        y = attend(static, *arrays)
        return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])

    return run_per_device(run, arrays[0])(arrays, ())


class Static(NamedTuple):
    """Static configuration of deformable attention (everything that is not an array)."""

    levels: Levels
    choice: Choice
    chunk_bytes: int


def make_static(
    operator: str,
    levels: Levels,
    dtypes: Iterable[Any],
    implementation: Any,
    deterministic: Any,
    chunk_bytes: Any,
) -> Static:
    """Validate the options of an operator and return its static configuration."""
    chunk_bytes = as_integer("chunk_bytes", chunk_bytes, 1)
    choice = choose(operator, "ms_deform_attn", implementation, deterministic, dtypes)
    platform = traced_platform()
    if platform in ("cpu", "tpu"):
        limit = CPU_CHUNK_BYTES if platform == "cpu" else TPU_CHUNK_BYTES
        chunk_bytes = min(chunk_bytes, limit)
    return Static(levels, choice, chunk_bytes)


def attend(static: Static, value: jax.Array, locations: jax.Array, weights: jax.Array) -> jax.Array:
    """Return y [N, Q, M, D] of value's dtype, of arrays without axes on an Explicit mesh."""
    is_float64 = "float64" in (value.dtype, locations.dtype, weights.dtype)
    dtype = jnp.dtype("float64" if is_float64 else "float32")
    value_dtype = dtype if is_float64 else value.dtype
    args: Any = (value.astype(value_dtype), locations.astype(dtype), weights.astype(dtype))
    args = match_varying(args)
    if static.choice.implementation == "xla":
        y = reference.attend(*args, **_options(static))
    else:
        y = _operator(static)(*args)
    return y.astype(value.dtype)


# For one query and head, y = sum_i a_i v(p_i), with weights a_i and v(p) = sum_r w_r(p) v[r]
# interpolated between the four pixels r around p. Its gradients are
#
#   da_i = <dy, v(p_i)>      dp_i = a_i <dy, grad v(p_i)>      dv[r] = sum_i a_i w_r(p_i) dy
#
# The samples v(p_i) have L * P times as many values as y. They are not kept but computed again.

KERNELS = {
    "xla": (reference.attend, reference.attend_backward),
    "cpu": (native.attend, native.attend_backward),
    "cuda": (native.attend, native.attend_backward),
    "cuda, deterministic": (native.attend, native.sorted_attend_backward),
}

# Axes of the operands; examples (d) and images (n) may be sharded.
_INPUTS, _OUT = "d n s m c, d n q m l p x, d n q m l p", "d n q m c"


@functools.cache  # jit compares functions by identity
def _operator(static: Static) -> Callable:
    options, error = _options(static), needs_xla(static.choice.operator)
    forward, backward = (
        merge_examples(functools.partial(run, **options)) for run in select(KERNELS, static.choice)
    )
    return differentiable(
        partition_over_images(forward, f"{_INPUTS} -> {_OUT}", error),
        partition_over_images(backward, f"{_INPUTS}, {_OUT} -> {_INPUTS}", error),
        error,
    )


def _options(static: Static) -> dict[str, Any]:
    return dict(levels=static.levels, chunk_bytes=static.chunk_bytes)


def as_spatial_shapes(spatial_shapes: Any) -> tuple[tuple[int, int], ...]:
    """Return (H, W) of each level as Python integers."""
    return tuple(
        (as_integer("spatial_shapes", h, 1), as_integer("spatial_shapes", w, 1))
        for h, w in spatial_shapes
    )


def _check_shapes(value, shapes, locations, weights) -> None:
    pixels = sum(h * w for h, w in shapes)
    check_shape("value", value, ("N", pixels, "M", "D"), f"S pixels of the levels {shapes}")
    check_size("value", pixels, "pixels")
    n, _, heads, _ = value.shape
    check_shape(
        "sampling_locations", locations, (n, "Q", heads, len(shapes), "P", 2), "[N, Q, M, L, P, 2]"
    )
    check_shape("attention_weights", weights, locations.shape[:5], "[N, Q, M, L, P]")
