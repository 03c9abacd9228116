"""Image data sets in memory: one small class, one reader a format.

Pixels stay uint8 until the training step: a batch travels to the device at a quarter of the size
of float32, and is normalised there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0

FORMATS = "digits, rotated-digits, cifar10:PATH, cifar100:PATH, folder:PATH"


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


def load_dataset(spec: str, image_size: int | None = None) -> Dataset:
    """Reads the data set that `spec` names: `digits`, `rotated-digits`, `cifar10:PATH`,
    `cifar100:PATH` or `folder:PATH`.

    Args:
      spec: `digits` comes with scikit-learn, and `rotated-digits` is made of it. PATH is a
        directory, or for CIFAR also the archive as it is downloaded.
      image_size: the side that images of a folder are resized to; default: all must have the size
        of the first.

    Raises:
      DataError: the data cannot be read or is not sound; the message names the file and the remedy.
    """
    from .cifar import load_cifar
    from .folder import load_folder
    from .rotated import load_rotated_digits

    kind, separator, path = spec.partition(":")
    readers: dict[str, Callable[[], Dataset]] = {
        "cifar10": lambda: load_cifar(Path(path), 10),
        "cifar100": lambda: load_cifar(Path(path), 100),
        "folder": lambda: load_folder(Path(path), image_size),
    }
    bundled = {"digits": load_digits, "rotated-digits": load_rotated_digits}
    if kind in bundled and not separator:
        return bundled[kind]() if image_size is None else _fixed_size(spec)
    if kind not in readers or not path:
        raise DataError(f"data {spec!r} is not known; use one of {FORMATS}")
    if image_size is not None and kind != "folder":
        _fixed_size(spec)
    if not Path(path).exists():
        raise DataError(f"{path}: no such file or directory; check the path in {spec!r}")
    try:
        return readers[kind]()
    except OSError as error:
        name = error.filename or path
        raise DataError(
            f"{name}: cannot be read ({error.strerror or error}); check its permissions"
        ) from error


def _fixed_size(spec: str) -> NoReturn:
    raise DataError(f"data {spec!r} has a fixed image size; image_size is for folder:PATH only")


def load_digits() -> Dataset:
    """scikit-learn's handwritten digits: 1797 images of 8×8 grey pixels in 10 classes."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            'data "digits" needs scikit-learn; run pip install "effjax[train]"'
        ) from error
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
