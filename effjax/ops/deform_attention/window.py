"""Where DCNv3's points lie: a window of each output pixel, moved by offsets."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Window(NamedTuple):
    """The points of an output pixel before their offsets."""

    kernel_size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]  # ((top, bottom), (left, right))
    kernel_dilation: tuple[int, int]
    offset_scale: float = 1.0
    remove_center: bool = False

    @property
    def points(self) -> int:
        return self.kernel_size[0] * self.kernel_size[1] - self.remove_center


def positions(offset: jax.Array, window: Window, groups: int) -> jax.Array:
    """[N, Ho, Wo, G * K * 2] -> [N, Ho * Wo, G, 1, K, 2], (x, y) in pixels, of offset's dtype."""
    n, height, width, _ = offset.shape
    moved = offset.reshape(n, height, width, groups, window.points, 2)
    at = []
    for axis in (1, 0):  # x, y
        middle = window.kernel_dilation[axis] * (window.kernel_size[axis] - 1) // 2
        start = middle - window.padding[axis][0]
        center = start + window.strides[axis] * jnp.arange((height, width)[axis], dtype=jnp.int32)
        shape = (1, height, 1, 1, 1) if axis == 0 else (1, 1, width, 1, 1)
        center = center.astype(offset.dtype).reshape(shape)
        step = jnp.asarray(_steps(window)[axis] - middle, offset.dtype).reshape(1, 1, 1, 1, -1)
        at.append(center + window.offset_scale * (step + moved[..., 1 - axis]))
    return jnp.stack(at, -1).reshape(n, height * width, groups, 1, window.points, 2)


def _steps(window: Window) -> tuple[np.ndarray, np.ndarray]:
    """How far each point is below and right of the first one: down the columns of the window."""
    along_y, along_x = (
        d * np.arange(k) for k, d in zip(window.kernel_size, window.kernel_dilation, strict=True)
    )
    down, right = np.tile(along_y, along_x.size), np.repeat(along_x, along_y.size)
    if window.remove_center:
        down, right = (np.delete(a, a.size // 2) for a in (down, right))
    return down, right
