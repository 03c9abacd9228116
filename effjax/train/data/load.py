"""The data set that an option names: one reader a format."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..errors import DataError, unreadable
from .cifar import load_cifar
from .dataset import Dataset
from .digits import load_digits
from .folder import IN_MEMORY, load_folder
from .rotated import load_rotated_digits

FORMATS = "digits, rotated-digits, cifar10:PATH, cifar100:PATH, folder:PATH"


def load_dataset(spec: str, image_size: int | None = None, in_memory: int = IN_MEMORY) -> Dataset:
    """Reads the data set that `spec` names: `digits`, `rotated-digits`, `cifar10:PATH`,
    `cifar100:PATH` or `folder:PATH`.

    Args:
        spec: `digits` comes with scikit-learn, and `rotated-digits` is made of it. PATH is a
            directory, or for CIFAR also the archive as it is downloaded.
        image_size: the side that images of a folder are resized to; default: all must have the size
            of the first.
        in_memory: a folder of more bytes of pixels is read when its images are asked for.

    Raises:
        DataError: the data cannot be read or is not sound; the message names the file and the
            remedy.
    """
    if not isinstance(spec, str):
        raise TypeError(f"`spec` (={spec!r}) must be text: one of {FORMATS}.")
    kind, separator, path = spec.partition(":")
    readers: dict[str, Callable[[], Dataset]] = {
        "cifar10": lambda: load_cifar(Path(path), 10),
        "cifar100": lambda: load_cifar(Path(path), 100),
        "folder": lambda: load_folder(Path(path), image_size, in_memory),
    }
    bundled = {"digits": load_digits, "rotated-digits": load_rotated_digits}
    if kind in bundled and not separator:
        return bundled[kind]() if image_size is None else _fixed_size(spec)
    if kind not in readers or not path:
        raise DataError(f"data {spec!r} is not known; use one of {FORMATS}")
    if image_size is not None and kind != "folder":
        _fixed_size(spec)
    try:
        if not Path(path).exists():
            raise DataError(f"{path}: no such file or directory; check the path in {spec!r}")
        return readers[kind]()
    except OSError as error:
        raise unreadable(path, error) from error


def _fixed_size(spec: str) -> NoReturn:
    raise DataError(f"data {spec!r} has a fixed image size; image_size is for folder:PATH only")
