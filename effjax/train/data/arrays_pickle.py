"""Reads pickles that hold NumPy arrays and plain containers, and refuses all others.

The names that a pickled array needs are answered by the stand-ins below, which only collect a
shape, a type and bytes; every other name is refused, so no code of the file's choice runs.
"""

import io
import math
from typing import Any

import numpy as np

from ..._unpickle import Refused, StandIn, Unpickler
from ..errors import DataError


def loads(data: bytes, source: str) -> Any:
    """The value of a pickle of None, bool, int, float, str, bytes, list, tuple, dict, array.

    Args:
        data: the pickle, of any protocol; strings of Python 2 become bytes.
        source: the file's name, for the message.

    Raises:
        DataError: the pickle names anything else, or is broken.
    """
    try:
        return _finish(Unpickler(io.BytesIO(data), _ALLOWED).load(), {})
    except Refused as error:
        raise DataError(
            f"{source}: refused, the pickle asks for {error}; it must hold arrays and plain "
            "containers only: fetch the file from its publisher"
        ) from error
    # A broken pickle can raise nearly anything: the unpickler is a stack machine fed with noise.
    except Exception as error:
        raise DataError(
            f"{source}: not a whole pickle ({type(error).__name__}); fetch the file again"
        ) from error


class _Array(StandIn):
    """Stands for a numpy array, empty until its state arrives."""

    __slots__ = ("value",)
    value: np.ndarray

    def __new__(cls, *_args: Any) -> "_Array":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, raw = state
        self.value = _from_bytes(raw, dtype, shape, "F" if fortran else "C")


class _Dtype(StandIn):
    """Stands for a numpy dtype: its code and its byte order."""

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
    """How protocol 5 makes an array."""

    __slots__ = ()

    def __new__(cls, raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
        array = _Array()
        array.value = _from_bytes(raw, dtype, shape, _text(order))
        return array


class _Encode(StandIn):
    """`codecs.encode(text, "latin1")`: how Python 3 writes bytes in old protocols."""

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any = "latin1") -> Any:
        if (encoding := _text(encoding)) != "latin1":
            raise Refused(f"encoding {encoding!r:.40}")
        return _text(text).encode("latin1")


class _NoBytes(StandIn):
    """`bytes()`: how Python 3 writes empty bytes in old protocols."""

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
        raise Refused(f"text that is {type(value).__name__}")
    return value if type(value) is str else value.decode("latin1")


def _from_bytes(raw: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _Dtype):
        raise Refused("an array of objects")
    if type(shape) is not tuple or not all(type(size) is int for size in shape):
        raise ValueError("an array's shape is not of whole numbers")
    numeric = np.dtype(dtype.code)
    if numeric.kind not in "buif":
        raise Refused(f"an array of dtype {numeric}")
    if math.prod(shape) * numeric.itemsize != len(raw):
        raise ValueError("an array's bytes do not fill its shape")
    return np.frombuffer(raw, numeric).reshape(shape, order="F" if order == "F" else "C")


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """Replaces the stand-ins by their arrays; `done` keeps what is shared in the file shared."""
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
            raise Refused(f"a bare {type(value).__name__.lstrip('_')}")
        done[id(value)] = finished
    return done[id(value)]
