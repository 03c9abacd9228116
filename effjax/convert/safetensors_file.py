"""Reader and writer of `.safetensors` files.

A file is the length of its header, a JSON header with the dtype, shape and byte range of each
tensor, and the bytes. Parts of tensors are read into memory of the caller. Memory maps are avoided:
their pages count as memory of the process.
"""

import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._files import check, check_distinct, check_regular
from .._slices import Bounds, whole

METADATA = "__metadata__"  # the entry of a header that is not a tensor
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MIN_RUN_BYTES = 4096  # of shorter runs, the bytes between them are read as well
ALIGNED_ROWS = 256  # parts of arrays begin at a tile of a TPU
MAX_SLAB_BYTES = 8 << 20  # bytes of such a read

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
        "F8_E8M0": jnp.float8_e8m0fnu, "BOOL": np.bool_,
        "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
        "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bits of the other dtypes that the format defines. Their tensors are listed, and cannot be read.
_OTHER_BITS = {"C64": 64, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}


class Tensor(NamedTuple):
    """Description of a tensor in a file."""

    path: Path
    dtype: str  # as in the header
    shape: tuple[int, ...]
    start: int  # of its bytes, from the beginning of the file


class Description(NamedTuple):
    """The dtype, as in a header, and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def dtype_name(dtype: np.dtype) -> str | None:
    """Return the name of a dtype in a header, or None if the format does not support it."""
    return _NAMES.get(np.dtype(dtype))


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        ValueError: The file is damaged or too short.
        OSError: The file cannot be read.
    """
    return _read_header(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts about a file in its header, by name; raise errors as `read_header`."""
    return _read_header(path)[1]


def _read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        check_regular(path)
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            size = int.from_bytes(first := file.read(8), "little")
            check(len(first) == 8, f"{file_bytes} bytes are no header")
            check(size <= MAX_HEADER_BYTES, f"a header of {size} bytes")
            check(8 + size <= file_bytes, f"{file_bytes} bytes, with a header of {size}")
            items = json.loads(file.read(size), object_pairs_hook=list)
        tensors = _parse_header(path, items, 8 + size, file_bytes)
        texts = dict(items).get(METADATA, ())
        return tensors, dict(texts) if _is_object(texts) else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a complete .safetensors file ({error!s:.200}). Copy or download it again."
        ) from error


def _parse_header(path: Path, items: Any, start: int, file_bytes: int) -> dict[str, Tensor]:
    # `items` is JSON with lists of pairs for objects, so that no key is lost.
    check(_is_object(items), "the header is not an object")
    check_distinct(name for name, _ in items)
    tensors, ranges = {}, []
    for name, info in items:
        if name == METADATA:
            continue
        check(_is_object(info), f"{name!r:.120} is not described by an object")
        check_distinct(key for key, _ in info)
        values: Any = dict.fromkeys(("dtype", "shape", "data_offsets")) | dict(info)
        dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
        check(isinstance(dtype, str), f"{name!r:.120} has no dtype")
        check(dtype in DTYPES or dtype in _OTHER_BITS, f"{name!r:.120} has dtype {dtype:.40}")
        check(_are_sizes(shape) and len(shape) <= 64, f"{name!r:.120} has no valid shape")
        check(_are_sizes(offsets) and len(offsets) == 2, f"{name!r:.120} has no valid offsets")
        bits = DTYPES[dtype].itemsize * 8 if dtype in DTYPES else _OTHER_BITS[dtype]
        check(
            math.prod(shape) * bits == (offsets[1] - offsets[0]) * 8,
            f"{name!r:.120} has {offsets[1] - offsets[0]} bytes, which are not its shape {shape}",
        )
        tensors[name] = Tensor(path, dtype, tuple(shape), start + offsets[0])
        ranges.append((*offsets, name))
    end = 0
    for first, last, name in sorted(ranges):
        check(first >= end, f"{name!r:.120} overlaps another tensor")
        check(first == end, f"{first - end} unused bytes before {name!r:.120}")
        end = last
    check(file_bytes >= start + end, f"truncated: {file_bytes} of {start + end} bytes")
    check(file_bytes == start + end, f"{file_bytes - start - end} bytes after the last tensor")
    return tensors


def _is_object(value: Any) -> bool:
    # An empty list has no pairs, as has an empty object.
    return isinstance(value, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in value
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def read_tensor(
    tensor: Tensor, bounds: Bounds | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Read a tensor, or the part of it within `bounds`.

    Args:
        tensor: The tensor, of a dtype in `DTYPES`.
        bounds: The part.
        out: A contiguous array to read into.

    Raises:
        ValueError: The file has become too short.
        OSError: The file cannot be read.
    """
    shape, bounds = tensor.shape, whole(tensor.shape) if bounds is None else bounds
    if out is None:
        out = np.empty([last - first for first, last in bounds], DTYPES[tensor.dtype])
    if out.size:
        with tensor.path.open("rb", buffering=0) as file:
            _read_runs(file, tensor.start, shape or (1,), bounds or ((0, 1),), out)
    return out


def _read_runs(
    file: io.FileIO, start: int, shape: tuple[int, ...], bounds: Bounds, out: np.ndarray
) -> None:
    out = out.reshape(-1) if not out.ndim else out
    steps, partial = _steps(shape, out.itemsize), _last_partial_axis(shape, bounds)
    # A read is one run of bytes: the axes behind `axis` are read whole.
    axis = partial
    while axis > 0 and out.shape[axis] * steps[axis] < MIN_RUN_BYTES:
        axis -= 1
    rows = out.shape[axis] if axis == partial else max(MAX_SLAB_BYTES // steps[axis], 1)
    inner = tuple(slice(*pair) for pair in bounds[axis + 1 :])
    for outer in np.ndindex(out.shape[:axis]):
        first = start + _offset((*outer, 0), bounds, steps)
        for row in range(0, out.shape[axis], rows):
            part = out[outer][row : row + rows]
            if axis == partial:
                _read_into(file, part, first)
            else:
                slab = np.empty((len(part), *shape[axis + 1 :]), out.dtype)
                _read_into(file, slab, first + row * steps[axis])
                part[...] = slab[(slice(None), *inner)]


def write_tensor(tensor: Tensor, part: np.ndarray, bounds: Bounds | None = None) -> None:
    """Write a tensor, or the part of it within `bounds`, to its place in a file that exists."""
    if not part.size:
        return
    bounds = whole(tensor.shape) if bounds is None else bounds
    shape, bounds = tensor.shape or (1,), bounds or ((0, 1),)
    part = np.ascontiguousarray(part, DTYPES[tensor.dtype])  # of a scalar: [1]
    steps, axis = _steps(shape, part.itemsize), _last_partial_axis(shape, bounds)
    with tensor.path.open("r+b", buffering=0) as file:
        for outer in np.ndindex(part.shape[:axis]):
            file.seek(tensor.start + _offset((*outer, 0), bounds, steps))
            data = _bytes(part[outer])
            while data:  # an unbuffered file may write less than it is given
                data = data[file.write(data) :]


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise ValueError if a number of a tensor is not finite."""
    # In blocks, because a mask of a large array would take half as much memory as bfloat16.
    flat = array.reshape(-1)
    with np.errstate(invalid="ignore"):  # of NaNs in 16 bits
        for start in range(0, flat.size, 1 << 20):
            if not np.isfinite(flat[start : start + (1 << 20)]).all():
                raise ValueError(f"{name} has numbers that are not finite.")


def make_header(
    path: Path, descriptions: Mapping[str, Description], metadata: Mapping[str, str] = {}
) -> tuple[bytes, dict[str, Tensor]]:
    """Return the first bytes of a new file, before those of the tensors, and its tensors."""
    # The largest dtypes come first, so that all are aligned.
    names = sorted(descriptions, key=lambda name: -DTYPES[descriptions[name].dtype].itemsize)
    # transformers requires the format.
    header: dict[str, Any] = {METADATA: {"format": "pt", **metadata}}
    starts, end = {}, 0
    for name in names:
        dtype, shape = descriptions[name]
        starts[name], end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8, as those of the safetensors package.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    tensors = {name: Tensor(path, *descriptions[name], start + starts[name]) for name in names}
    return len(text).to_bytes(8, "little") + text, tensors


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file; raise TypeError or ValueError if the format does not support the arrays."""
    descriptions = {name: describe(name, array) for name, array in arrays.items()}
    header, tensors = make_header(path, descriptions)
    create_file(path, header, tensors)
    for name, tensor in tensors.items():
        write_tensor(tensor, arrays[name])


def describe(name: str, array: Any) -> Description:
    """Return the description of an array in a file; raise an error if it is not supported."""
    dtype = _NAMES.get(np.dtype(array.dtype).newbyteorder("="))
    if dtype is None:
        raise TypeError(f"{name:.120}: .safetensors cannot hold {array.dtype}.")
    if name == METADATA:
        raise ValueError(f"{name} cannot be the name of an array in .safetensors.")
    return Description(dtype, tuple(array.shape))


def create_file(path: Path, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Create a file of its final size, with its header; `write_tensor` writes the rest."""
    end = max((t.start + num_bytes(t) for t in tensors.values()), default=len(header))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end)


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until files, or the names in folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_index(path: Path) -> dict[str, str]:
    """Return the name of the file of each tensor from a `.safetensors.index.json`.

    Raises:
        ValueError: It is damaged, or names files elsewhere.
        OSError: It cannot be read.
    """
    try:
        check_regular(path)
        check(path.stat().st_size <= MAX_HEADER_BYTES, f"{path.stat().st_size} bytes")
        index = json.loads(path.read_bytes())
        files: Any = index.get("weight_map") if isinstance(index, dict) else None
        check(isinstance(files, dict), "no weight_map")
        for file in files.values():
            # The index of a stranger must not make this process open other files.
            is_name = isinstance(file, str) and re.fullmatch(r"[^/\\:\0]+\.safetensors", file)
            check(bool(is_name), f"{file!r:.120} is not the name of a .safetensors file")
        return files
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of .safetensors files ({error!s:.200})") from error


def num_bytes(tensor: Tensor, bounds: Bounds | None = None) -> int:
    """Return the number of bytes of a tensor, or of the part of it within `bounds`."""
    bounds = whole(tensor.shape) if bounds is None else bounds
    return math.prod(last - first for first, last in bounds) * DTYPES[tensor.dtype].itemsize


def _last_partial_axis(shape: Sequence[int], bounds: Bounds) -> int:
    """Return the last axis of which only a part is wanted, or 0."""
    partial = [axis for axis, size in enumerate(shape) if bounds[axis] != (0, size)]
    return partial[-1] if partial else 0


def _steps(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the bytes between two entries along each axis of a tensor in a file."""
    return [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]


def _offset(index: Sequence[int], bounds: Bounds, steps: Sequence[int]) -> int:
    return sum((bounds[axis][0] + i) * steps[axis] for axis, i in enumerate(index))


def _bytes(array: np.ndarray) -> memoryview:
    data: Any = array.reshape(-1).view(np.uint8)
    return memoryview(data)


def _read_into(file: io.FileIO, array: np.ndarray, start: int) -> None:
    file.seek(start)
    data = _bytes(array)
    while data:
        count = file.readinto(data)
        if not count:
            raise ValueError(f"{file.name}: truncated while it was read")
        data = data[count:]


def row_ranges(shape: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the last + 1, of parts of at most `max_bytes`, or of one row."""
    rows = max(max_bytes // max(math.prod(shape[1:]) * itemsize, 1), 1)
    if rows > ALIGNED_ROWS:
        rows -= rows % ALIGNED_ROWS
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])
