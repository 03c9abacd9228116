"""Dispatch from a data set's specification to its reader."""

from collections.abc import Callable
from pathlib import Path

from ..._extras import install_command
from ..errors import DataError, unreadable
from .cifar import load_cifar
from .dataset import Dataset
from .digits import load_digits
from .folder import IN_MEMORY, load_folder

FORMATS = "digits, cifar10:PATH, cifar100:PATH, folder:PATH"


def load_dataset(spec: str, image_size: int | None = None, in_memory: int = IN_MEMORY) -> Dataset:
    """Read an image data set.

    Args:
        spec: One of `digits` (scikit-learn's), `cifar10:PATH`, `cifar100:PATH` and `folder:PATH`.
            PATH is a directory; for CIFAR it can also be the downloaded archive.
        image_size: Side to which the images of a folder are resized. If None, all must have the
            size of the first.
        in_memory: Maximum number of bytes of pixels that a folder may hold in memory. Larger ones
            are decoded batch by batch.

    Raises:
        DataError: The data cannot be read or are invalid. The message names the file and a remedy.
    """
    kind, _, path = spec.partition(":")
    readers: dict[str, Callable[[], Dataset]] = {
        "digits": load_digits,
        "cifar10": lambda: load_cifar(Path(path), 10),
        "cifar100": lambda: load_cifar(Path(path), 100),
        "folder": lambda: load_folder(Path(path), image_size, in_memory),
    }
    if kind not in readers or bool(path) == (kind == "digits"):
        raise DataError(f"unknown data {spec!r:.120}. Use one of {FORMATS}.")
    if image_size is not None and kind != "folder":
        raise DataError(
            f"data {spec!r:.120} has a fixed image size. Use `image_size` with folder:PATH."
        )
    try:
        return readers[kind]()
    except OSError as error:
        raise unreadable(path, error) from error
    except ModuleNotFoundError as error:  # of scikit-learn or Pillow
        raise DataError(f"{error.name} is missing. Run {install_command('train')}.") from error
