"""Random crops and flips of uint8 images, reproducible from a generator's seed."""

from typing import NamedTuple

import numpy as np


class Augmentation(NamedTuple):
    """Augmentation of a training batch.

    Attributes:
        pad: Width of the black border, in pixels, that is added before a crop of the original size.
        flip: Mirror half of the images.
    """

    pad: int
    flip: bool


def default_padding(image_shape: tuple[int, int, int]) -> int:
    """Return an eighth of the shorter side: 4 for 32×32 images, 1 for 8×8."""
    return max(min(image_shape[:2]) // 8, 1)


def augment(
    images: np.ndarray,
    how: Augmentation,
    rng: np.random.Generator,
    batch_size: int | None = None,
    rows: slice = slice(None),
) -> np.ndarray:
    """Crop each image [H, W, C] of a batch at a random offset, and mirror it at random.

    The random numbers are drawn for the whole batch. A process that holds only the `rows` of a
    batch of `batch_size` images therefore gets the same images as a process that holds all of it.
    """
    n, height, width, _ = images.shape
    drawn = n if batch_size is None else batch_size
    top, left = rng.integers(0, 2 * how.pad + 1, size=(2, drawn))[:, rows]
    mirrored = (rng.random(drawn) < 0.5)[rows]

    # One gather crops and mirrors: columns are read from right to left.
    border = ((0, 0), (how.pad, how.pad), (how.pad, how.pad), (0, 0))
    padded = np.pad(images, border)
    lines = top[:, None] + np.arange(height)  # [N, H]
    columns = left[:, None] + np.arange(width)  # [N, W]
    if how.flip:
        columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
    return padded[np.arange(n)[:, None, None], lines[:, :, None], columns[:, None, :]]
