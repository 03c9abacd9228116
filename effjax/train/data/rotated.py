"""Rotated and scaled digits, a test of a model's robustness to geometric transformations.

Training images are rotated by up to 40° in either direction and test images by 40° to 70°, angles
that do not occur in training. Both are scaled by 0.7 to 1.2.
"""

from typing import Any

import numpy as np

from .dataset import Dataset, Images
from .digits import load_digits

SIDE = 20
TRAIN_ANGLES, TEST_ANGLES = (0.0, 40.0), (40.0, 70.0)  # degrees, in either direction
SCALES = (0.7, 1.2)
COPIES = 3  # rotated copies of each image


def load_rotated_digits() -> Dataset:
    """Load rotated and scaled digits of 20×20 pixels, the same in every run."""
    digits = load_digits()
    train_images, train_labels = _rotate(
        digits.train_images, digits.train_labels, TRAIN_ANGLES, COPIES, seed=0
    )
    test_images, test_labels = _rotate(
        digits.test_images, digits.test_labels, TEST_ANGLES, COPIES, seed=1
    )
    return Dataset(
        name="rotated-digits",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=digits.class_names,
        flip=False,
        copies=COPIES,
    )


def _rotate(
    images: Images, labels: np.ndarray, angles: tuple[float, float], copies: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    rng = np.random.default_rng(seed)
    rotated = []
    for image in np.concatenate([images[..., 0]] * copies):
        angle = np.deg2rad(rng.uniform(*angles) * rng.choice([-1, 1]))
        scale = rng.uniform(*SCALES)
        large: Any = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        # Affine map from a pixel of the result to a pixel of `large`, about the center.
        cos, sin, middle = np.cos(angle) / scale, np.sin(angle) / scale, SIDE / 2
        matrix = (
            cos, sin, middle * (1 - cos - sin),
            -sin, cos, middle * (1 - cos + sin),
        )  # fmt: skip
        image_out = large.transform(
            (SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )
        rotated.append(np.asarray(image_out))
    return np.stack(rotated)[..., None], np.concatenate([labels] * copies)
