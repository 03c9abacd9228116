"""Safe reader for files of `torch.save`, without PyTorch.

Both formats contain a pickle in which a tensor is a storage, an offset, a shape and strides. The
stand-ins below rebuild these. Every other name in the pickle is refused, so no code of the file
runs.
"""

import io
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._files import check, check_distinct
from ._unpickle import RefusedError, StandIn, Unpickler, set_items

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_RANK = 64  # NumPy's limit

_STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip


def read_torch(path: Path) -> Any:
    """Load a `.pth` file: plain containers with tensors as read-only NumPy arrays.

    Tensors with a common storage become arrays with common memory.

    Raises:
        ValueError: If the pickle names anything but tensors and plain containers, a tensor is
            expanded, or the file is damaged, compressed, or was written on a big-endian machine.
        OSError: If the file cannot be read.
    """
    with path.open("rb", buffering=0) as raw, _File(raw) as file:
        try:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
            file.seek(0)
            return (_read_zip if is_zip else _read_legacy)(file)
        except RefusedError as error:
            raise ValueError(
                f"{path}: refused, its pickle asks for {error!s:.200}; it must contain only arrays "
                "and plain containers. Save model.state_dict() alone."
            ) from error
        except MemoryError:
            raise
        # A damaged pickle can raise almost any exception: the unpickler is a stack machine fed
        # noise.
        except Exception as error:
            reason = str(error) if type(error) is ValueError else type(error).__name__
            raise ValueError(
                f"{path}: not a complete file of torch.save ({reason:.200})"
            ) from error


class _File(io.BufferedReader):
    """A file in which a read allocates no more bytes than there are."""

    def __init__(self, raw: io.FileIO):
        super().__init__(raw)
        self.num_bytes = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.num_bytes - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))


class _Dict(StandIn, dict):
    """Stand-in for OrderedDict. Drops its state, in which PyTorch keeps version numbers."""

    __slots__ = ()

    def __new__(cls, items: Any = ()) -> "_Dict":
        self = super().__new__(cls)
        # Python 2 passes a list of [key, value] lists. It is emptied, because a pickle can pass the
        # same list many times, and each dict would be a copy of it.
        if items:
            is_pairs = type(items) is list and all(type(i) is list and len(i) == 2 for i in items)
            check(is_pairs, "an OrderedDict of other items")
            set_items(self, items)
            items.clear()
        return self

    def __init__(self, items: Any = ()) -> None:
        pass  # `__new__` has added the items

    def __setstate__(self, state: Any) -> None:
        pass


class _Storage(StandIn):
    """Memory of tensors."""

    # A tensor must be a view of a storage, never of another tensor, whose array may have strides.

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray):
        self.array = array


def _is_shape(value: Any) -> bool:
    # The same test serves for strides, which PyTorch does not allow to be negative.
    return (
        type(value) is tuple and len(value) <= _MAX_RANK and all(_is_size(size) for size in value)
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


class _Tensor(StandIn):
    """Stand-in for the functions that rebuild a tensor: a call returns a view of a storage."""

    # It is a class with empty `__slots__` because a pickle could set the attributes of a function.

    __slots__ = ()

    def __new__(
        cls, storage: Any, offset: Any, shape: Any, strides: Any, _requires_grad: Any = None,
        _hooks: Any = None, metadata: Any = None,
    ) -> Any:  # fmt: skip
        # The offset and the strides count elements. `metadata` has flags such as conjugation, which
        # change the values.
        if type(storage) is not _Storage or metadata:
            raise RefusedError("an unsupported tensor")
        array = storage.array
        # Check types before a value is printed or hashed: see `set_items`.
        is_view = _is_size(offset) and _is_shape(shape) and _is_shape(strides)
        check(is_view, "a tensor whose shape, strides or offset are not integers")
        # as_strided checks no bounds, so a wrong shape would read other memory of this process.
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape:
            check(last < array.size, f"a tensor of shape {shape} in a storage of {array.size}")
            # With a stride of 0, a few bytes could ask for an array of any size.
            is_expanded = math.prod(shape) > array.size
            check(not is_expanded, f"a tensor expanded to {shape}; save tensor.contiguous()")
        byte_strides = tuple(step * array.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(array[offset:], shape, byte_strides, writeable=False)


class _Parameter(StandIn):
    """Stand-in for a parameter: its tensor."""

    __slots__ = ()

    def __new__(cls, tensor: Any, _requires_grad: Any = None, _hooks: Any = None) -> Any:
        return tensor


class _Unread(StandIn):
    """Stand-in for a tensor whose storage has not been read yet."""

    __slots__ = ()

    def __new__(cls, *_args: Any) -> Any:
        return None


_TENSORS = [("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2")]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    **dict.fromkeys(_TENSORS, _Tensor),
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    # The class of a storage stands for its dtype. `_storage_id` looks the name up in `_STORAGES`.
    **{("torch", name): name for name in _STORAGES},
}


def _load(stream: io.BytesIO | _File, storage_of: Any = None, tensor: type = _Tensor) -> Any:
    """Load the next pickle of the stream.

    `storage_of` returns the storage of a persistent id; None refuses storages.
    """
    allowed = _ALLOWED | dict.fromkeys(_TENSORS, tensor)
    return Unpickler(stream, allowed, storage_of).load()


def _storage_id(pid: Any) -> tuple[str, np.dtype, int]:
    """Return the key, dtype and length of a storage from its persistent id. Ignore its device."""
    # The id is ("storage", name of its class, key, device, length). Legacy files append the
    # metadata of a view, or None.
    if type(pid) is not tuple or len(pid) not in (5, 6) or any(type(s) is not str for s in pid[:3]):
        raise RefusedError("an unsupported storage")
    kind, name, key, _device, length, *view = pid
    if kind != "storage" or name not in _STORAGES or (view and view[0] is not None):
        raise RefusedError("an unsupported storage")
    check(_is_size(length), f"a storage {key:.40} whose length is not an integer")
    return key, np.dtype(_STORAGES[name]), length


def _make_storage(raw: Any, dtype: np.dtype, length: int) -> _Storage:
    is_whole = len(raw) == dtype.itemsize * length
    check(is_whole, f"a storage of {len(raw)} bytes for {length} × {dtype}")
    array = np.frombuffer(raw, dtype)
    array.flags.writeable = False
    return _Storage(array)


def _read_zip(file: _File) -> Any:
    archive = zipfile.ZipFile(file)
    # Entries that decompress to more bytes than the file has could fill the memory.
    total = sum(info.file_size for info in archive.infolist())
    check(total <= file.num_bytes, "compressed or overlapping entries")
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    check_distinct(archive.namelist())
    check(len(pickles) == 1, f"{len(pickles)} pickles in the archive")
    # All entries are in one folder, whose name is that of the file when it was saved.
    root, storages = pickles[0].removesuffix("data.pkl"), {}

    def read_entry(name: str) -> bytes:
        info = archive.getinfo(root + name)
        is_stored = info.compress_type == zipfile.ZIP_STORED
        check(is_stored, "compressed, unlike files of torch.save")
        return archive.read(info)

    if f"{root}byteorder" in archive.namelist():
        check(read_entry("byteorder") == b"little", "big-endian")

    def storage_of(pid: Any) -> _Storage:
        key, dtype, length = _storage_id(pid)
        if (key, dtype) not in storages:
            storages[key, dtype] = _make_storage(read_entry(f"data/{key}"), dtype, length)
        return storages[key, dtype]

    return _load(io.BytesIO(read_entry("data.pkl")), storage_of)


def _read_legacy(stream: _File) -> Any:
    # The file is a sequence of pickles: magic number, version, machine, value, storage keys. Then
    # come the storages in the order of the keys, each as its length and its bytes. The value is
    # read twice: first to learn the dtypes of the storages, then to build the tensors.
    check(_load(stream) == LEGACY_MAGIC, "the magic number is missing")
    _load(stream)
    check(_load(stream)["little_endian"] is True, "big-endian")
    start_of_value, kinds = stream.tell(), {}

    def record_kind(pid: Any) -> None:
        key, dtype, length = _storage_id(pid)
        kinds[key] = dtype, length

    _load(stream, record_kind, _Unread)
    storages = {}
    for key in _load(stream):
        check(type(key) is str, "a storage key that is not a string")
        check(key not in storages, f"two storages named {key!r:.120}")
        dtype, length = kinds[key]
        is_length = int.from_bytes(stream.read(8), "little") == length
        check(is_length, f"a storage whose length is not {length}")
        storages[key] = _make_storage(stream.read(dtype.itemsize * length), dtype, length)
    stream.seek(start_of_value)
    return _load(stream, lambda pid: storages[_storage_id(pid)[0]])
