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

from .._unpickle import Refused, StandIn, Unpickler

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_MAGIC = b"PK\x03\x04"

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
        ValueError: the pickle names anything but tensors and plain containers, or the file is
            damaged, compressed, or was written on a big-endian machine.
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
    # A broken pickle can raise nearly anything: the unpickler is a stack machine fed with noise.
    except Exception as error:
        said = str(error) if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{path}: not a whole file of torch.save ({said:.200})") from error


class _Dict(StandIn, dict):
    """Stands for OrderedDict; PyTorch gives it an attribute of versions, which is dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Tensor(StandIn):
    """Makes a view of a storage. A class, as a pickle could set the attributes of a function."""

    __slots__ = ()

    def __new__(
        cls, storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None,
        _hooks: Any = None, metadata: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(storage, np.ndarray) or metadata:
            raise Refused("a tensor of another kind")
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"a tensor of shape {shape}, strides {strides} at {offset}")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and (last >= storage.size or math.prod(shape) > storage.size):
            raise ValueError(f"a tensor of shape {shape} in a storage of {storage.size}")
        steps = tuple(step * storage.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


class _Parameter(StandIn):
    """Its tensor."""

    __slots__ = ()

    def __new__(cls, tensor: Any, *_args: Any) -> Any:
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
    kind, name, key, _device, length, *view = pid
    if kind != "storage" or name not in _STORAGES or (view and view[0] is not None):
        raise Refused("a storage of another kind")
    if not isinstance(key, str) or type(length) is not int or length < 0:
        raise ValueError(f"a storage {key!r:.40} of length {length!r:.40}")
    return key, np.dtype(_STORAGES[name]), length


def _filled(raw: Any, dtype: np.dtype, length: int) -> np.ndarray:
    if len(raw) != dtype.itemsize * length:
        raise ValueError(f"a storage of {len(raw)} bytes for {length} × {dtype}")
    array = np.frombuffer(raw, dtype)
    array.flags.writeable = False
    return array


def _read_zip(data: bytes) -> Any:
    archive = zipfile.ZipFile(io.BytesIO(data))
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

    def storage_of(pid: Any) -> np.ndarray:
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
        dtype, length = kinds[key]
        if int.from_bytes(stream.read(8), "little") != length:
            raise ValueError(f"a storage that is not {length} long")
        storages[key] = _filled(stream.read(dtype.itemsize * length), dtype, length)
    stream.seek(start)
    return _load(stream, lambda pid: storages[_storage_id(pid)[0]])
