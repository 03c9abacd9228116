"""Attention at few points of feature maps of several scales."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._common import dispatch
from .._common.arguments import as_integer, check_choice
from .._common.derivatives import reverse_mode_only
from .._common.partitioning import add_example_axis, merge_example_axis, partition_over_images
from .._common.platform import traced_platform
from .._common.sharding import match_varying, run_per_device
from . import arguments, custom_call, reference
from .reference import Levels


def ms_deform_attn(
    value: jax.Array,
    spatial_shapes: Sequence[tuple[int, int]],
    sampling_locations: jax.Array,
    attention_weights: jax.Array,
    *,
    implementation: Literal["native", "xla"] | None = None,
    workspace_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Attends to a few points of each level, for each head where the query says.

    ``y[n, q, m] = sum_lp attention_weights[n, q, m, l, p] * level_l[n, m](sampling_locations[n, q,
    m, l, p])``

    A location (x, y) is (0, 0) at the outer corner of the first pixel of a level and (1, 1) at that
    of the last: in pixels it is ``x * W - 0.5, y * H - 0.5`` (PyTorch's ``align_corners=False``).
    Between pixels a level is interpolated bilinearly, beyond its border it is zero. A location that
    is NaN or infinite gives zero, and so do its gradients.

    Args:
        value: [N, S, M, D]: the S pixels of all levels, one level after the other and row by row,
            for M heads of D channels; float32, float64, bfloat16 or float16.
        spatial_shapes: (H, W) of each of the L levels, whose products add up to S.
        sampling_locations: [N, Q, M, L, P, 2], (x, y) of P points a level. Positions are computed
            in float32, or float64 where any of the three arrays is.
        attention_weights: [N, Q, M, L, P]; any numbers, they need not add up to 1.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (everywhere),
            None for native on a CPU where there is any, else XLA: the CUDA kernels must be asked
            for until they have run on a GPU. Forward mode and second derivatives need "xla"; the
            others have the gradient.
        workspace_bytes: how much the samples may take where XLA computes them (for each example of
            a vmap with "xla"): queries are worked through in as many slices as that needs, of one
            query at least. A CPU is quicker with slices of 4 MiB, and gets no larger ones. Native
            code has no samples in memory.

    Returns:
        y [N, Q, M * D] of value's dtype.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
        RuntimeError: "native" where there is none, with the reason.
        NotImplementedError: forward mode or second derivatives without "xla".

    Kept for the backward pass: the three arrays. The samples are taken again. On a CPU every run
    gives the same gradients, for any number of threads; native code on a GPU adds that of value up
    in no fixed order.

    References:
        Zhu et al., Deformable DETR, 2020 (arXiv:2010.04159).
    """
    value, shapes, locations, weights = arguments.as_attention(
        value, spatial_shapes, sampling_locations, attention_weights
    )
    levels = Levels(shapes, normalized=True)
    static = static_of("ms_deform_attn", levels, implementation, workspace_bytes)
    return _ms_deform_attn(static, value, locations, weights)


@functools.partial(jax.jit, static_argnums=0)  # loops would be compiled again for every call
def _ms_deform_attn(static: "Static", *arrays) -> jax.Array:
    def of_images(arrays, _):
        y = attend(static, *arrays)
        return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])

    return run_per_device(of_images, arrays[0])(arrays, ())


class Static(NamedTuple):
    """All that is no array."""

    operator: str
    levels: Levels
    run: Callable  # (static, value, locations, weights) -> y [N, Q, M, D]
    forward: Callable  # as `reference.attend`, for the platform that the program is compiled for
    backward: Callable  # as `reference.attend_backward`
    workspace_bytes: int

    @property
    def options(self) -> dict[str, Any]:
        return dict(levels=self.levels, workspace_bytes=self.workspace_bytes)


def attend(static: Static, value: jax.Array, locations: jax.Array, weights: jax.Array) -> jax.Array:
    """y [N, Q, M, D] of value's dtype; arrays of any dtypes, no axis on an Explicit mesh."""
    wide = "float64" in (value.dtype, locations.dtype, weights.dtype)
    dtype = jnp.dtype("float64" if wide else "float32")
    at = locations.astype(dtype), weights.astype(dtype)
    args = match_varying((value.astype(dtype if wide else value.dtype), *at))
    return static.run(static, *args).astype(value.dtype)


def _in_xla(static: Static, *args) -> jax.Array:
    """With all derivatives."""
    return reference.attend(*args, **static.options)


def _first_order(static: Static, *args) -> jax.Array:
    """With a gradient, and no other derivative."""
    return _core(static, *reverse_mode_only(static.operator, *args))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(static: Static, value, locations, weights) -> jax.Array:
    return _parts_of(static)[0](*add_example_axis(value, locations, weights))[0][0]


def _forward(static: Static, *args):
    return _parts_of(static)[0](*add_example_axis(*args))[0][0], args


def _backward(static: Static, kept, dy):
    # The barrier keeps the samples from being kept since the forward pass.
    kept, dy = lax.optimization_barrier((kept, dy))
    gradients = _parts_of(static)[1](*add_example_axis(*kept, dy))
    return tuple(d[0].astype(a.dtype) for d, a in zip(gradients, kept, strict=True))


_core.defvjp(_forward, _backward)


# Axes of examples (d) and images (n) by operand.
_INPUTS = "d n s m c, d n q m l p x, d n q m l p"


@functools.cache
def _parts_of(static: Static) -> tuple[Callable, Callable]:
    """Forward and backward pass on [D, N, ...], which jit may have split."""

    def merged(run):
        def of_all(*args):
            images = args[0].shape[:2]
            results = run(*map(merge_example_axis, args), **static.options)
            return tuple(r.reshape(*images, *r.shape[1:]) for r in results)

        return of_all

    def forward(*args, **options):
        return (static.forward(*args, **options),)

    return (
        partition_over_images(
            merged(forward), lambda *_: f"{_INPUTS} -> d n q m c", static.operator
        ),
        partition_over_images(
            merged(static.backward), lambda *_: f"{_INPUTS}, d n q m c -> {_INPUTS}",
            static.operator,
        ),
    )  # fmt: skip


# CUDA joins None when its kernels have run on a GPU: so far they have been compiled, and emulated
# on a CPU.
_NATIVE: dict[str | None, tuple[str, ...]] = {None: ("cpu",), "native": ("cpu", "cuda"), "xla": ()}
SLICE_BYTES_ON_A_CPU = 4 * 2**20  # larger slices fall out of its caches; they cost a GPU nothing


def static_of(operator: str, levels: Levels, implementation: Any, workspace_bytes: Any) -> Static:
    """What an operator's program is made of, for what its caller asked for."""
    check_choice("implementation", implementation, *_NATIVE)
    workspace_bytes = as_integer("workspace_bytes", workspace_bytes, 1)
    available = tuple(p for p in _NATIVE[implementation] if p in dispatch.available_platforms())
    platform = traced_platform()
    if implementation == "native" and not available:
        raise RuntimeError(dispatch.unavailable_message(operator, platform))
    if platform == "cpu":
        workspace_bytes = min(workspace_bytes, SLICE_BYTES_ON_A_CPU)
    forward, backward = _kernels(operator, available, implementation == "native")
    run = _in_xla if implementation == "xla" else _first_order
    return Static(operator, levels, run, forward, backward, workspace_bytes)


@functools.cache  # one object for equal choices: jit compares them
def _kernels(operator: str, platforms: tuple[str, ...], native_only: bool) -> tuple:
    """Forward and backward pass, each of all platforms as one."""
    pairs = (
        (custom_call.attend, reference.attend),
        (custom_call.attend_backward, reference.attend_backward),
    )
    return tuple(
        dispatch.select_by_platform(
            dict.fromkeys(platforms, native),
            dispatch.fail_at_compile_time(elsewhere, operator) if native_only else elsewhere,
        )
        for native, elsewhere in pairs
    )
