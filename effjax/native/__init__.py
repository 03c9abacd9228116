"""Loader of the native kernels. Importing it registers them with XLA.

A process that runs exported programs needs this import only. No backend starts, and no GPU is
asked. Without a compiler, the package is built without kernels, and the operators run as plain XLA.
"""

import contextlib
import ctypes
import functools
import importlib.util
import re
import struct
import sys
from contextlib import AbstractContextManager
from importlib import metadata, resources
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jax.export

Choice = Literal["cuda", "xla", "validated"]

_choice: Choice | None = None  # of `set_default`

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
_CUDA_SYMBOLS = {
    "effjax_deform_scatter_sorted": "EffjaxDeformScatterSorted",
    "effjax_ms_deform_attn_scatter_sorted": "EffjaxMsDeformAttnScatterSorted",
    "effjax_roi_pool_backward_deterministic": "EffjaxRoiPoolBackwardDeterministic",
}
_PLAIN = {"cpu": [], "cuda": ["effjax_cuda_devices"]}
_DRIVERS = {12: 525, 13: 580}  # NVIDIA's first driver for a major version of CUDA


__all__ = ["export_checks", "set_default", "status"]


def __dir__() -> list[str]:
    return __all__


def status() -> dict[str, str]:
    """Return "loaded" for each platform, or the reason why its kernels are unavailable."""
    return {platform: _load(platform) for platform in _PLATFORMS}


def is_available(platform: str) -> bool:
    """Return True if the native kernels of `platform` ("cpu" or "cuda") are loaded."""
    return platform in _PLATFORMS and _load(platform) == LOADED


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the `disabled_checks` with which `jax.export.export` accepts the native kernels.

    JAX promises compatibility of its own custom calls only. Those of effjax keep their names and
    arguments within a minor version: run a program with the version that exported it.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _SYMBOLS | _CUDA_SYMBOLS]


def set_default(choice: Choice) -> None:
    """Set what ``implementation=None`` means on GPUs, in place of the variable `EFFJAX_CUDA`.

    Call it before the first operator is traced, in all processes of a job: compiled programs stay
    as they are.

    Args:
        choice: "validated", the default, for the kernels that `effjax doctor --gpu` found correct
            and faster than XLA on this model of GPU, and XLA for all others and in a job of several
            processes; "cuda" for all CUDA kernels (`EFFJAX_CUDA=on`); "xla" for none
            (`EFFJAX_CUDA=off`).

    Raises:
        ValueError: for another choice.
    """
    global _choice
    if choice not in get_args(Choice):
        raise ValueError(f'`choice` (={choice!r}) must be "cuda", "xla" or "validated".')
    _choice = choice


def default_choice() -> Choice | None:
    """Return the choice of `set_default`, or None before its first call."""
    return _choice


class Gpus(NamedTuple):
    """Versions and devices found by the CUDA library; versions are 1000 * major + 10 * minor."""

    built: int  # version of CUDA that the library was built with
    driver: int  # newest version that the driver supports; 0 without a driver
    count: int
    newest: int  # compute capability of the newest GPU, 10 * major + minor

    def find_problem(self) -> str | None:
        """Return the reason why the kernels cannot run on these GPUs, or None."""
        # Without GPUs the result is None, because programs can still be compiled and planned.
        major, minor = self.built // 1000, self.driver % 1000 // 10
        if self.driver and self.driver // 1000 < major:
            needed = f" ({_DRIVERS[major]} or newer)" if major in _DRIVERS else ""
            older = ", or build effjax for CUDA 12, too (EFFJAX_CUDA12=1 pip install .)"
            return (
                f"built with CUDA {major}, but NVIDIA's driver here runs CUDA "
                f"{self.driver // 1000}.{minor} at most: install a newer driver{needed}"
                f"{older if self.driver // 1000 == 12 else ''}"
            )
        if self.count and self.newest < 80:
            return (
                "built for GPUs of compute capability 8.0 or more; the newest here has "
                f"{self.newest // 10}.{self.newest % 10}"
            )
        return None


def gpus() -> Gpus | None:
    """Return the GPUs for the CUDA kernels; None if the library is missing or cannot be loaded."""
    try:
        with library_file("cuda") as path:
            return _gpus_of(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        return None


def _gpus_of(library: ctypes.CDLL) -> Gpus:
    numbers = [ctypes.c_int32() for _ in Gpus._fields]
    library.effjax_cuda_devices(*map(ctypes.byref, numbers))
    return Gpus(*(number.value for number in numbers))


def library_file(platform: str) -> AbstractContextManager[Path]:
    """Return a context with the path of a library, which need not exist."""
    return resources.as_file(_file(platform))


def _file(platform: str):
    folder = resources.files(__name__)
    if platform == "cuda":
        built = {v for v in _DRIVERS if (folder / f"libeffjax_cuda{v}.so").is_file()}
        if len(built) > 1:
            built = {_choose_cuda(built, _driver_cuda(), _plugin_versions())}
        return folder / f"libeffjax_cuda{max(built or _DRIVERS)}.so"
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return folder / f"libeffjax_{platform}{suffix}"


def _choose_cuda(built: set[int], driver: int, plugins: set[int]) -> int:
    """Return the major version of CUDA whose library to load.

    All are major versions: those of the libraries, the newest one of the driver or 0 without a
    driver, and those of JAX's installed plugins.
    """
    usable = {version for version in built if not driver or version <= driver}
    if not usable:  # the driver is too old for all, and the message about the oldest asks for least
        return min(built)
    return max(usable & plugins or usable)


def _driver_cuda() -> int:
    """Return the newest major version of CUDA that NVIDIA's driver supports; 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def _plugin_versions() -> set[int]:
    return {v for v in _DRIVERS if importlib.util.find_spec(f"jax_cuda{v}_plugin")}


@functools.cache
def _load(platform: str) -> str:
    """Return "loaded", or the reason why the kernels of a platform are unavailable."""
    library = _register(platform)
    if isinstance(library, str):
        return library
    return (platform == "cuda" and _gpus_of(library).find_problem()) or LOADED


@functools.cache
def _register(platform: str) -> ctypes.CDLL | str:
    """Register the custom calls of a library once, and return it, or the reason why not."""
    with library_file(platform) as path:
        if not path.is_file():
            return "not built: install effjax with a compiler (pip install -v shows details)"
        if not _is_complete(path):  # reading a missing part would kill the process
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
    for target, symbol in symbols.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, capsule, platform=_PLATFORMS[platform])
    return library


def _is_complete(path: Path) -> bool:
    """Return True unless an ELF file lacks its last part, the section headers.

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
    """Return the version of XLA's FFI in the headers of the installed jaxlib."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    version = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(version["MAJOR"]), int(version["MINOR"])


for _platform in _PLATFORMS:
    _register(_platform)
