"""Reader for a folder of images with one subfolder per class."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, check_regular, counted, unreadable
from .dataset import Dataset, ImageFiles, stratified_split

SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
# Pillow identifies files of these formats, but decodes them only with other programs.
STUBS = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
IN_MEMORY = 2**31  # bytes of pixels; a larger folder is decoded batch by batch


def load_folder(path: Path, image_size: int | None = None, in_memory: int = IN_MEMORY) -> Dataset:
    """Read `path/CLASS/**/*.png` (and all image formats that Pillow decodes) as RGB.

    The folders `train/CLASS/`, `val/CLASS/` and `test/CLASS/` are the split, if `train` and one of
    the others exist; without `test`, `val` is the test set. `SPLITS` has further names. Otherwise
    one image in five of each class, drawn with a fixed seed, is for testing. Images are those of
    torchvision's `ImageFolder` except hidden ones; `left_out` of the result lists the other files.

    Args:
        path: The folder.
        image_size: Side to which images are resized and center-cropped. If None, all images must
            have the size of the first.
        in_memory: Maximum number of bytes of pixels to hold in memory. Larger folders are decoded
            when a batch is read.

    Raises:
        DataError: The folder has fewer than two classes, or an image cannot be read.
    """
    splits = find_splits(path)
    sets: dict[str, tuple[list[Path], np.ndarray]] = {}
    if splits:
        classes, _ = class_files(splits["train"])
        left_out = [entry for entry in path.iterdir() if entry not in splits.values()]
        for split, folder in splits.items():
            own, others = class_files(folder)
            if odd := sorted(classes.keys() ^ own.keys()):
                raise DataError(
                    f"{path}: class {odd[0]!r:.120} must be in both {splits['train'].name}/ and "
                    f"{folder.name}/, or in neither."
                )
            sets[split], left_out = _files_and_labels(own), left_out + others
    else:
        classes, left_out = class_files(path, minimum=2)  # one to train and one to test
        files, labels = _files_and_labels(classes)
        for split, indices in zip(("train", "test"), stratified_split(labels), strict=True):
            sets[split] = [files[i] for i in indices], labels[indices]

    decode = ImageDecoder(image_size)
    num_bytes = decode(next(iter(classes.values()))[0]).nbytes
    fits = sum(len(files) for files, _ in sets.values()) * num_bytes <= in_memory
    arrays: dict[str, Any] = {}
    for split, (files, labels) in sets.items():
        images = ImageFiles(files, decode)
        arrays[f"{split}_images"] = images[np.arange(len(files))] if fits else images
        arrays[f"{split}_labels"] = labels
    return Dataset(
        name=f"folder:{path}",
        **arrays,
        class_names=tuple(classes),
        flip=True,
        left_out=tuple(sorted(str(file.relative_to(path)) for file in left_out)),
    )


def find_splits(path: Path) -> dict[str, Path]:
    """Return the folders of the train, validation and test sets; {} if the folder has no split."""
    splits: dict[str, Path] = {}
    for folder in list_entries(path)[0]:
        for split in (split for split, names in SPLITS.items() if folder.name.lower() in names):
            if (first := splits.setdefault(split, folder)) != folder:
                raise DataError(
                    f"{path}: {first.name}/ and {folder.name}/ are both {split} sets. Keep one."
                )
    if "train" not in splits:
        return {}
    if len(splits) == 1:
        if not list_entries(splits["train"])[0]:
            return {}  # a class of this name
        raise DataError(
            f"{path}: {splits['train'].name}/ needs test/ or val/ beside it. Rename it if it is a "
            "class."
        )
    return splits if "test" in splits else {"train": splits["train"], "test": splits["validation"]}


def class_files(path: Path, minimum: int = 1) -> tuple[dict[str, list[Path]], list[Path]]:
    """List the image files of each class, at least `minimum` of them, and the other files."""
    folders, left_out = list_entries(path)
    if len(folders) < 2:
        raise DataError(
            f"{path}: {counted(len(folders), 'class folder')}. Give each of at least "
            "two classes its own folder of images."
        )
    suffixes, classes = _image_suffixes(), {}
    for folder in folders:
        images = classes[folder.name] = []
        for file in _list_files(folder):
            is_image = file.suffix.lower() in suffixes and not file.name.startswith(".")
            (images if is_image else left_out).append(file)
        if len(images) < minimum:
            raise DataError(
                f"{folder}: {counted(len(images), 'image')}, but a class needs at least "
                f"{minimum}. Add images or remove the folder."
            )
    return classes, left_out


def _image_suffixes() -> set[str]:
    from PIL import Image

    Image.init()  # knows the suffixes of all formats
    formats = Image.OPEN.keys() - STUBS
    return {s for s, name in Image.registered_extensions().items() if name in formats}


def list_entries(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders in a folder, and its files and hidden folders, sorted by name."""
    folders, others = [], []
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_folder = entry.is_dir() and not entry.name.startswith(".")
            (folders if is_folder else others).append(Path(entry))
    return folders, others


def _list_files(path: Path) -> list[Path]:
    folders, files = list_entries(path)
    return files + [file for folder in folders for file in _list_files(folder)]


def _files_and_labels(classes: dict[str, list[Path]]) -> tuple[list[Path], np.ndarray]:
    """Return all files, and the class index of each."""
    counts = [len(files) for files in classes.values()]
    labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return [file for files in classes.values() for file in files], labels


class ImageDecoder:
    """Image decoder that resizes to `image_size`, or requires the size of the first image."""

    def __init__(self, image_size: int | None):
        self.image_size = image_size
        self.first: tuple[Path, tuple[int, int]] | None = None

    def __call__(self, file: Path) -> np.ndarray:
        """Decode one image: uint8 [H, W, 3]."""
        from PIL import Image, ImageOps

        image = open_image(file)
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
            return np.asarray(ImageOps.fit(image, size, Image.Resampling.BILINEAR))
        self.first = self.first or (file, image.size)
        if image.size != self.first[1]:
            raise DataError(
                f"{file}: {image.width}×{image.height} pixels, but {self.first[0].name} has "
                f"{self.first[1][0]}×{self.first[1][1]}. Set `image_size` to resize "
                "all."
            )
        return np.asarray(image)


def open_image(file: Path) -> Any:
    """Return an image of Pillow, RGB and upright; raise DataError."""
    from PIL import Image, ImageOps

    check_regular(file)
    try:
        with Image.open(file) as opened:
            # Pillow would clip the values of these modes to 255 instead of scaling them.
            if opened.mode.startswith(("I", "F")):
                kind = "floating-point" if opened.mode.startswith("F") else "16-bit"
                raise DataError(f"{file}: is a {kind} image. Convert it to 8 bits per channel.")
            return ImageOps.exif_transpose(opened).convert("RGB")
    except DataError:
        raise
    # Pillow's decoders raise many exception types for a damaged or misnamed file.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file, error) from error  # permissions, a failing disk
        raise DataError(
            f"{file}: not a readable image ({type(error).__name__}). Replace or remove it."
        ) from error
