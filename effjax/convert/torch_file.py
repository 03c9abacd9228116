"""Reads what `torch.save` wrote, without PyTorch and without running anything of the file's choice.

Both formats hold a pickle in which a tensor is a storage, an offset, a shape and strides. The names
that it needs for this are answered by the stand-ins below; every other name is refused.
"""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._unpickle import Refused, StandIn, Unpickler, fill

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_RANK = 64  # of NumPy

_STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip


def read_torch(path: Path) -> Any:
    """The value of a `.pth` file: tensors as read-only NumPy arrays, in plain containers.

    Tensors that share a storage share it here too.

    Raises:
        ValueError: the pickle names anything but tensors and plain containers, a tensor is
            expanded, or the file is damaged, compressed, or was written on a big-endian machine.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        return (_read_zip if data.startswith(_ZIP_MAGIC) else _read_legacy)(data)
    except Refused as error:
        raise ValueError(
            f"{path}: refused, its pickle asks for {error!s:.200}; it must hold tensors and plain "
            "containers only: save model.state_dict() alone"
        ) from error
    except _Expanded as error:
        raise ValueError(f"{path}: holds {error}; save tensor.contiguous() in its place") from error
    except MemoryError:
        raise
    # A broken pickle can raise nearly anything: the unpickler is a stack machine fed with noise.
    except Exception as error:
        said = str(error) if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{path}: not a whole file of torch.save ({said:.200})") from error


class _Expanded(Exception):
    """The tensor that has more numbers than its storage."""


class _Dict(StandIn, dict):
    """Stands for OrderedDict; PyTorch gives it an attribute of versions, which is dropped."""

    __slots__ = ()

    def __new__(cls, items: Any = ()) -> "_Dict":
        """Python 2 gives it a list of lists of two. They are taken out of it: a pickle can name the
        same list again and again, and would have as many copies."""
        self = super().__new__(cls)
        if items:
            if type(items) is not list or any(type(i) is not list or len(i) != 2 for i in items):
                raise ValueError("an OrderedDict of something else")
            fill(self, items)
            items.clear()
        return self

    def __init__(self, items: Any = ()) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Storage(StandIn):
    """What a tensor is a view of; nothing else is, as a view's strides are its own."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray):
        self.array = array


def _sizes(value: Any) -> bool:
    """Whether it can be a shape, or strides."""
    return (
        type(value) is tuple and len(value) <= _MAX_RANK and all(_is_size(size) for size in value)
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


class _Tensor(StandIn):
    """Makes a view of a storage. A class, as a pickle could set the attributes of a function."""

    __slots__ = ()

    def __new__(
        cls, storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None,
        _hooks: Any = None, metadata: Any = None,
    ) -> Any:  # fmt: skip
        if type(storage) is not _Storage or metadata:
            raise Refused("a tensor of another kind")
        array = storage.array
        # Nothing of a pickle is shown or hashed before its type is known: see `fill`.
        if not (_is_size(offset) and _sizes(shape) and _sizes(strides)):
            raise ValueError("a tensor whose shape, strides or offset are not whole numbers")
        if len(shape) != len(strides):
            raise ValueError(f"a tensor of shape {shape} and strides {strides}")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape:
            if last >= array.size:
                raise ValueError(f"a tensor of shape {shape} in a storage of {array.size}")
            if math.prod(shape) > array.size:
                raise _Expanded(f"a tensor that is expanded to {shape} from {array.size} numbers")
        steps = tuple(step * array.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(array[offset:], shape, steps, writeable=False)


class _Parameter(StandIn):
    """Its tensor."""

    __slots__ = ()

    def __new__(cls, tensor: Any, _grad: Any = None, _hooks: Any = None) -> Any:
        return tensor


class _Nothing(StandIn):
    """Stands for a tensor whose storage has not been read yet."""

    __slots__ = ()

    def __new__(cls, *_args: Any) -> Any:
        return None


_TENSORS = [("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2")]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    **dict.fromkeys(_TENSORS, _Tensor),
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    **{("torch", name): name for name in _STORAGES},
}


def _load(stream: io.BytesIO, storage_of: Any = None, tensor: type = _Tensor) -> Any:
    allowed = _ALLOWED | dict.fromkeys(_TENSORS, tensor)
    return Unpickler(stream, allowed, storage_of, encoding="utf-8").load()


def _storage_id(pid: Any) -> tuple[str, np.dtype, int]:
    """The key, the dtype and the length of a storage; where it lay does not matter."""
    if type(pid) is not tuple or len(pid) not in (5, 6) or any(type(s) is not str for s in pid[:3]):
        raise Refused("a storage of another kind")
    kind, name, key, _device, length, *view = pid
    if kind != "storage" or name not in _STORAGES or (view and view[0] is not None):
        raise Refused("a storage of another kind")
    if not _is_size(length):
        raise ValueError(f"a storage {key:.40} whose length is no whole number")
    return key, np.dtype(_STORAGES[name]), length


def _filled(raw: Any, dtype: np.dtype, length: int) -> _Storage:
    if len(raw) != dtype.itemsize * length:
        raise ValueError(f"a storage of {len(raw)} bytes for {length} × {dtype}")
    array = np.frombuffer(raw, dtype)
    array.flags.writeable = False
    return _Storage(array)


def _read_zip(data: bytes) -> Any:
    archive = zipfile.ZipFile(io.BytesIO(data))
    if sum(info.file_size for info in archive.infolist()) > len(data):
        raise ValueError("compressed, or entries that overlap")
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{len(pickles)} pickles in the archive")
    root, storages = pickles[0].removesuffix("data.pkl"), {}

    def entry(name: str) -> bytes:
        info = archive.getinfo(root + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed, as torch.save never writes it")
        return archive.read(info)

    if f"{root}byteorder" in archive.namelist() and entry("byteorder") != b"little":
        raise ValueError("big-endian")

    def storage_of(pid: Any) -> _Storage:
        key, dtype, length = _storage_id(pid)
        if (key, dtype) not in storages:
            storages[key, dtype] = _filled(entry(f"data/{key}"), dtype, length)
        return storages[key, dtype]

    return _load(io.BytesIO(entry("data.pkl")), storage_of)


def _read_legacy(data: bytes) -> Any:
    """Three pickles (magic number, version, machine), the value, the keys; then the storages in the
    order of the keys, each its length and its bytes. The value is thus read twice."""
    stream = io.BytesIO(data)
    if _load(stream) != LEGACY_MAGIC:
        raise ValueError("no file of torch.save")
    _load(stream)
    if _load(stream)["little_endian"] is not True:
        raise ValueError("big-endian")
    start, kinds = stream.tell(), {}

    def note(pid: Any) -> None:
        key, dtype, length = _storage_id(pid)
        kinds[key] = dtype, length

    _load(stream, note, _Nothing)
    storages = {}
    for key in _load(stream):
        if type(key) is not str:
            raise ValueError("a key of a storage that is no string")
        dtype, length = kinds[key]
        if int.from_bytes(stream.read(8), "little") != length:
            raise ValueError(f"a storage that is not {length} long")
        storages[key] = _filled(stream.read(dtype.itemsize * length), dtype, length)
    stream.seek(start)
    return _load(stream, lambda pid: storages[_storage_id(pid)[0]])
