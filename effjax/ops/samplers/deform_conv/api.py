"""Deformable convolution that keeps only its inputs for the backward pass."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..._common.arguments import (
    as_float_array,
    as_integer,
    as_padding,
    as_pair,
    check_divides,
    check_shape,
    check_size,
    conv_output_size,
    resolve_padding,
    with_torch_hints,
)
from ..._common.derivatives import needs_xla
from ..._common.platform import follow_arrays, traced_platform
from ..._common.sharding import match_varying, run_per_device
from ..core import differentiable, partition_over_images
from ..kernels import Choice, choose, select
from . import chunks, native, xla
from .chunks import Sampler, Static
from .reference import Geometry

# Chunks of this size fit into a CPU's caches; larger ones are slower. A GPU's caches hold 50 MB,
# but each chunk launches five kernels forward and eight backward: the best size there has not been
# measured.
CPU_CHUNK_BYTES = {None: 24 * 2**20, "native": 24 * 2**20, "xla": 64 * 2**20}
TPU_CHUNK_BYTES = 64 * 2**20  # larger ones do not fit into the memory on the chip (as planned)


@with_torch_hints
@follow_arrays
def deform_conv2d(
    x: jax.Array,
    offset: jax.Array,
    kernel: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Any = 0,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    offset_groups: int | None = None,
    implementation: Literal["native", "xla"] | None = None,
    precision: Any = None,
    deterministic: bool = False,
    chunk_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Convolve `x` with a kernel whose taps have offsets.

    ``y[n, p] = bias + sum_k kernel[k] @ (mask[n, p, k] * x[n, strides * p - padding +
    kernel_dilation * k + offset[n, p, k]])``

    Between pixels x is interpolated bilinearly; beyond the border it is zero. A sample and its
    gradients are zero unless -1 < y < H and -1 < x < W, and for NaN and infinite positions.

    Args:
        x: [N, H, W, C]; float32, float64, bfloat16 or float16.
        offset: [N, Ho, Wo, G * K * 2], in pixels of x, for K = kh * kw taps and G offset groups
            of channels. The order is (y, x) for each tap, taps row by row, as in torchvision:
            channel ``(g * K + i * kw + j) * 2`` moves tap (i, j) down and the next one moves it to
            the right. (`effjax.ms_deform_attn` and `effjax.dcn_aggregate` take (x, y), the order
            of their originals.) Positions are computed in float32, or in float64 if x or offset
            is float64.
        kernel: [kh, kw, C / feature_group_count, O]; computed in x's dtype.
        mask: [N, Ho, Wo, G * K], a finite factor for each sample, or None for the first version of
            the paper, without factors. With an infinite or NaN factor, which results and gradients
            are NaN depends on the implementation.
        bias: [O], or None.
        strides: one integer, or one for each spatial axis.
        kernel_dilation: one integer, or one for each spatial axis.
        padding: one integer, one for each spatial axis, ((top, bottom), (left, right)), "SAME" or
            "VALID".
        feature_group_count: as in ``jax.lax.conv_general_dilated``.
        offset_groups: G; by default inferred from the channels of offset.
        implementation: "native" for the custom call (CPU, CUDA), "xla" for plain XLA (all
            platforms), None for native on a CPU if available, on a GPU if `effjax doctor --gpu`
            validated it there (see `effjax.native.set_default`), and XLA otherwise. Forward-mode
            and second derivatives need "xla".
        precision: of the matrix products, as in ``jax.lax.dot_general``.
        deterministic: on a GPU, sum the gradient of x in a fixed order. On a CPU it always is;
            "xla" on a GPU follows XLA's own ``--xla_gpu_deterministic_ops``.
        chunk_bytes: upper limit for the samples, and the sort of `deterministic`, in either
            pass (for each example of a vmap with "xla"). The output is computed in chunks of rows
            that fit, of at least one row. On top come offset, mask, and the gradients of x, offset
            and mask, in float32. On a CPU chunks are at most 24 MiB ("xla": 64), which is
            faster. On a TPU they are at most 64 MiB, with padding (see docs/planner.md). With
            "xla", jit over Auto mesh axes counts the whole batch, and reduces the gradient of the
            kernel once per chunk.

    Returns:
        y [N, Ho, Wo, O] of x's dtype.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
        RuntimeError: "native" is not available; the message has the reason.
        NotImplementedError: forward-mode or second derivatives without "xla".

    Kept for the backward pass: x, offset, mask and kernel. The samples are computed again.

    References:
        Dai et al., 2017 (arXiv:1703.06211); Zhu et al., 2018 (arXiv:1811.11168).
    """
    x, offset, kernel = (
        as_float_array(name, a) for name, a in (("x", x), ("offset", offset), ("kernel", kernel))
    )
    mask = None if mask is None else as_float_array("mask", mask)
    bias = None if bias is None else as_float_array("bias", bias)
    feature_groups = as_integer("feature_group_count", feature_group_count, 1)
    geometry = _check(
        x, offset, kernel, mask, bias, strides, padding, kernel_dilation, feature_groups,
        offset_groups,
    )  # fmt: skip
    chunk_bytes = as_integer("chunk_bytes", chunk_bytes, 1)
    if precision is None:
        # Resolved here: XLA partitions programs in threads that do not see a `with` statement.
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    dtypes, platform = (x.dtype, offset.dtype), traced_platform()
    choice = choose("deform_conv2d", "deform_conv2d", implementation, deterministic, dtypes)
    if platform == "cpu":
        chunk_bytes = min(chunk_bytes, CPU_CHUNK_BYTES[implementation])
    if platform == "tpu":
        chunk_bytes = min(chunk_bytes, TPU_CHUNK_BYTES)
    sampler = _select_sampler(choice, platform)
    static = Static(geometry, feature_groups, sampler, precision, chunk_bytes)
    return _deform_conv2d(static, implementation == "xla", (x, offset, mask), (kernel, bias))


@functools.partial(jax.jit, static_argnums=(0, 1))  # without jit, each call compiles its loops
def _deform_conv2d(static: Static, all_derivatives: bool, images, parameters) -> jax.Array:
    run = functools.partial(_deform_conv2d_of_device, static, all_derivatives)
    return run_per_device(run, images[0])(images, parameters)


def _deform_conv2d_of_device(
    static: Static, all_derivatives: bool, images, parameters
) -> jax.Array:
    x, offset, mask = images
    kernel, bias = parameters
    dtype = jnp.dtype("float64" if "float64" in (x.dtype, offset.dtype) else "float32")
    mask = jnp.zeros((*offset.shape[:3], 0), dtype) if mask is None else mask
    x_dtype = jnp.float64 if dtype == jnp.float64 else x.dtype
    args = x.astype(x_dtype), offset.astype(dtype), mask.astype(dtype), kernel
    args = match_varying(args)
    y = xla.deform_conv_xla(static, *args) if all_derivatives else _operator(static)(*args)
    y = y.astype(x.dtype)
    if bias is not None:
        y = (y.astype(dtype) + bias.astype(dtype).reshape(1, 1, 1, -1)).astype(x.dtype)
    return y


# The convolution is y[p] = sum_k kernel[k]^T c[p, k], with the columns c[p, k] = mask[p, k] * x(q),
# sampled at q = strides * p - padding + dilation * k + offset[p, k]. Its gradients are
#
#   dkernel[k] = sum_p c[p, k] dy[p]^T          dc[p, k] = kernel[k] dy[p]
#   dmask[p, k] = <dc[p, k], x(q)>              doffset[p, k] = mask[p, k] <dc[p, k], grad x(q)>
#   dx[r] = sum_(p, k) mask[p, k] w_r(q) dc[p, k]
#
# where x(q) = sum_r w_r(q) x[r] over the four pixels r around q. The columns have K times as many
# values as x. Both passes therefore compute them in chunks of output rows (see chunks.py), and only
# the inputs are residuals.


KERNELS = {
    "xla": xla.SAMPLER,
    "cpu": native.SAMPLER,
    "cuda": native.SAMPLER,
    "cuda, deterministic": native.DETERMINISTIC_CUDA,
}

# Axes of the operands; examples (d) and images (n) may be sharded.
_X, _OFFSET, _MASK, _OUT = "d n h w c", "d n p q s", "d n p q m", "d n p q o"
_KERNEL = 3  # its position among the operands


@functools.cache  # jit compares functions by identity
def _operator(static: Static) -> Callable:
    def forward(*args):
        return (chunks.forward(static, *args),)

    def forward_rule(*args):
        return f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(*args)} -> {_OUT}"

    def backward_rule(*args):
        inputs = f"{_X}, {_OFFSET}, {_MASK}, {_kernel_rule(*args)}, {_OUT}"
        return f"{inputs} -> {_X}, {_OFFSET}, {_MASK}, d i j f o"

    backward, error = functools.partial(chunks.backward, static), needs_xla("deform_conv2d")
    return differentiable(
        partition_over_images(forward, forward_rule, error, {_KERNEL}),
        partition_over_images(backward, backward_rule, error, {_KERNEL}),
        error,
    )


def _kernel_rule(*args) -> str:
    # The kernel is shared by all examples, or there is one for each.
    x, kernel = args[0], args[_KERNEL]
    return "d i j f o" if kernel.shape[0] == x.shape[0] else "e i j f o"


@functools.cache  # equal choices give the same object, so that jit does not compile again
def _select_sampler(choice: Choice, platform: str) -> Sampler:
    """Merge the samplers of all platforms into one, with the workspace needed on `platform`."""
    columns, columns_backward = select(KERNELS, choice)
    one = KERNELS[choice.key(platform)]
    return one._replace(columns=columns, columns_backward=columns_backward)


def _check(
    x, offset, kernel, mask, bias, strides, padding, dilation, feature_groups: int, offset_groups
) -> Geometry:
    """Check the shapes of all arguments, and return the geometry."""
    check_shape("x", x, "NHWC")
    check_size("x", x.shape[1] * x.shape[2], "pixels per image")
    channels, layouts = x.shape[-1], "x is NHWC, kernel HWIO; effjax.compat takes PyTorch's layouts"
    check_shape(
        "kernel", kernel, ("kh", "kw", channels // feature_groups, "O"),
        f"[kh, kw, C / feature_group_count, O] for the {channels} channels of `x` and "
        f"feature_group_count={feature_groups}; {layouts}",
    )  # fmt: skip
    check_divides("feature_group_count", feature_groups, channels, "channels of `x`")
    check_divides("feature_group_count", feature_groups, kernel.shape[3], "outputs of `kernel`")
    kernel_size, strides = kernel.shape[:2], as_pair("strides", strides, 1)
    dilation = as_pair("kernel_dilation", dilation, 1)
    pads = resolve_padding(as_padding(padding), x.shape[1:3], kernel_size, strides, dilation)
    size = conv_output_size(x.shape[1:3], kernel_size, strides, pads, dilation)
    taps = math.prod(kernel_size)
    if offset_groups is None:
        groups = max(offset.shape[-1] // (2 * taps), 1)
    else:
        groups = as_integer("offset_groups", offset_groups, 1)
    check_divides("offset_groups", groups, channels, "channels of `x`")
    pixels, numbers = (x.shape[0], *size), f"for K = {taps} taps and G = {groups} offset groups"
    check_shape(
        "offset", offset, (*pixels, groups * taps * 2),
        f"[N, Ho, Wo, G * K * 2] {numbers}; {layouts}",
    )  # fmt: skip
    if mask is not None:
        check_shape("mask", mask, (*pixels, groups * taps), f"[N, Ho, Wo, G * K] {numbers}")
    if bias is not None:
        check_shape("bias", bias, kernel.shape[3:], "one for each output")
    return Geometry(kernel_size, strides, pads, dilation, groups)
