"""The native library: loading, argument checks of its handlers, and its loops under sanitizers."""

import _ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from effjax.ops._common import dispatch

SOURCES = pathlib.Path(native.__file__).parent
needs_cpu = pytest.mark.skipif(
    not native.is_available("cpu"), reason="built without native kernels"
)


@pytest.fixture
def fresh():
    """Clear the cache of loaded libraries."""
    native._load.cache_clear()
    native.jaxlib_version.cache_clear()
    yield
    native._load.cache_clear()
    native.jaxlib_version.cache_clear()


def test_strict_builds_have_kernels():
    if os.environ.get("EFFJAX_STRICT") != "1":
        pytest.skip("kernels may be missing unless EFFJAX_STRICT=1, which CI sets")
    assert native.status()["cpu"] == native.LOADED


def test_status():
    assert set(native.status()) == {"cpu", "cuda"}
    assert not native.is_available("tpu")


def test_missing_library(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    assert native.status()["cpu"].startswith("not built")
    assert not native.is_available("cpu")


def test_unloadable_library(fresh, monkeypatch, tmp_path):
    (tmp_path / "libeffjax_cpu.so").write_text("no library")
    (tmp_path / "libeffjax_cpu.dylib").write_text("no library")
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    assert native.status()["cpu"].startswith("cannot be loaded: ")


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
def test_truncated_library(fresh, monkeypatch, tmp_path, share):
    """Opening a truncated library could end the process."""
    content = pathlib.Path(_ctypes.__file__).read_bytes()
    (tmp_path / "libeffjax_cpu.so").write_bytes(content[: int(len(content) * share)])
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(native.ctypes, "CDLL", None)
    assert native.status()["cpu"] == "cut short: install effjax again"


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
def test_foreign_library(fresh, monkeypatch, tmp_path):
    shutil.copy(_ctypes.__file__, tmp_path / "libeffjax_cpu.so")
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    assert native.status()["cpu"] == "built from another version of effjax: install effjax again"


@needs_cpu
def test_library_for_a_newer_jaxlib(fresh, monkeypatch):
    monkeypatch.setattr(native, "jaxlib_version", lambda: (0, 2))
    assert "built for XLA's FFI 0.3, but jaxlib" in native.status()["cpu"]
    monkeypatch.setattr(native, "jaxlib_version", lambda: (1, 9))
    assert native._load.__wrapped__("cpu") != native.LOADED


@pytest.mark.parametrize(
    ("gpus", "match"),
    [
        (native.Gpus(13000, 0, 0, 0), None),  # no driver: programs for a GPU can be planned
        (native.Gpus(13000, 13010, 0, 0), None),
        (native.Gpus(13000, 13000, 2, 90), None),
        (native.Gpus(12090, 13000, 1, 80), None),
        (native.Gpus(13000, 12080, 1, 90), r"CUDA 13, .* runs CUDA 12\.8 .* \(580 or newer\), or "),
        (native.Gpus(12090, 11080, 0, 0), r"built with CUDA 12, .* CUDA 11\.8 .* \(525 or newer"),
        (native.Gpus(13000, 13000, 1, 75), r"compute capability 8\.0 or more; .* has 7\.5"),
    ],
)
def test_unsupported_gpus_and_drivers(gpus, match):
    problem = gpus.find_problem()
    assert problem is None if match is None else re.search(match, str(problem))


@pytest.mark.parametrize(
    ("driver", "plugins", "both", "only_12", "only_13"),
    [
        (13, {13}, 13, 12, 13),
        (14, {13}, 13, 12, 13),
        (13, {12}, 12, 12, 13),
        (13, {12, 13}, 13, 12, 13),
        (13, set(), 13, 12, 13),
        (12, {12}, 12, 12, 13),  # the last is refused with a message, see above
        (12, {13}, 12, 12, 13),
        (11, {12}, 12, 12, 13),
        (0, {12}, 12, 12, 13),  # without a driver, programs are planned
        (0, set(), 13, 12, 13),
    ],
)
def test_choice_of_the_cuda_library(monkeypatch, tmp_path, driver, plugins, both, only_12, only_13):
    monkeypatch.setattr(native, "_driver_cuda", lambda: driver)
    monkeypatch.setattr(native, "_plugin_versions", lambda: plugins)
    for files, expected in [((12, 13), both), ((12,), only_12), ((13,), only_13)]:
        folder = tmp_path / str(files)
        folder.mkdir()
        for version in files:
            (folder / f"libeffjax_cuda{version}.so").touch()
        monkeypatch.setattr(native.resources, "files", lambda _, folder=folder: folder)
        with native.library_file("cuda") as path:
            assert path == folder / f"libeffjax_cuda{expected}.so"


def test_no_cuda_library(fresh, monkeypatch, tmp_path):
    (tmp_path / "libeffjax_cpu.so").touch()
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    assert native.status()["cuda"].startswith("not built")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("int cuDriverGetVersion(int* version) { *version = 12080; return 0; }", 12),
        ("int another_function;", 0),
        (None, 0),
    ],
)
def test_version_of_the_driver(monkeypatch, tmp_path, source, expected):
    if source is not None:
        (tmp_path / "driver.c").write_text(source)
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("no gcc")
        command = [compiler, "-shared", tmp_path / "driver.c", "-o", tmp_path / "libcuda.so.1"]
        subprocess.run(command, check=True)
    load = native.ctypes.CDLL
    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: load(str(tmp_path / name)))
    assert native._driver_cuda() == expected


@pytest.mark.skipif(not native.is_available("cuda"), reason="built without CUDA kernels")
def test_unsupported_driver_registers_nothing(fresh, monkeypatch):
    monkeypatch.setattr(native, "_gpus_of", lambda _: native.Gpus(13000, 12080, 1, 90))
    assert "EFFJAX_CUDA12=1" in native.status()["cuda"]
    registered = set()
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda *_, platform: registered.add(platform)
    )
    assert native.status()["cuda"].startswith("built with CUDA 13, but NVIDIA's driver")
    assert "install a newer driver" in dispatch.unavailable_message("convolution", "cuda")
    assert "CUDA" not in registered


def test_jaxlib_version():
    major, minor = native.jaxlib_version()
    assert (major, minor) >= (0, 3)


GEOMETRY = dict(
    kernel_h=1, kernel_w=2, stride_h=1, stride_w=1, padding_top=0, padding_left=0, dilation_h=1,
    dilation_w=1, offset_groups=1,
)  # fmt: skip
SHAPES = dict(x=(1, 3, 4, 2), offset=(1, 3, 3, 4), mask=(1, 3, 3, 2), row=(1,))
COLUMNS = (1, 3, 3, 4)


def call(columns=COLUMNS, dtypes=(), attributes=(), **shapes):
    dtype = {"x": np.float32, "offset": np.float32, "mask": np.float32, "row": np.int32}
    dtype |= dict(dtypes)
    arrays = [jnp.zeros(shape, dtype[name]) for name, shape in (SHAPES | shapes).items()]
    fn = jax.ffi.ffi_call("effjax_deform_columns", jax.ShapeDtypeStruct(columns, dtype["x"]))
    values = GEOMETRY | dict(attributes)
    geometry = {name: np.int64(value) for name, value in values.items()}
    return jax.jit(lambda *a: fn(*a, geometry=geometry))(*arrays)


@needs_cpu
@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"x must be \[N, H, W, C\], not \[1, 3, 4\]", {"x": (1, 3, 4)}),
        (r"offset of shape \[1, 3, 3, 5\] does not fit", {"offset": (1, 3, 3, 5)}),
        (r"mask of shape \[1, 3, 3, 3\] does not fit", {"mask": (1, 3, 3, 3)}),
        (r"columns of shape \[1, 3, 3, 5\] do not fit", {"columns": (1, 3, 3, 5)}),
        ("row one number", {"row": (2,)}),
        ("offset and mask must be float32", {"dtypes": {"offset": jnp.bfloat16}}),
        ("must be positive", {"attributes": {"stride_w": 0}}),
        ("must be float32, float64, bfloat16 or float16", {"dtypes": {"x": np.int32}}),
        (r"must be below 2\*\*30", {"attributes": {"kernel_h": 2**62, "kernel_w": 4}}),
        ("expected 9 attributes but got 10", {"attributes": {"of_another_version": 1}}),
    ],
)
def test_handler_rejects_bad_buffers(match, options):
    assert native.is_available("cpu")
    np.testing.assert_array_equal(call(), np.zeros(COLUMNS))
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        call(**options)


# Without optimizations, the sanitizers check the same accesses, and g++ takes a third of the time.
SANITIZERS = "-g1", "-fno-sanitize-recover=all"
SANITIZERS += ("-fsanitize=address,undefined,float-cast-overflow",)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param("fuzz", [], id="fuzz"),
        *(
            pytest.param(name, SANITIZERS, marks=pytest.mark.exhaustive, id=f"{name}-sanitizers")
            for name in ("fuzz", "fuzz_checks", "fuzz_attention", "fuzz_roi")
        ),
    ],
)
def test_loops(tmp_path, flags, name):
    """Results are bit-equal for every number of threads; sanitizers report nothing."""
    compiler = shutil.which("g++")
    sources = pathlib.Path(__file__).parent.parent.parent / "effjax" / "native"
    if compiler is None or not sources.is_dir():
        pytest.skip("no g++, or a package without its C++ sources")
    program = tmp_path / "fuzz"
    source = pathlib.Path(__file__).parent / f"{name}.cc"
    command = [
        compiler, "-std=c++17", "-O0", "-pthread", *flags, f"-I{sources}", "-isystem",
        jax.ffi.include_dir(), source, "-o", program,
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("g++ is installed without its sanitizers' libraries")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "all equal\n", run.stdout + run.stderr[-4000:]
