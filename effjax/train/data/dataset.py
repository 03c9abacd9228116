"""Image data sets: one small class, one reader a format.

Pixels stay uint8 until the training step: a batch travels to the device at a quarter of the size
of float32, and is normalized there.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0
CHUNK = 2**26  # bytes that are counted at once


class Images(Protocol):
    """uint8 [N, H, W, C]: an array, or files that are read when they are asked for."""

    @property
    def shape(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, chosen: Any, /) -> np.ndarray: ...
    def take(self, chosen: Any, axis: Any = ..., /) -> Any: ...


@dataclass(frozen=True)
class Dataset:
    """Images and labels, checked: labels are in range, and every class has a training image.

    train_images, test_images: uint8 [N, H, W, C].
    train_labels, test_labels: int32 [N], indices into `class_names`.
    flip: whether a mirrored image is still an image of its class (not so for digits).
    copies: the train set holds so many copies of its images, each changed, one set after the other.
    validation_images, validation_labels: what `hold_out` has taken from the train set, if anything.
    """

    name: str
    train_images: Images
    train_labels: np.ndarray
    test_images: Images
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    flip: bool
    copies: int = 1
    validation_images: Images = field(default_factory=lambda: np.zeros(0, np.uint8))
    validation_labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

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


def check_labels(source: str, images: Images, labels: np.ndarray, num_classes: int) -> None:
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
    labels: np.ndarray, test_fraction: float = TEST_FRACTION, seed: int = SPLIT_SEED, least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a train and a test set in which every class has the same share.

    The split does not depend on the seed of a run, so runs can be compared. Each class has at least
    one train image, then `least` test images.
    """
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(round(test_fraction * len(members)), least), len(members) - 1)
        test.append(members[:count])
        train.append(members[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def hold_out(dataset: Dataset, validation: float) -> Dataset:
    """The data set with a part of its train set as its validation set: the same part in every run,
    the same share of each class, and all copies of an image in it or none.

    Args:
        validation: a share of the train set, or a number of images, met up to the rounding of each
            class. 0: no validation set.

    Raises:
        DataError: nothing would be left to train on.
    """
    if validation == 0:
        return dataset
    labels = dataset.train_labels
    share = validation if validation < 1 else validation / len(labels)
    if share >= 1:
        raise DataError(
            f"validation (={validation:g}) leaves none of the {len(labels)} train images of "
            f"{dataset.name}; use a smaller one"
        )
    size = len(labels) // dataset.copies
    of_each_copy = size * np.arange(dataset.copies)[:, None]
    parts = stratified_split(labels[:size], share, least=0)
    train, held_out = ((of_each_copy + part).ravel() for part in parts)
    return dataclasses.replace(
        dataset,
        train_images=dataset.train_images.take(train, 0),
        train_labels=labels[train],
        validation_images=dataset.train_images.take(held_out, 0),
        validation_labels=labels[held_out],
    )


def channel_counts(images: Images, first: int = 0, of: int = 1) -> np.ndarray:
    """How often each channel has each value: int64 [C, 256].

    Only every image of a number `first + k of` is looked at: the share of one of `of` processes.
    """
    counts = np.zeros((images.shape[-1], 256), np.int64)
    numbers = np.arange(first, len(images), of)
    size = max(CHUNK // max(math.prod(images.shape[1:]), 1), 1)
    for start in range(0, len(numbers), size):
        chunk = images[numbers[start : start + size]]
        for channel, found in enumerate(counts):
            found += np.bincount(chunk[..., channel].ravel(), minlength=256)
    return counts


def channel_statistics(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel by its `channel_counts`, in units of 1/255.

    The standard deviation of a constant channel is given as 1.
    """
    # A histogram is exact, needs no float copy of the images, and is a sum over processes.
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(axis=1)
    variance = counts @ values**2 / counts.sum(axis=1) - mean**2
    std = np.sqrt(np.maximum(variance, 0))
    return mean.astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)
