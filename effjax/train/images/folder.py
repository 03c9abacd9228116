"""Reader for a folder of images with one subfolder per class."""

from pathlib import Path

import numpy as np

from ..errors import DataError, check_regular, counted, unreadable
from .dataset import Dataset, ImageFiles, Images, stratified_split

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
        DataError: The folder has fewer than two classes, or an image cannot be read.
    """
    held_out = next((name for name in ("test", "val") if (path / name).is_dir()), None)
    if held_out is not None and (path / "train").is_dir():
        classes, test_classes = class_files(path / "train"), class_files(path / held_out)
        if odd := sorted(classes.keys() ^ test_classes.keys()):
            raise DataError(
                f"{path}: class {odd[0]!r:.120} must be in both train/ and {held_out}/, or "
                "in neither."
            )
        train_files, train_labels = _files_and_labels(classes)
        test_files, test_labels = _files_and_labels(test_classes)
    else:
        classes = class_files(path, minimum=2)  # one to train and one to test
        files, labels = _files_and_labels(classes)
        train, test = stratified_split(labels)
        train_files, train_labels = [files[i] for i in train], labels[train]
        test_files, test_labels = [files[i] for i in test], labels[test]

    decode = ImageDecoder(image_size)
    train_images: Images = ImageFiles(train_files, decode)
    test_images: Images = ImageFiles(test_files, decode)
    num_images = len(train_files) + len(test_files)
    if num_images * decode(next(iter(classes.values()))[0]).nbytes <= in_memory:
        train_images = train_images[np.arange(len(train_files))]
        test_images = test_images[np.arange(len(test_files))]
    return Dataset(
        name=f"folder:{path}",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=tuple(classes),
        flip=True,
    )


def class_files(path: Path, minimum: int = 1) -> dict[str, list[Path]]:
    """List the image files of each class, at least `minimum` of them, sorted by name."""
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) < 2:
        raise DataError(
            f"{path}: {counted(len(folders), 'class folder')}. Give each of at least "
            "two classes its own folder of images."
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
        if len(files) < minimum:
            raise DataError(
                f"{path / name}: {counted(len(files), 'image')}, but a class needs at least "
                f"{minimum}. Add images or remove the folder."
            )
    return classes


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

        check_regular(file)
        try:
            with Image.open(file) as opened:
                # Pillow would clip the values of these modes to 255 instead of scaling them.
                if opened.mode.startswith(("I", "F")):
                    kind = "floating-point" if opened.mode.startswith("F") else "16-bit"
                    raise DataError(f"{file}: is a {kind} image. Convert it to 8 bits per channel.")
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except DataError:
            raise
        # Pillow's decoders raise many exception types for a damaged or misnamed file.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(file, error) from error  # permissions, a failing disk
            raise DataError(
                f"{file}: not a readable image ({type(error).__name__}). Replace or remove it."
            ) from error
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
