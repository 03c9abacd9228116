"""CUDA kernels compiled for a CPU, where an emulator runs them thread by thread."""

import ctypes
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "effjax" / "native"


def compile_emulated(source: str, directory: pathlib.Path) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or not SOURCES.is_dir():
        pytest.skip("no g++, or a package without its C++ sources")
    path = directory / "emulated.so"
    command = [
        compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-pthread", "-DEMULATED_ARCH=900",
        f"-I{HERE / 'emulated'}", f"-I{SOURCES}", str(HERE / source), "-o", str(path),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


def shuffled_orders(library: ctypes.CDLL, count: int = 3):
    """Yield numbers of runs; blocks and threads start in another order in each of them."""
    try:
        for seed in range(count):
            library.set_order(ctypes.c_uint64(seed))
            yield seed
    finally:
        library.set_order(ctypes.c_uint64(0))


def pointers(arrays) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))


def assert_close(got, want, dtype, scale=1.0):
    """Assert equality up to the rounding of `dtype`."""
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}[dtype.name]
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    atol = scale * tolerance * np.abs(want).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=atol)
