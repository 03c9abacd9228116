"""Loads the native kernels and registers them with XLA, at first use.

There are none in a package that was built without a compiler; operators then run as plain XLA.
"""

import ctypes
import functools
import re
import struct
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import NamedTuple

import jax

LOADED = "loaded"

# XLA's name of each platform, and the symbol of each custom call.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
_SYMBOLS = {
    "effjax_deform_columns": "EffjaxDeformColumns",
    "effjax_deform_columns_backward": "EffjaxDeformColumnsBackward",
    "effjax_ms_deform_attn": "EffjaxMsDeformAttn",
    "effjax_ms_deform_attn_backward": "EffjaxMsDeformAttnBackward",
    "effjax_roi_pool": "EffjaxRoiPool",
    "effjax_roi_pool_backward": "EffjaxRoiPoolBackward",
}
_CUDA_SYMBOLS = {"effjax_deform_scatter_sorted": "EffjaxDeformScatterSorted"}
_PLAIN = {"cpu": [], "cuda": ["effjax_cuda_devices"]}
_DRIVERS = {12: 525, 13: 580}  # NVIDIA's first driver for a major version of CUDA


def status() -> dict[str, str]:
    """For each platform, "loaded" or why there is no native code."""
    return {platform: _load(platform) for platform in _PLATFORMS}


def is_available(platform: str) -> bool:
    """Whether there are native kernels for "cpu" or "cuda"."""
    return platform in _PLATFORMS and _load(platform) == LOADED


class Gpus(NamedTuple):
    """What a library of CUDA kernels finds: versions of CUDA are 1000 * major + 10 * minor."""

    built: int  # the CUDA that the library was built with
    driver: int  # the newest that the driver runs; 0 where there is none
    count: int
    newest: int  # compute capability of the newest GPU, 10 * major + minor

    def trouble(self) -> str | None:
        """Why the kernels cannot run on the GPUs that are here. None where there are none either:
        programs for a GPU can then be compiled, and planned.
        """
        major, minor = self.built // 1000, self.driver % 1000 // 10
        if self.driver and self.driver // 1000 < major:
            needed = f" ({_DRIVERS[major]} or newer)" if major in _DRIVERS else ""
            return (
                f"built with CUDA {major}, but NVIDIA's driver here runs CUDA "
                f"{self.driver // 1000}.{minor} at most: install a newer driver{needed}, or build "
                "effjax with an older nvcc (CUDACXX=/usr/local/cuda-12/bin/nvcc pip install .)"
            )
        if self.count and self.newest < 80:
            return (
                "built for GPUs of compute capability 8.0 or more; the newest here has "
                f"{self.newest // 10}.{self.newest % 10}"
            )
        return None


def gpus() -> Gpus | None:
    """What the CUDA kernels could run on; None where they are not built, or cannot be loaded."""
    try:
        with resources.as_file(_file("cuda")) as path:
            return _gpus_of(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        return None


def _gpus_of(library: ctypes.CDLL) -> Gpus:
    numbers = [ctypes.c_int32() for _ in Gpus._fields]
    library.effjax_cuda_devices(*map(ctypes.byref, numbers))
    return Gpus(*(number.value for number in numbers))


def _file(platform: str):
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return resources.files(__name__) / f"libeffjax_{platform}{suffix}"


@functools.cache
def _load(platform: str) -> str:
    """Registers the custom calls of one library, once. Starts no backend."""
    with resources.as_file(_file(platform)) as path:
        if not path.is_file():
            return "not built: install effjax where there is a compiler (pip install -v says more)"
        if not _is_whole(path):  # the process would end where a part that lacks is read
            return "cut short: install effjax again"
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return f"cannot be loaded: {error}"
    if not hasattr(library, "effjax_ffi_api_version"):
        return "built from another version of effjax: install effjax again"
    ours, theirs = _version_of(library), jaxlib_version()
    # XLA refuses a library newer than itself when a backend starts, and the backend with it.
    if ours[0] != theirs[0] or ours[1] > theirs[1]:
        return (
            f"built for XLA's FFI {ours[0]}.{ours[1]}, but jaxlib {metadata.version('jaxlib')} has "
            f"{theirs[0]}.{theirs[1]}: install a newer jaxlib, or effjax again"
        )
    symbols = _SYMBOLS | (_CUDA_SYMBOLS if platform == "cuda" else {})
    if not all(hasattr(library, symbol) for symbol in [*symbols.values(), *_PLAIN[platform]]):
        return "built from another version of effjax: install effjax again"
    if platform == "cuda" and (trouble := _gpus_of(library).trouble()):
        return trouble
    for target, symbol in symbols.items():
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, handler, platform=_PLATFORMS[platform])
    return LOADED


def _is_whole(path: Path) -> bool:
    """Whether an ELF file has its last part, the table of its sections; of others nothing is known.

    References:
        System V ABI, "ELF Header": e_shoff, e_shentsize and e_shnum of a 64-bit file.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return header[:4] != b"\x7fELF"[: len(header)]
    if len(header) < 64:
        return False
    (start,) = struct.unpack_from("=Q", header, 40)
    size, count = struct.unpack_from("=HH", header, 58)
    return start + size * count <= path.stat().st_size


def _version_of(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int32(), ctypes.c_int32()
    library.effjax_ffi_api_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def jaxlib_version() -> tuple[int, int]:
    """The version of XLA's FFI that the installed jaxlib has, as its headers say."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])
