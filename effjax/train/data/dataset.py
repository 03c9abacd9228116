"""Image data sets in memory: one small class, one reader a format.

Pixels stay uint8 until the training step: a batch travels to the device at a quarter of the size
of float32, and is normalised there.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0


@dataclass(frozen=True)
class Dataset:
    """Images and labels, checked: labels are in range, and every class has a training image.

    train_images, test_images: uint8 [N, H, W, C].
    train_labels, test_labels: int32 [N], indices into `class_names`.
    flip: whether a mirrored image is still an image of its class (not so for digits).
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    flip: bool

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            check_labels(f"{self.name} ({part} set)", images, labels, len(self.class_names))
        counts = np.bincount(self.train_labels, minlength=len(self.class_names))
        if (counts == 0).any():
            empty = self.class_names[int(np.argmin(counts))]
            raise DataError(
                f"{self.name}: class {empty!r} has no training image; add some or remove the class"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)"""
        return self.train_images.shape[1:]


def check_labels(source: str, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    """Raises `DataError` unless there is one label in `[0, num_classes)` for each image."""
    if len(images) == 0:
        raise DataError(f"{source}: no images; give it at least one a class")
    if len(images) != len(labels):
        raise DataError(
            f"{source}: {len(images)} images but {len(labels)} labels; fetch the data again"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        bad = labels[(labels < 0) | (labels >= num_classes)][0]
        raise DataError(
            f"{source}: label {bad} is not in 0..{num_classes - 1}; correct the labels, or check "
            "that the format is the one you named"
        )


def stratified_split(
    labels: np.ndarray, test_fraction: float = TEST_FRACTION, seed: int = SPLIT_SEED
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a train and a test set in which every class has the same share.

    The split does not depend on the seed of a run, so runs can be compared. A class with one image
    only gives it to the train set.
    """
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # At least one test image, at least one train image.
        count = min(max(round(test_fraction * len(members)), 1), len(members) - 1)
        test.append(members[:count])
        train.append(members[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of uint8 images [N, H, W, C], in units of 1/255.

    The standard deviation of a constant channel is given as 1.
    """
    # A histogram is exact and needs no float copy of the images.
    values = np.arange(256) / 255
    counts = np.stack(
        [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
    )
    mean = counts @ values / counts.sum(axis=1)
    variance = counts @ values**2 / counts.sum(axis=1) - mean**2
    std = np.sqrt(np.maximum(variance, 0))
    return mean.astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)
