"""The aggregation of DCNv3 and DCNv4: attention of each output pixel to points of a window."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._common.sharding import run_per_device
from . import arguments
from .api import Static, attend, static_of
from .reference import Levels
from .window import Window, positions


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
    workspace_bytes: int = 256 * 2**20,
) -> jax.Array:
    """Adds up weighted samples around each pixel, in groups of channels: the core of DCNv3, DCNv4.

    ``y[n, p, g] = sum_k mask[n, p, g, k] * x[n, g](center(p) + offset_scale * (step(k) + offset[n,
    p, g, k]))``

    The steps are those of a convolution's taps from the middle of its kernel; `offset_scale` moves
    them and the offsets apart. Between pixels x is interpolated bilinearly, beyond the border it is
    zero. A position that is NaN or infinite gives zero, and so do its gradients.

    Args:
        x: [N, H, W, G * D], G groups of D channels; float32, float64, bfloat16 or float16.
        offset: [N, Ho, Wo, G * K * 2], (x, y) in pixels for each group and point; points go down
            the columns of the window, the left one first. Positions are computed in float32, or
            float64 where any of the three arrays is.
        mask: [N, Ho, Wo, G * K], a factor for each sample: DCNv3 passes a softmax over the K
            points, DCNv4 any numbers.
        kernel_size, strides, kernel_dilation: one number, or one for each of the two axes.
        padding: as in `effjax.deform_conv2d`; here too it makes the output larger, and the image
            beyond its border is zero.
        offset_scale: a factor of steps and offsets.
        remove_center: leave the middle of the window out: K is one less; for odd kernels.
        offset_groups: G; by default what the channels of mask say.
        implementation, workspace_bytes: as in `effjax.ms_deform_attn`, whose native code this is.

    Returns:
        y [N, Ho, Wo, G * D] of x's dtype.

    Raises:
        TypeError, ValueError: inputs that do not fit, with their values.
        RuntimeError: "native" where there is none, with the reason.
        NotImplementedError: forward mode or second derivatives without "xla".

    Kept for the backward pass: x, mask, and the positions, which are as large as offset.

    References:
        Wang et al., InternImage, 2022 (arXiv:2211.05778); Xiong et al., DCNv4, 2024
        (arXiv:2401.06197).
    """
    x, offset, mask, window = arguments.as_aggregation(
        x, offset, mask, kernel_size, strides, padding, kernel_dilation
    )
    window = arguments.with_scale(window, offset_scale, remove_center)
    groups = arguments.check_channels(x, offset, mask, window, offset_groups)
    levels = Levels(((x.shape[1], x.shape[2]),), normalized=False)
    static = static_of("dcn_aggregate", levels, implementation, workspace_bytes)
    return _dcn_aggregate(static, window, groups, x, offset, mask)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _dcn_aggregate(static: Static, window: Window, groups: int, *arrays) -> jax.Array:
    def of_images(arrays, _):
        x, offset, mask = arrays
        n, height, width, points = mask.shape
        wide = "float64" in (x.dtype, offset.dtype, mask.dtype)
        moved = offset.astype(jnp.float64 if wide else jnp.float32)
        y = attend(
            static,
            x.reshape(n, x.shape[1] * x.shape[2], groups, x.shape[3] // groups),
            positions(moved, window, groups),
            mask.reshape(n, height * width, groups, 1, points // groups),
        )
        return y.reshape(n, height, width, x.shape[3])

    return run_per_device(of_images, arrays[0])(arrays, ())
