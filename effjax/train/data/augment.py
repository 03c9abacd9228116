"""Random crops and flips of a batch of uint8 images, the same for the same generator."""

from typing import NamedTuple

import numpy as np


class Augmentation(NamedTuple):
    """`pad`: pixels of black border before a crop of the original size. `flip`: mirror half."""

    pad: int
    flip: bool


def default_padding(image_shape: tuple[int, int, int]) -> int:
    """An eighth of the shorter side: 4 for 32×32 images, 1 for 8×8."""
    return max(min(image_shape[:2]) // 8, 1)


def augment(
    images: np.ndarray,
    how: Augmentation,
    rng: np.random.Generator,
    batch_size: int | None = None,
    rows: slice = slice(None),
) -> np.ndarray:
    """Crops each image [H, W, C] of a batch at a random offset, and mirrors it or not.

    The draws depend on the batch size alone, so a generator of the same seed gives the same images,
    also where `images` are only some `rows` of a batch of `batch_size`.
    """
    n, height, width, _ = images.shape
    drawn = n if batch_size is None else batch_size
    top, left = rng.integers(0, 2 * how.pad + 1, size=(2, drawn))[:, rows]
    mirrored = (rng.random(drawn) < 0.5)[rows]

    border = ((0, 0), (how.pad, how.pad), (how.pad, how.pad), (0, 0))
    padded = np.pad(images, border)
    lines = top[:, None] + np.arange(height)  # [N, H]
    columns = left[:, None] + np.arange(width)  # [N, W]
    if how.flip:
        columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
    return padded[np.arange(n)[:, None, None], lines[:, :, None], columns[:, None, :]]
