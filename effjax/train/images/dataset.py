"""Image classification data sets.

Pixels stay uint8 until the training step. A batch is a quarter of the size of float32 when it is
copied to the device, and is normalized there.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0
CHUNK = 2**26  # bytes of pixels per histogram update


class ImageFiles:
    """Image files, decoded by threads when they are indexed with an array of indices."""

    def __init__(self, files: Sequence[Path], decode: Callable[[Path], np.ndarray]):
        self.files, self.decode = files, decode

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> Any:
        """Shape (N, H, W, C)."""
        return len(self.files), *self.decode(self.files[0]).shape

    def __getitem__(self, indices: Any) -> np.ndarray:
        files = [self.files[i] for i in indices]
        # Pillow decodes without Python's lock.
        with ThreadPoolExecutor() as threads:
            return np.stack(list(threads.map(self.decode, files)))


Images = np.ndarray | ImageFiles  # uint8 [N, H, W, C]


def select(images: Images, indices: np.ndarray) -> Images:
    """Select images by an array of indices. Files are not decoded."""
    if isinstance(images, ImageFiles):
        return ImageFiles([images.files[i] for i in indices], images.decode)
    return images[indices]


@dataclass(frozen=True)
class Dataset:
    """Images and labels, in train, validation and test sets.

    Attributes:
        name: Specification that the data set was loaded from.
        train_images: uint8 [N, H, W, C].
        train_labels: int32 [N], indices into `class_names`.
        test_images: uint8 [N, H, W, C].
        test_labels: int32 [N].
        class_names: Name of each class.
        flip: True if a mirrored image still belongs to its class (False for digits).
        validation_images: Images of the data set, or that `hold_out` took from the train set.
        validation_labels: int32 [N].
        left_out: Names of files and folders that are not read.
    """

    name: str
    train_images: Images
    train_labels: np.ndarray
    test_images: Images
    test_labels: np.ndarray
    class_names: tuple[str, ...]
    flip: bool
    validation_images: Images = field(default_factory=lambda: np.zeros(0, np.uint8))
    validation_labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    left_out: tuple[str, ...] = ()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (H, W, C) of an image."""
        return self.train_images.shape[1:]


def stratified_split(
    labels: np.ndarray,
    test_fraction: float = TEST_FRACTION,
    seed: int = SPLIT_SEED,
    minimum: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices of `labels` into a train and a test set with equal shares of each class.

    The split does not depend on the seed of a run, so that runs can be compared. Each class keeps
    at least one train image and, where possible, at least `minimum` test images.
    """
    # By class: a random share of all images may miss a rare class.
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # A class without train images could not be learned, one without test images would not be
        # seen.
        count = min(max(round(test_fraction * len(members)), minimum), len(members) - 1)
        test.append(members[:count])
        train.append(members[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def hold_out(dataset: Dataset, validation: float) -> Dataset:
    """Move a part of the train set to the validation set, unless the data set has its own.

    The part is the same in every run and has the same share of each class.

    Args:
        dataset: Data set.
        validation: Share of the train set if below 1, else a number of images, up to rounding
            within each class. 0 keeps the data set unchanged.

    Raises:
        DataError: No training image would be left, or no image would be held out.
    """
    if validation == 0 or len(dataset.validation_labels):
        return dataset
    labels = dataset.train_labels
    share = validation if validation < 1 else validation / len(labels)
    if share >= 1:
        raise DataError(
            f"`validation` (={validation:g}) must be less than the {len(labels)} train images of "
            f"{dataset.name}"
        )
    train, held_out = stratified_split(labels, share, minimum=0)
    if not len(held_out):
        raise DataError(
            f"`validation` (={validation:g}) must hold out at least one image, but rounds to 0 in "
            f"each class of {dataset.name}. Use a larger number, or 0 for no validation."
        )
    return dataclasses.replace(
        dataset,
        train_images=select(dataset.train_images, train),
        train_labels=labels[train],
        validation_images=select(dataset.train_images, held_out),
        validation_labels=labels[held_out],
    )


def channel_counts(images: Images, process_index: int = 0, num_processes: int = 1) -> np.ndarray:
    """Return a histogram int64 [C, 256] of pixel values per channel.

    Args:
        images: uint8 [N, H, W, C].
        process_index: Index of this process, which counts every `num_processes`-th image.
        num_processes: Number of processes.
    """
    # In chunks, because a folder may be larger than the memory.
    counts = np.zeros((images.shape[-1], 256), np.int64)
    numbers = np.arange(process_index, len(images), num_processes)
    size = max(CHUNK // max(math.prod(images.shape[1:]), 1), 1)
    for start in range(0, len(numbers), size):
        chunk = images[numbers[start : start + size]]
        for channel, histogram in enumerate(counts):
            # Exact integers, so that the statistics do not depend on the number of processes.
            histogram += np.bincount(chunk[..., channel].ravel(), minlength=256)
    return counts


def channel_statistics(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel, float32 [C], for pixels scaled to [0, 1].

    The standard deviation of a constant channel is 1.

    Args:
        counts: Histogram of `channel_counts`, summed over processes.
    """
    # A histogram is exact, needs no float copy of the images, and can be summed over processes.
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(axis=1)
    variance = counts @ values**2 / counts.sum(axis=1) - mean**2
    std = np.sqrt(np.maximum(variance, 0))
    return mean.astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)
