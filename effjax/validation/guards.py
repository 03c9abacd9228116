"""Guard bands around the operands and results of native kernels.

While guards are on, each call of a kernel gets copies of its arrays that lie between guard bands. A
write into a band or into an operand is recorded. Bands and results are filled with a pattern before
the call, so that values that were read outside or never written appear in the results.

A handler of XLA's FFI is a C function of a call frame. Each gets a twin, a Python function that
changes the addresses in the frame, calls the original and checks the bands. The structures are
those of xla/ffi/api/c_api.h, the same in versions 0.3 to 0.5 of the API.
"""

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from .. import native

BAND = 1 << 16  # bytes before and after each array
NAN = 0xFF  # read as a NaN in all dtypes
FINITE = 0x41  # an addition to it changes it, but not an addition to a NaN

_ALIGNMENT = 256
_ITEMSIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2}
_METADATA, _EXECUTE, _BUFFER = 1, 3, 1
_CAPTURABLE = 1  # the trait kCmdBufferCompatible
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),  # of an extension for metadata
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )

    @property
    def bytes(self) -> int:
        return math.prod(self.dims[: self.rank]) * _ITEMSIZES[self.dtype]


class _Values(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("values", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )

    def buffers(self) -> list[_Buffer]:
        return [self.values[i][0] for i in range(self.size) if self.types[i] == _BUFFER]


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", _Values),
        ("results", _Values),
    )


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Memory:
    """Memory of the host. Addresses are integers."""

    def __init__(self):
        self._blocks: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        block = ctypes.create_string_buffer(size)
        address = ctypes.addressof(block)
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def fill(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def synchronize(self) -> None:
        pass


class OutOfMemoryError(RuntimeError):
    """Error for a device without memory for the copies of arrays."""


class _CudaMemory(_Memory):
    """Memory of the current GPU, by the CUDA driver's C interface."""

    def __init__(self, library: str = "libcuda.so.1"):
        self._driver = ctypes.CDLL(library)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code == _OUT_OF_MEMORY:
            raise OutOfMemoryError(f"{name} returned error {code}")
        if code != 0:
            raise RuntimeError(f"{name} returned error {code}")

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, byte: int, size: int) -> None:
        args = ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size)
        self._call("cuMemsetD8_v2", *args)

    def copy(self, target: int, source: int, size: int) -> None:
        if size:
            args = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
            self._call("cuMemcpyDtoD_v2", *args)

    def read(self, address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        if size:
            args = content, ctypes.c_uint64(address), ctypes.c_size_t(size)
            self._call("cuMemcpyDtoH_v2", *args)
        return content.raw

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")


class _Block(NamedTuple):
    """A copy of an array between two guard bands."""

    label: str
    original: int  # address
    size: int
    start: int  # of the allocation
    data: int
    is_operand: bool
    is_result: bool

    @property
    def end(self) -> int:
        """Return the end of the allocation."""
        return self.start + self.size + 2 * BAND + _ALIGNMENT


_MEMORIES: dict[str, Callable[[], _Memory]] = {"cpu": _Memory, "cuda": _CudaMemory}
_pattern: int | None = None  # None if guards are off
_violations: list[str] = []
_memory_error: OutOfMemoryError | None = None  # of a call since guards were turned on
_kept: list[Any] = []  # C functions must outlive the program
_lock = threading.Lock()  # one call after the other, to know whose bands are overwritten


@contextlib.contextmanager
def guarded_calls() -> Iterator[None]:
    """Let programs that are traced in this context call the twins of native kernels.

    Twins cannot be captured in CUDA graphs, so programs with guards are not those without.
    """
    ffi_call = jax.ffi.ffi_call

    def call_twin(target: str, *args: Any, **options: Any) -> Any:
        return ffi_call(_register_twin(target), *args, **options)

    jax.clear_caches()  # of traced functions
    jax.ffi.ffi_call = call_twin
    try:
        yield
    finally:
        jax.ffi.ffi_call = ffi_call
        jax.clear_caches()


@functools.cache
def _register_twin(target: str) -> str:
    """Register the twin of a custom call of effjax on all of its platforms, and return its name."""
    platforms = {platform for name, platform in native.handlers if name == target}
    for platform in platforms:
        twin = wrap(native.handlers[target, platform], platform)
        native.register(f"guarded_{target}", twin, platform)
    return f"guarded_{target}" if platforms else target


@contextlib.contextmanager
def guards(pattern: int) -> Iterator[list[str]]:
    """Turn guards on. The list gets the violations; all calls must end inside of the context.

    Raises:
        OutOfMemoryError: at the end, if there was no memory for the copies, and no violation. The
            results of the calls are not valid then.
    """
    global _pattern, _memory_error
    _violations.clear()
    _pattern, _memory_error = pattern, None
    try:
        yield _violations
        if _memory_error is not None and not _violations:
            raise _memory_error
    finally:
        _pattern = None


def wrap(handler: Any, platform: str) -> Any:
    """Return a handler that checks guard bands while guards are on."""
    inner = _Handler(ctypes.cast(handler, ctypes.c_void_p).value or 0)
    memories: list[_Memory] = []  # made at the first call: the driver may be missing

    @_Handler
    def guarded(address):
        global _memory_error
        frame, pattern = _Frame.from_address(address), _pattern
        metadata = _find_metadata(frame)
        if metadata is not None:
            error = inner(address)
            metadata.traits &= ~_CAPTURABLE  # a captured call would not run this function again
            return error
        if pattern is None or frame.stage != _EXECUTE:
            return inner(address)
        with _lock:
            try:
                if not memories:
                    memories.append(_MEMORIES[platform]())
                return _call_guarded(inner, address, frame, memories[0], pattern)
            except OutOfMemoryError as error:
                _memory_error = error
            except Exception as error:
                _violations.append(f"guards failed: {error}")
            return None

    _kept.append(guarded)
    return guarded


def _find_metadata(frame: _Frame) -> _Metadata | None:
    address = frame.extension
    while address:
        extension = _Extension.from_address(address)
        if extension.type == _METADATA:
            return _Metadata.from_address(extension.metadata)
        address = extension.next
    return None


def _call_guarded(
    inner: Any, address: int, frame: _Frame, memory: _Memory, pattern: int
) -> int | None:
    memory.synchronize()
    operands, results = frame.operands.buffers(), frame.results.buffers()
    blocks: dict[int, _Block] = {}
    try:
        labels = [f"operand {i}" for i in range(len(operands))]
        labels += [f"result {i}" for i in range(len(results))]
        inputs, outputs = ({b.data for b in side if b.bytes} for side in (operands, results))
        for label, buffer in zip(labels, [*operands, *results], strict=True):
            # Buffers without elements may share an address with others.
            key = buffer.data or 0
            if key not in blocks or blocks[key].size < buffer.bytes:
                if key in blocks:
                    memory.free(blocks.pop(key).start)
                size = buffer.bytes
                start = memory.allocate(size + 2 * BAND + _ALIGNMENT)
                data = -(-(start + BAND) // _ALIGNMENT) * _ALIGNMENT
                sides = buffer.data in inputs, buffer.data in outputs
                blocks[key] = _Block(label, key, size, start, data, *sides)
        for block in blocks.values():
            memory.fill(block.start, pattern, block.end - block.start)
            if block.is_operand:
                memory.copy(block.data, block.original, block.size)
        originals = [(buffer, buffer.data) for buffer in (*operands, *results)]
        for buffer, original in originals:
            buffer.data = blocks[original or 0].data
        memory.synchronize()
        try:
            error = inner(address)
            memory.synchronize()
        finally:
            for buffer, original in originals:
                buffer.data = original
        for block in blocks.values():
            _check(block, memory, pattern)
            if block.is_result:
                memory.copy(block.original, block.data, block.size)
        memory.synchronize()
        return error
    finally:
        for block in blocks.values():
            memory.free(block.start)


def _check(block: _Block, memory: _Memory, pattern: int) -> None:
    bands = {
        "before the start": (block.start, block.data),
        "after the end": (block.data + block.size, block.end),
    }
    for where, (first, last) in bands.items():
        band = memory.read(first, last - first)
        changed = len(band) - band.count(pattern)
        if changed:
            _violations.append(f"{changed} bytes changed {where} of {block.label}")
    if block.is_operand and not block.is_result:
        before, after = (memory.read(a, block.size) for a in (block.original, block.data))
        if before != after:
            _violations.append(f"{block.label} was changed")
