"""Loads the native kernels and registers them with XLA, at first use.

There are none in a package that was built without a compiler; operators then run as plain XLA.
"""

import ctypes
import functools
import re
import sys
from importlib import metadata, resources
from pathlib import Path

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


def status() -> dict[str, str]:
    """For each platform, "loaded" or why there is no native code."""
    return {platform: _load(platform) for platform in _PLATFORMS}


def available(platform: str) -> bool:
    """Whether there are native kernels for "cpu" or "cuda"."""
    return platform in _PLATFORMS and _load(platform) == LOADED


@functools.cache
def _load(platform: str) -> str:
    """Registers the custom calls of one library, once. Starts no backend."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    file = resources.files(__name__) / f"libeffjax_{platform}{suffix}"
    with resources.as_file(file) as path:
        if not path.is_file():
            return "not built: install effjax where there is a compiler (pip install -v says more)"
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return f"cannot be loaded: {error}"
    ours, theirs = _version_of(library), jaxlib_version()
    # XLA refuses a library newer than itself when a backend starts, and the backend with it.
    if ours[0] != theirs[0] or ours[1] > theirs[1]:
        return (
            f"built for XLA's FFI {ours[0]}.{ours[1]}, but jaxlib {metadata.version('jaxlib')} has "
            f"{theirs[0]}.{theirs[1]}: install a newer jaxlib, or effjax again"
        )
    symbols = _SYMBOLS | (_CUDA_SYMBOLS if platform == "cuda" else {})
    if not all(hasattr(library, symbol) for symbol in symbols.values()):
        return "built from another version of effjax: install effjax again"
    for target, symbol in symbols.items():
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, handler, platform=_PLATFORMS[platform])
    return LOADED


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
