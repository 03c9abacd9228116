"""Reader for CIFAR-10 and CIFAR-100 as published by their authors (Krizhevsky, 2009).

Reads the binary version, from a directory or from the .tar.gz archive. The archive is read in one
pass and never extracted.
"""

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import DataError, check_regular
from .dataset import Dataset

MAX_FILE_BYTES = 1 << 28  # the largest file, the train set of CIFAR-100, has 154 MB
MAX_NAME_BYTES = 1 << 20
NAMES = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """File names and record format of one archive."""

    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int  # bytes before the pixels of a record; the last one is the class
    pickled: str  # a file of the Python version, which is not read

    @property
    def files(self) -> tuple[str, ...]:
        """All file names."""
        return (*self.train, self.test, self.names)


BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
LAYOUTS = {
    10: Layout(BATCHES, "test_batch.bin", "batches.meta.txt", 1, "batches.meta"),
    100: Layout(("train.bin",), "test.bin", "fine_label_names.txt", 2, "meta"),
}


def load_cifar(path: Path, num_classes: int) -> Dataset:
    """Read CIFAR-10 or CIFAR-100 (its 100 fine classes).

    Args:
        path: The directory with the files, its parent directory, or the archive.
        num_classes: 10 or 100.

    Raises:
        DataError: A file is missing, truncated or in another format, or labels are out of range.
    """
    layout = LAYOUTS[num_classes]
    wanted = {*layout.files, layout.pickled}
    files = _read_directory(path, wanted) if path.is_dir() else _read_archive(path, wanted)
    if layout.pickled in files and layout.names not in files:
        raise DataError(
            f"{path}: this is the Python version. Download the binary version, "
            f"cifar-{num_classes}-binary.tar.gz."
        )
    for name in layout.files:
        _check(name in files, path, f"{name} of CIFAR-{num_classes} is missing")

    class_names = tuple(name.decode("ascii", "replace") for name in files[layout.names].split())
    text = f"{layout.names} must contain {num_classes} class names, not {len(class_names)} entries"
    _check(len(class_names) == num_classes, path, text)
    batches = [
        _read_batch(layout, files[name], f"{path}/{name}", num_classes) for name in layout.train
    ]
    train_images, train_labels = (np.concatenate(column) for column in zip(*batches, strict=True))
    test_images, test_labels = _read_batch(
        layout, files[layout.test], f"{path}/{layout.test}", num_classes
    )
    # A binary file that is truncated between two records looks complete.
    counts = len(train_images), len(test_images)
    text = f"has {counts[0]} train and {counts[1]} test images, not five to one"
    _check(counts[0] == 5 * counts[1], path, text)
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
    """Read the files from `path` or from the subfolder that has most of them."""
    folders = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    folder = max(folders, key=lambda p: sum((p / name).is_file() for name in wanted))
    files = {}
    for name in sorted(wanted):
        if (folder / name).is_file():
            _check_size(folder / name, (folder / name).stat().st_size)
            files[name] = (folder / name).read_bytes()
    return files


def _read_archive(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """Read the files from a .tar.gz or .tar archive in one pass."""
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
                _check(name not in files, path, f"contains {name} twice")
                stream = archive.extractfile(member)
                files[name] = b"" if stream is None else stream.read()
                _check(len(files[name]) == member.size, path, f"truncated in {name}")
            # gzip verifies its checksum at the end of the file.
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the system: permissions, a failing disk
        raise _damaged(path, f"not a complete .tar.gz archive ({error})") from error
    return files


class _Member(tarfile.TarInfo):
    """Header of an archive member with a limit on the name, which `tarfile` reads at any length."""

    @classmethod
    def frombuf(cls, *args: Any) -> "_Member":
        member = super().frombuf(*args)
        if member.type in NAMES and member.size > MAX_NAME_BYTES:
            raise tarfile.ReadError(f"a name or comment of {member.size} bytes")
        return member


def _check_size(source: object, size: int) -> None:
    _check(size <= MAX_FILE_BYTES, source, f"{size} bytes, but CIFAR has at most {MAX_FILE_BYTES}")


def _check(condition: bool, source: object, problem: str) -> None:
    if not condition:
        raise _damaged(source, problem)


def _damaged(source: object, problem: str) -> DataError:
    return DataError(f"{source}: {problem}. Check that this is CIFAR, or download it again.")


def _read_batch(
    layout: Layout, data: bytes, source: str, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 32, 32, 3] and labels [N] of one file."""
    record = layout.label_bytes + PIXELS
    text = f"{len(data)} bytes is not a multiple of the {record}-byte record"
    _check(len(data) % record == 0, source, text)
    _check(len(data) > 0, source, "contains no images")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    labels = records[:, layout.label_bytes - 1].astype(np.int32)
    in_range = bool((labels < num_classes).all())
    _check(in_range, source, f"labels must be integers from 0 to {num_classes - 1}")
    # Channels are stored first.
    pixels = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return pixels, labels
