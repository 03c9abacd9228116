"""The handwritten digits of scikit-learn."""

from typing import Any

import numpy as np

from .dataset import Dataset, stratified_split


def load_digits() -> Dataset:
    """Load scikit-learn's handwritten digits: 1797 images of 8×8 gray pixels in 10 classes."""
    from sklearn import datasets

    bunch: Any = datasets.load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # 0..16 → 0..255
    labels = bunch.target.astype(np.int32)
    train, test = stratified_split(labels)
    return Dataset(
        name="digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        class_names=tuple(str(digit) for digit in bunch.target_names),
        flip=False,
    )
