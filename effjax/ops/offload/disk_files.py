"""Arrays of layers in files: a directory for each step, in which each layer has one file."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

_FORMAT = "effjax.disk_update 1"
_ALIGNMENT = 4096  # of the header and of each block
_CHUNK_BYTES = 64 * 2**20  # of one read or write
_THREADS = 8  # NVMe drives need several requests at a time


class Block(NamedTuple):
    """A part of an array that one device has, or all of it."""

    name: str  # of the array
    index: tuple[tuple[int, int], ...]  # start and end along each axis
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(end - start for start, end in self.index)

    @property
    def num_bytes(self) -> int:
        """The size of the part."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class LayerFile(NamedTuple):
    """The contents of a file: a header that describes them, then the blocks.

    Nothing of an earlier step is ever overwritten, so a file may have several names (hard links).
    """

    step: int
    layer: int
    num_layers: int
    process: int
    num_processes: int
    blocks: list[Block]

    @property
    def name(self) -> str:
        """The name of the file."""
        return _file_name(self.layer)

    @property
    def header(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "format": _FORMAT,
            "step": self.step,
            "layer": self.layer,
            "layers": self.num_layers,
            "process": self.process,
            "processes": self.num_processes,
            "blocks": [
                [b.name, str(b.dtype), [list(pair) for pair in b.index]] for b in self.blocks
            ],
        }

    @property
    def header_bytes(self) -> bytes:
        """The header as it is stored, padded."""
        line = json.dumps(self.header).encode() + b"\n"
        return line.ljust(_aligned(len(line)), b"\0")

    @property
    def offsets(self) -> list[int]:
        """The position of each block, and the size of the file."""
        offsets = [len(self.header_bytes)]
        for block in self.blocks:
            offsets.append(_aligned(offsets[-1] + block.num_bytes))
        return offsets

    def check(self, folder: pathlib.Path) -> None:
        """Raise an error that names the file unless it is this one."""
        path, expected = folder / self.name, self.header
        got = read_header(path)
        for key, value in expected.items():
            if key != "blocks" and got.get(key) != value:
                raise ValueError(f"{path} has {key} {got.get(key)!r}, not {value!r}.")
        for stored, block in zip(got["blocks"], expected["blocks"], strict=False):
            if stored != block:
                raise ValueError(f"{path} contains {_text(stored)}, not {_text(block)}.")
        if len(got["blocks"]) != len(expected["blocks"]):
            raise ValueError(
                f"{path} contains {len(got['blocks'])} arrays, not {len(expected['blocks'])}."
            )
        if (size := path.stat().st_size) != self.offsets[-1]:
            raise ValueError(f"{path} has {size} bytes, not {self.offsets[-1]}. It is damaged.")

    def read(self, folder: pathlib.Path) -> list[np.ndarray]:
        """Return the blocks."""
        arrays = [np.empty(block.shape, block.dtype) for block in self.blocks]
        with open(folder / self.name, "rb", buffering=0) as file:

            def read(view: memoryview, offset: int) -> None:
                while view:
                    if not (count := os.preadv(file.fileno(), [view], offset)):
                        raise ValueError(f"{file.name} ends at byte {offset}. It is damaged.")
                    view, offset = view[count:], offset + count

            _for_each_chunk(read, arrays, self.offsets)
            _drop_cache(file.fileno())
        return arrays

    def write(self, folder: pathlib.Path, arrays: Iterable[np.ndarray]) -> None:
        """Write the file, which `allocate` has created, and wait until it is on the disk."""
        header = np.frombuffer(self.header_bytes, np.uint8)
        with open(folder / self.name, "r+b", buffering=0) as file:

            def write(view: memoryview, offset: int) -> None:
                while view:
                    count = os.pwrite(file.fileno(), view, offset)
                    view, offset = view[count:], offset + count

            _for_each_chunk(write, [header, *arrays], [0, *self.offsets])
            os.fsync(file.fileno())
            _drop_cache(file.fileno())


def read_header(path: pathlib.Path) -> dict[str, Any]:
    """Return the header of a file; raise an error that names it if there is none."""
    with open(path, "rb") as file:
        try:
            header = json.loads(file.readline(2**24))
            if header["format"] == _FORMAT and isinstance(header["blocks"], list):
                return header
        except (ValueError, TypeError, KeyError):
            pass
    raise ValueError(f"{path} was not written by disk_update.")


def read_step(folder: pathlib.Path) -> int:
    """Return the step of the files in a folder."""
    return read_header(folder / _file_name(0))["step"]


def write_folder(
    folder: pathlib.Path, files: Sequence[LayerFile], fill: Callable[[pathlib.Path], Any]
) -> Any:
    """Create a folder with files, which appears under its name when all of it is on the disk.

    Args:
        folder: the new folder.
        files: the files.
        fill: ``fill(folder) -> result``, which writes all files in a temporary folder.

    Returns:
        The result of `fill`.
    """
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} exists and could not be removed. Remove it.")
    with _rename_when_complete(folder.with_name(f"{folder.name}.tmp"), folder) as temporary:
        _allocate(temporary, files)
        return fill(temporary)


def link_folder(source: pathlib.Path, target: pathlib.Path) -> None:
    """Create a folder with hard links to the files of another one, or copies on another disk."""
    # The temporary folder has a name that no user chooses.
    hidden = target.with_name(f".{target.name}.disk_update.tmp")
    with _rename_when_complete(hidden, target) as temporary:
        for file in source.iterdir():
            try:
                os.link(file, temporary / file.name)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                shutil.copyfile(file, temporary / file.name)
                _sync(temporary / file.name)


@contextlib.contextmanager
def _rename_when_complete(temporary: pathlib.Path, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create a temporary folder; rename it to `folder` at the end, or remove it after an error."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _make_folder(temporary)
        yield temporary
        _sync(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(folder.parent)


def _make_folder(folder: pathlib.Path) -> None:
    """Create a folder and its parents, and wait until the parents are on the disk."""
    new = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True)
    for parent in new:
        _sync(parent.parent)


def _allocate(folder: pathlib.Path, files: Sequence[LayerFile]) -> None:
    """Create files of their final size. If the disk is full, this fails before anything changes."""
    total = sum(file.offsets[-1] for file in files)
    try:
        for layer_file in files:
            size = layer_file.offsets[-1]
            with open(folder / layer_file.name, "xb", buffering=0) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:  # macOS
                    file.truncate(size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: a step needs {total} bytes ({total / 2**30:.1f} GiB) "
            "more than the step before, which is unchanged",
            str(folder),
        ) from None


def _for_each_chunk(
    run: Callable[[memoryview, int], None], arrays: Iterable[np.ndarray], offsets: Sequence[int]
) -> None:
    """Call ``run(bytes, offset)`` for parts of arrays, in several threads."""
    jobs = []
    for array, start in zip(arrays, offsets, strict=False):
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for first in range(0, len(view), _CHUNK_BYTES):
            jobs.append((view[first : first + _CHUNK_BYTES], start + first))
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda job: run(*job), jobs):
            pass


def _drop_cache(descriptor: int) -> None:
    # The file is read or replaced one step later. In the meantime other files need the cache.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_name(layer: int) -> str:
    return f"layer_{layer:05}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(block: Any) -> str:
    try:
        name, dtype, index = block
        return f"{name} {dtype}[{','.join(f'{start}:{end}' for start, end in index)}]"
    except (TypeError, ValueError):
        return repr(block)
