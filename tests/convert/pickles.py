"""Files of `torch.save`, made without PyTorch, with arbitrary pickles."""

import io
import pickle
import zipfile
from typing import Any, NamedTuple

import numpy as np

MAGIC = 0x1950A86A20F9469CFC6C


class Global(NamedTuple):
    name: str  # module and attribute, separated by a space


class Call(NamedTuple):
    function: Any
    args: tuple


class Persistent(NamedTuple):
    pid: tuple


class Built(NamedTuple):
    value: Any
    state: Any


class Deep:
    """Tuple that contains its predecessor twice, 60 levels deep: hashing takes 2⁶⁰ steps."""


def pickled(value) -> bytes:
    """Return the pickle of plain containers and of the requests above."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value) -> bytes:
    if isinstance(value, Deep):
        return b"K\x01" + b"2\x86" * 60
    if isinstance(value, Global):
        return b"c" + value.name.replace(" ", "\n").encode() + b"\n"
    if isinstance(value, Call):
        return _opcodes(value.function) + _opcodes(value.args) + b"R"
    if isinstance(value, Persistent):
        return _opcodes(value.pid) + b"Q"
    if isinstance(value, Built):
        return _opcodes(value.value) + _opcodes(value.state) + b"b"
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(k) + _opcodes(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_opcodes, value)) + b"t"
    return pickle.dumps(value, 2)[2:-1]


def storage(size, kind="FloatStorage", key="0"):
    return Persistent(("storage", Global(f"torch {kind}"), key, "cpu", size))


def tensor(storage, shape, strides, offset=0, more=()):
    args = (storage, offset, shape, strides, False, Call(Global("collections OrderedDict"), ()))
    return Call(Global("torch._utils _rebuild_tensor_v2"), args + more)


ONE = tensor(storage(6), (2, 3), (3, 1))


def zipped(value, storages=None, compression=zipfile.ZIP_STORED, **entries) -> bytes:
    """Return a file in PyTorch's format; `entries` replace entries of the archive."""
    file = io.BytesIO()
    names = {"data.pkl": pickled(value), "byteorder": b"little", "version": b"3\n"} | entries
    for key, array in (storages or {"0": np.arange(6, dtype=np.float32)}).items():
        names[f"data/{key}"] = np.asarray(array).tobytes()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in names.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def legacy(value, magic=MAGIC, little_endian=True, keys=("0",), sizes=(6,)) -> bytes:
    """Return a file in the format of PyTorch before 1.6."""
    machine = {"protocol_version": 1001, "little_endian": little_endian}
    head = b"".join(pickle.dumps(part, 2) for part in (magic, 1001, machine))
    data = head + pickled(value) + pickled(list(keys))
    for size in sizes:
        data += size.to_bytes(8, "little") + np.arange(6, dtype=np.float32).tobytes()
    return data
