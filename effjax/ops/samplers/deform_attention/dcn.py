"""Aggregation of DCNv3 and DCNv4: attention of each output pixel to the points of a window."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._common.arguments import (
    as_float_array,
    as_integer,
    as_number,
    as_padding,
    as_pair,
    check_divides,
    check_shape,
    check_size,
    conv_output_size,
    resolve_padding,
)
from ..._common.platform import follow_arrays
from ..._common.sharding import run_per_device
from .api import Static, attend, make_static
from .reference import Levels


@follow_arrays
def dcn_aggregate(
    x: jax.Array,
    offset: jax.Array,
    mask: jax.Array,
    *,
    kernel_size: int | Sequence[int] = 3,
    strides: int | Sequence[int] = 1,
    padding: Any = 0,
    kernel_dilation: int | Sequence[int] = 1,
    offset_scale: float = 1.0,
    remove_center: bool = False,
    offset_groups: int | None = None,
    implementation: Literal["native", "xla"] | None = None,
    deterministic: bool = False,
    chunk_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Sum weighted samples around each pixel in groups of channels: the core of DCNv3 and DCNv4.

    ``y[n, p, g] = sum_k mask[n, p, g, k] * x[n, g](center(p) + offset_scale * (step(k) + offset[n,
    p, g, k]))``

    The steps lead from the center of a convolution's kernel to its taps. Between pixels x is
    interpolated bilinearly; beyond the border it is zero. A sample and its gradients are zero for
    NaN and infinite positions.

    Args:
        x: [N, H, W, G * D], G groups of D channels; float32, float64, bfloat16 or float16.
        offset: [N, Ho, Wo, G * K * 2], in pixels. The order is (x, y) for each point, points
            column by column from the left, as in the original. (`effjax.deform_conv2d` takes
            (y, x), row by row, the order of torchvision.) Positions are computed in float32, or in
            float64 if any of the three arrays is float64.
        mask: [N, Ho, Wo, G * K], a finite factor for each sample. DCNv3 passes a softmax over the K
            points, DCNv4 any numbers.
        kernel_size: size of the window, one integer or one for each spatial axis.
        strides: one integer, or one for each spatial axis.
        padding: as in `effjax.deform_conv2d`. It enlarges the output; x is zero beyond its border.
        kernel_dilation: one integer, or one for each spatial axis.
        offset_scale: factor of steps and offsets.
        remove_center: leave out the center of an odd window, so that K is one less.
        offset_groups: G; by default inferred from the channels of mask.
        implementation: as in `effjax.ms_deform_attn`, which shares the native code.
        deterministic: on a GPU, sum the gradient of x in a fixed order, as in
            `effjax.ms_deform_attn`.
        chunk_bytes: as in `effjax.ms_deform_attn`.

    Returns:
        y [N, Ho, Wo, G * D] of x's dtype.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, dtype or shape.
        RuntimeError: "native" is not available; the message has the reason.
        NotImplementedError: forward-mode or second derivatives without "xla".

    Kept for the backward pass: x, mask, and the positions, which are as large as offset.

    References:
        Wang et al., InternImage, 2022 (arXiv:2211.05778); Xiong et al., DCNv4, 2024
        (arXiv:2401.06197).
    """
    x, offset, mask = (
        as_float_array(name, a) for name, a in (("x", x), ("offset", offset), ("mask", mask))
    )
    check_shape("x", x, "NHWC")
    check_size("x", x.shape[1] * x.shape[2], "pixels per image")
    size = as_pair("kernel_size", kernel_size, 1)
    strides, dilation = (
        as_pair("strides", strides, 1),
        as_pair("kernel_dilation", kernel_dilation, 1),
    )
    pads = resolve_padding(as_padding(padding), x.shape[1:3], size, strides, dilation)
    scale = as_number("offset_scale", offset_scale, math.isfinite, "finite")
    remove_center = bool(remove_center)
    if remove_center and (not all(k % 2 for k in size) or size == (1, 1)):
        raise ValueError(
            f"`remove_center` needs an odd kernel_size with more than one point, not {size}."
        )
    window = Window(size, strides, pads, dilation, scale, remove_center)
    groups = _check_shapes(x, offset, mask, window, offset_groups)
    levels = Levels(((x.shape[1], x.shape[2]),), normalized=False)
    dtypes = x.dtype, offset.dtype, mask.dtype
    static = make_static(
        "dcn_aggregate", levels, dtypes, implementation, deterministic, chunk_bytes
    )
    return _dcn_aggregate(static, window, groups, x, offset, mask)


class Window(NamedTuple):
    """Points of an output pixel before their offsets."""

    kernel_size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]  # ((top, bottom), (left, right))
    kernel_dilation: tuple[int, int]
    offset_scale: float
    remove_center: bool

    @property
    def points(self) -> int:
        """Number of points, K."""
        return self.kernel_size[0] * self.kernel_size[1] - self.remove_center


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _dcn_aggregate(static: Static, window: Window, groups: int, *arrays) -> jax.Array:
    def run(arrays, _):
        x, offset, mask = arrays
        n, height, width, points = mask.shape
        is_float64 = "float64" in (x.dtype, offset.dtype, mask.dtype)
        offset = offset.astype(jnp.float64 if is_float64 else jnp.float32)
        y = attend(
            static,
            x.reshape(n, x.shape[1] * x.shape[2], groups, x.shape[3] // groups),
            _positions(offset, window, groups),
            mask.reshape(n, height * width, groups, 1, points // groups),
        )
        return y.reshape(n, height, width, x.shape[3])

    return run_per_device(run, arrays[0])(arrays, ())


def _positions(offset: jax.Array, window: Window, groups: int) -> jax.Array:
    """Return the positions [N, Ho * Wo, G, 1, K, 2], (x, y) in pixels, of offset's dtype."""
    n, height, width, _ = offset.shape
    offset = offset.reshape(n, height, width, groups, window.points, 2)
    coordinates = []
    for axis in (1, 0):  # x, y
        middle = window.kernel_dilation[axis] * (window.kernel_size[axis] - 1) // 2
        start = middle - window.padding[axis][0]
        center = start + window.strides[axis] * jnp.arange((height, width)[axis], dtype=jnp.int32)
        shape = (1, height, 1, 1, 1) if axis == 0 else (1, 1, width, 1, 1)
        center = center.astype(offset.dtype).reshape(shape)
        step = jnp.asarray(_taps(window)[axis] - middle, offset.dtype).reshape(1, 1, 1, 1, -1)
        coordinates.append(center + window.offset_scale * (step + offset[..., 1 - axis]))
    return jnp.stack(coordinates, -1).reshape(n, height * width, groups, 1, window.points, 2)


def _taps(window: Window) -> tuple[np.ndarray, np.ndarray]:
    # The distance of each point from the first one along y and x, column by column.
    along_y, along_x = (
        d * np.arange(k) for k, d in zip(window.kernel_size, window.kernel_dilation, strict=True)
    )
    y, x = np.tile(along_y, along_x.size), np.repeat(along_x, along_y.size)
    if window.remove_center:
        y, x = (np.delete(a, a.size // 2) for a in (y, x))
    return y, x


def _check_shapes(x: Any, offset: Any, mask: Any, window: Window, offset_groups: Any) -> int:
    """Check the shapes of offset and mask, and return the number of groups."""
    if offset_groups is None:
        groups = max(mask.shape[-1] // window.points, 1)
    else:
        groups = as_integer("offset_groups", offset_groups, 1)
    check_divides("offset_groups", groups, x.shape[-1], "channels of `x`")
    pixels, points = (x.shape[0], *conv_output_size(x.shape[1:3], *window[:4])), window.points
    numbers = f"for K = {points} points and G = {groups} groups"
    check_shape("mask", mask, (*pixels, groups * points), f"[N, Ho, Wo, G * K] {numbers}")
    check_shape(
        "offset", offset, (*pixels, groups * points * 2), f"[N, Ho, Wo, G * K * 2] {numbers}"
    )
    return groups
