"""Safe reader for pickles of NumPy arrays and plain containers.

A pickle names the functions that rebuild its objects. This reader maps the few names that a pickled
array needs to the stand-ins below, which only collect a shape, a dtype and bytes. It rejects every
other name, so the file cannot choose code to run.
"""

import io
from typing import Any

import numpy as np

from ..._unpickle import RefusedError, StandIn, Unpickler, reading
from ..errors import DataError


def loads(data: bytes, source: str) -> Any:
    """Load a pickle of arrays, dicts, lists, tuples, strings, bytes, numbers and None.

    Args:
        data: The pickle, of any protocol. Strings of Python 2 become bytes, and so do keys that
            are numbers.
        source: The file's name, for error messages.

    Raises:
        DataError: The pickle names any other object, or is damaged.
    """
    with reading(source, "pickle", DataError, "Download the file from its publisher."):
        return _finish(Unpickler(io.BytesIO(data), _ALLOWED).load(), {})


class _Array(StandIn):
    """Stand-in for `numpy.ndarray`, empty until its state arrives."""

    __slots__ = ("value",)
    value: np.ndarray

    def __new__(cls, *_args: Any) -> "_Array":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, raw = state
        self.value = _from_bytes(raw, dtype, shape, "F" if fortran else "C")


class _Dtype(StandIn):
    """Stand-in for `numpy.dtype`: type code and byte order."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: Any, *_args: Any) -> "_Dtype":
        self = super().__new__(cls)
        self.code = _text(code)
        return self

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])
        self.code = (order if order in "<>" else "") + self.code


class _FromBuffer(StandIn):
    """Stand-in for `_frombuffer`, which builds arrays in protocol 5."""

    __slots__ = ()

    def __new__(cls, raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
        array = _Array()
        array.value = _from_bytes(raw, dtype, shape, _text(order))
        return array


class _Encode(StandIn):
    """Stand-in for `codecs.encode(text, "latin1")`: bytes of Python 3 in protocols 0 to 2."""

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any = "latin1") -> Any:
        if (encoding := _text(encoding)) != "latin1":
            raise RefusedError(f"encoding {encoding!r:.40}")
        return _text(text).encode("latin1")


class _NoBytes(StandIn):
    """Stand-in for `bytes()`: empty bytes of Python 3 in protocols 0 to 2."""

    __slots__ = ()

    def __new__(cls) -> Any:
        return b""


_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer,
    ("_codecs", "encode"): _Encode,
    ("__builtin__", "bytes"): _NoBytes,
}


def _text(value: Any) -> str:
    if type(value) not in (str, bytes):
        raise RefusedError(f"text that is {type(value).__name__}")
    return value if type(value) is str else value.decode("latin1")


def _from_bytes(raw: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _Dtype):
        raise RefusedError("an array of objects")
    numeric = np.dtype(dtype.code)
    if numeric.kind not in "buif":
        raise RefusedError(f"an array of dtype {numeric}")
    return np.frombuffer(raw, numeric).reshape(shape, order="F" if order == "F" else "C")


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """Replace stand-ins by their arrays. `done` keeps objects shared that the file shares."""
    if id(value) not in done:
        if isinstance(value, _Array):
            finished = value.value
        elif isinstance(value, list | tuple):
            finished = type(value)(_finish(item, done) for item in value)
        elif isinstance(value, dict):
            finished = {_finish(k, done): _finish(v, done) for k, v in value.items()}
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            finished = value
        else:
            raise RefusedError(f"a bare {type(value).__name__.lstrip('_')}")
        done[id(value)] = finished
    return done[id(value)]
