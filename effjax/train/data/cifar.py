"""CIFAR-10 and CIFAR-100, as their authors publish them (Krizhevsky, 2009).

Either format, python (pickles) or binary, in a directory or in the .tar.gz as downloaded. An
archive is read in one pass and never extracted; a pickle is read as data, not as code, see
`arrays_pickle.py`.
"""

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import DataError, check_regular
from .arrays_pickle import loads
from .dataset import Dataset, check_labels

MAX_FILE_BYTES = 1 << 28  # the largest real one, CIFAR-100's pickled train set, has 155 MB
MAX_NAME_BYTES = 1 << 20
NAMES = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """How one archive stores one data set."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    pickled: bool
    label_key: str  # of the pickled dictionary
    names_key: str
    label_bytes: int  # before the pixels of a binary record; the last one is the class

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.names)


BATCHES = [f"data_batch_{i}" for i in range(1, 6)]

LAYOUTS = {
    10: (
        Layout(tuple(BATCHES), ("test_batch",), "batches.meta", True, "labels", "label_names", 0),
        Layout(
            tuple(f"{name}.bin" for name in BATCHES),
            ("test_batch.bin",),
            "batches.meta.txt",
            False,
            "",
            "",
            1,
        ),
    ),
    100: (
        Layout(("train",), ("test",), "meta", True, "fine_labels", "fine_label_names", 0),
        Layout(("train.bin",), ("test.bin",), "fine_label_names.txt", False, "", "", 2),
    ),
}


def load_cifar(path: Path, num_classes: int) -> Dataset:
    """Reads CIFAR-10 or CIFAR-100 (its 100 fine classes).

    Args:
        path: the directory that holds the files, the directory above it, or the archive.
        num_classes: 10 or 100.

    Raises:
        DataError: a file is missing, truncated, not what it should be, or has impossible labels.
    """
    layouts = LAYOUTS[num_classes]
    wanted = {name for layout in layouts for name in layout.files}
    files = _read_directory(path, wanted) if path.is_dir() else _read_archive(path, wanted)
    layout = max(layouts, key=lambda layout: len(files.keys() & set(layout.files)))
    for name in layout.files:
        if name not in files:
            raise DataError(
                f"{path}: {name} is missing; fetch the CIFAR-{num_classes} archive again"
            )

    class_names = _class_names(layout, files[layout.names], f"{path}/{layout.names}", num_classes)
    parts = {}
    for part, names in (("train", layout.train), ("test", layout.test)):
        batches = [_read_batch(layout, files[n], f"{path}/{n}", num_classes) for n in names]
        parts[part] = [np.concatenate(columns) for columns in zip(*batches, strict=True)]
    (train_images, train_labels), (test_images, test_labels) = parts["train"], parts["test"]
    # Whatever is cut off at a record's end cannot be seen in the file itself.
    if len(train_images) != 5 * len(test_images):
        raise DataError(
            f"{path}: {len(train_images)} train and {len(test_images)} test images, but the "
            f"archive has five to one; a file is cut short: fetch it again"
        )
    return Dataset(
        name=f"cifar{num_classes}:{path}",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=class_names,
        flip=True,
    )


def _read_directory(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of `path`, or of the folder below it that has most of them."""
    folders = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    folder = max(folders, key=lambda p: sum((p / name).is_file() for name in wanted))
    files = {}
    for name in sorted(wanted):
        if (folder / name).is_file():
            _check_size(folder / name, (folder / name).stat().st_size)
            files[name] = (folder / name).read_bytes()
    return files


def _read_archive(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of a .tar.gz or .tar, read in one pass."""
    files: dict[str, bytes] = {}
    check_regular(path)
    with path.open("rb") as start:
        compressed = start.read(2) == b"\x1f\x8b"
    try:
        with tarfile.open(path, "r:gz" if compressed else "r:", tarinfo=_Member) as archive:
            for member in archive:
                _check_size(f"{path}/{member.name}", member.size)
                name = PurePosixPath(member.name).name
                if name not in wanted or not member.isreg():
                    continue
                if name in files:
                    raise DataError(f"{path}: two files {name}; fetch the archive again")
                stream = archive.extractfile(member)
                files[name] = b"" if stream is None else stream.read()
                if len(files[name]) != member.size:
                    raise DataError(f"{path}: cut short in {name}; fetch the archive again")
            # gzip compares its checksum when it reaches the end.
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not the archive's fault: permissions, a failing disk
        raise DataError(f"{path}: not a whole .tar.gz archive ({error}); fetch it again") from error
    return files


class _Member(tarfile.TarInfo):
    """A header of an archive; `tarfile` reads names and comments whole, however long they are."""

    @classmethod
    def frombuf(cls, *args: Any) -> "_Member":
        member = super().frombuf(*args)
        if member.type in NAMES and member.size > MAX_NAME_BYTES:
            raise tarfile.ReadError(f"a name or comment of {member.size} bytes")
        return member


def _check_size(source: object, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise DataError(
            f"{source}: {size} bytes, and no CIFAR file is above {MAX_FILE_BYTES}; fetch it again"
        )


def _read_batch(
    layout: Layout, data: bytes, source: str, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 32, 32, 3] and labels [N] of one file."""
    if layout.pickled:
        content = _dictionary(data, source)
        pixels = _entry(content, "data", np.ndarray, source)
        if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
            raise DataError(
                f"{source}: data is {pixels.dtype}{list(pixels.shape)}, not uint8[N, {PIXELS}]; "
                "fetch the archive again"
            )
        labels = _integers(_entry(content, layout.label_key, list, source), source)
    else:
        record = layout.label_bytes + PIXELS
        if len(data) % record:
            raise DataError(
                f"{source}: {len(data)} bytes is not a whole number of {record}-byte records; the "
                "file is cut short or of another data set: fetch the archive again"
            )
        records = np.frombuffer(data, np.uint8).reshape(-1, record)
        pixels = records[:, layout.label_bytes :]
        labels = records[:, layout.label_bytes - 1].astype(np.int32)
    check_labels(source, pixels, labels, num_classes)
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # channels are stored first
    return images, labels


def _class_names(layout: Layout, data: bytes, source: str, num_classes: int) -> tuple[str, ...]:
    if layout.pickled:
        names = _entry(_dictionary(data, source), layout.names_key, list, source)
    else:
        names = data.decode("ascii", "replace").split()
    if len(names) != num_classes:
        raise DataError(
            f"{source}: {len(names)} class names, not {num_classes}; fetch the archive again"
        )
    if not all(type(name) in (str, bytes) for name in names):
        raise DataError(f"{source}: class names are not text; fetch the archive again")
    return tuple(_text(name) for name in names)


def _dictionary(data: bytes, source: str) -> dict[str, Any]:
    content = loads(data, source)
    if not isinstance(content, dict):
        raise DataError(
            f"{source}: holds a {type(content).__name__}, not a dictionary; fetch it again"
        )
    # Pickles of Python 2 have bytes where Python 3 has str.
    return {_text(key): value for key, value in content.items()}


def _entry(content: dict[str, Any], key: str, kind: type, source: str) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise DataError(
            f"{source}: no {kind.__name__} named {key!r}; check that it is the data set you named"
        )
    return value


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _integers(labels: list, source: str) -> np.ndarray:
    if not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{source}: labels are not integers; fetch the archive again")
    return np.array(labels, np.int32)
