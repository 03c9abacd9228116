"""Digits that are turned and scaled, for models that should not mind.

The training images are turned by up to 40° either way, the test images by 40° to 70°: angles that
were never seen. Both are scaled by 0.7 to 1.2.
"""

from typing import Any

import numpy as np

from .dataset import Dataset, Images
from .digits import load_digits

SIDE = 20
TRAIN_ANGLES, TEST_ANGLES = (0.0, 40.0), (40.0, 70.0)  # degrees, either way
SCALES = (0.7, 1.2)
COPIES = 3  # of each training image, each turned by an angle of its own


def load_rotated_digits() -> Dataset:
    """scikit-learn's digits on 20×20 pixels, turned and scaled; the same ones in every run."""
    digits = load_digits()
    train_images, train_labels = _turned(
        digits.train_images, digits.train_labels, TRAIN_ANGLES, COPIES, seed=0
    )
    test_images, test_labels = _turned(
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


def _turned(
    images: Images, labels: np.ndarray, angles: tuple[float, float], copies: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    rng = np.random.default_rng(seed)
    made = []
    for image in np.concatenate([images[..., 0]] * copies):
        angle = np.deg2rad(rng.uniform(*angles) * rng.choice([-1, 1]))
        scale = rng.uniform(*SCALES)
        large: Any = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        # From a pixel of the result to one of `large`, about the middle.
        cos, sin, middle = np.cos(angle) / scale, np.sin(angle) / scale, SIDE / 2
        matrix = (
            cos, sin, middle * (1 - cos - sin),
            -sin, cos, middle * (1 - cos + sin),
        )  # fmt: skip
        turned = large.transform(
            (SIDE, SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )
        made.append(np.asarray(turned))
    return np.stack(made)[..., None], np.concatenate([labels] * copies)
