"""Reader for a folder of images with one subfolder per class."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, check_regular, counted, unreadable
from .dataset import Dataset, Images, stratified_split

EXTENSIONS = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


IN_MEMORY = 2**31  # bytes of pixels; a larger folder is decoded batch by batch


def load_folder(path: Path, image_size: int | None = None, in_memory: int = IN_MEMORY) -> Dataset:
    """Read `path/CLASS/*.png` (and other image formats) as RGB.

    The folders `train/CLASS/` and `test/CLASS/` (or `val/CLASS/`) are the split, if they exist.
    Otherwise one image in five of each class, drawn with a fixed seed, is for testing. Files
    without the suffix of an image format are ignored.

    Args:
        path: The folder.
        image_size: Side to which images are resized and center-cropped. If None, all images must
            have the size of the first.
        in_memory: Maximum number of bytes of pixels to hold in memory. Larger folders are decoded
            when a batch is read.

    Raises:
        DataError: If the folder has fewer than two classes, or an image cannot be read.
    """
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size (={image_size}) must be at least 1")
    if not path.is_dir():
        raise DataError(f"{path}: not a directory; folder:PATH needs one folder per class")
    held_out = next((name for name in ("test", "val") if (path / name).is_dir()), None)
    has_split = held_out is not None and (path / "train").is_dir()
    if held_out is not None and has_split:
        files = {"train": class_files(path / "train"), "test": class_files(path / held_out)}
        odd = sorted(files["train"].keys() ^ files["test"].keys())
        if odd:
            raise DataError(
                f"{path}: class {odd[0]!r} must be in both train/ and {held_out}/, or in neither"
            )
    else:
        files = {"all": class_files(path)}

    read = Reader(image_size)
    lazily = read.total_bytes(files) > in_memory
    parts = {part: read.images_and_labels(classes, lazily) for part, classes in files.items()}
    names = tuple(next(iter(files.values())))
    if has_split:
        (train_images, train_labels), (test_images, test_labels) = parts["train"], parts["test"]
    else:
        images, labels = parts["all"]
        for name, members in files["all"].items():
            if len(members) < 2:
                raise DataError(
                    f"{path / name}: one image, but a class needs one to train and one to "
                    "test. Add images, or make train/ and test/ folders"
                )
        train, test = stratified_split(labels)
        train_images, train_labels = images.take(train, 0), labels[train]
        test_images, test_labels = images.take(test, 0), labels[test]
    return Dataset(
        name=f"folder:{path}",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=names,
        flip=True,
    )


def class_files(path: Path) -> dict[str, list[Path]]:
    """List the image files of each class, sorted by name."""
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) < 2:
        raise DataError(
            f"{path}: {counted(len(folders), 'class folder')}; give each of at least "
            "two classes its own folder of images"
        )
    classes = {
        folder.name: sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".")
        )
        for folder in folders
    }
    for name, files in classes.items():
        if not files:
            raise DataError(f"{path / name}: no images; add some or remove the folder")
    return classes


class Reader:
    """Image decoder that resizes to `image_size`, or requires the size of the first image."""

    def __init__(self, image_size: int | None):
        self.image_size = image_size
        self.first: tuple[Path, tuple[int, int]] | None = None

    def images_and_labels(
        self, classes: dict[str, list[Path]], lazily: bool
    ) -> tuple[Images, np.ndarray]:
        """Return images [N, H, W, 3] and the class index of each."""
        all_files = [file for files in classes.values() for file in files]
        counts = [len(files) for files in classes.values()]
        images = ImageFiles(all_files, self)
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return images if lazily else images[np.arange(len(images))], labels

    def total_bytes(self, files: dict[str, dict[str, list[Path]]]) -> int:
        """Return the number of bytes of all decoded images."""
        members = [each for classes in files.values() for each in classes.values()]
        one = self.image(members[0][0])
        return one.nbytes * sum(len(each) for each in members)

    def image(self, file: Path) -> np.ndarray:
        """Decode one image: uint8 [H, W, 3]."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise DataError(
                'data "folder:PATH" needs Pillow; run pip install "effjax[train]"'
            ) from error
        check_regular(file)
        try:
            with Image.open(file) as opened:
                _check_depth(file, opened.mode)
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except DataError:
            raise
        # Pillow's decoders raise many exception types for a damaged or misnamed file.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(file, error) from error  # permissions, a failing disk
            raise DataError(
                f"{file}: not a readable image ({type(error).__name__}); replace or remove the file"
            ) from error
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
            return np.asarray(ImageOps.fit(image, size, Image.Resampling.BILINEAR))
        self.first = self.first or (file, image.size)
        if image.size != self.first[1]:
            raise DataError(
                f"{file}: {image.width}×{image.height} pixels, but {self.first[0].name} has "
                f"{self.first[1][0]}×{self.first[1][1]}; set image_size (--image-size) to resize "
                "all"
            )
        return np.asarray(image)


class ImageFiles:
    """Image files as `Images`, decoded by threads when they are indexed."""

    def __init__(self, files: Sequence[Path], read: Reader):
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, H, W, 3)."""
        return len(self.files), *self.read.image(self.files[0]).shape

    def __getitem__(self, chosen: Any) -> np.ndarray:
        files = [self.files[number] for number in np.asarray(chosen)]
        with ThreadPoolExecutor() as threads:
            return np.stack(list(threads.map(self.read.image, files)))

    def take(self, chosen: Any, axis: int = 0) -> "ImageFiles":
        """Select images by an array of indices, without decoding them."""
        assert axis == 0
        return ImageFiles([self.files[number] for number in np.asarray(chosen)], self.read)


def _check_depth(file: Path, mode: str) -> None:
    """Reject images whose values Pillow would clip to 255 instead of scaling them."""
    if mode.startswith(("I", "F")):
        kind = "floating-point" if mode.startswith("F") else "16-bit"
        raise DataError(f"{file}: is a {kind} image; convert it to 8 bits per channel")
