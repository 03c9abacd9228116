"""The native library: loading, argument checks of its handlers, and its loops under sanitizers."""

import _ctypes
import ctypes
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from effjax.ops.samplers import kernels
from tests.tiers import vary

needs_cpu = pytest.mark.skipif(
    not native.is_available("cpu"), reason="built without native kernels"
)


@pytest.fixture
def fresh():
    """Clear the cache of loaded libraries."""
    caches = native._load, native._register, native.jaxlib_version
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_status():
    """Kernels may be missing unless EFFJAX_STRICT=1, which CI sets."""
    assert set(native.status()) == {"cpu", "cuda"}
    assert not native.is_available("tpu")
    if os.environ.get("EFFJAX_STRICT") == "1":
        assert native.status()["cpu"] == native.LOADED


@pytest.fixture
def folder(fresh, monkeypatch, tmp_path):
    """Let the package look for its libraries in an empty folder."""
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    return tmp_path


LIBRARY = pathlib.Path(_ctypes.__file__).read_bytes()  # of Python


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (None, "not built"),
        (b"no library", "cannot be loaded: "),
        # Opening a truncated library could end the process.
        (b"", "cut short"),
        (LIBRARY[: len(LIBRARY) // 1000], "cut short"),
        (LIBRARY[:-1000], "cut short"),
        (LIBRARY, "built from another version of effjax"),
    ],
)
def test_libraries_that_cannot_be_used(folder, content, status):
    if content is not None:
        (folder / "libeffjax_cpu.so").write_bytes(content)
    assert native.status()["cpu"].startswith(status) and not native.is_available("cpu")
    assert native.status()["cuda"].startswith("not built")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_registration_asks_no_gpu(fresh, monkeypatch, platform):
    """Importing a module must not touch a GPU; asking for kernels does."""
    register = mock.Mock()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    monkeypatch.setattr(native, "_gpus_of", None)
    library = native._register(platform)
    if isinstance(library, str):
        pytest.skip(library)
    registered = [call.args[0] for call in register.call_args_list]
    checks = {str(check) for check in native.export_checks()}
    assert registered and all(any(target in c for c in checks) for target in registered)


@needs_cpu
@pytest.mark.parametrize(("major", "minor"), [(0, 2), (1, 9)])
def test_library_for_another_jaxlib(fresh, monkeypatch, tmp_path, major, minor):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    status = native.status()["cpu"]
    assert "XLA's FFI 0.3, but jaxlib" in status and f"has {major}.{minor}" in status


@pytest.mark.parametrize(
    ("gpus", "match"),
    [
        (native.Gpus(13000, 0, 0, 0), None),  # no driver: programs for a GPU can be planned
        (native.Gpus(13000, 13000, 2, 90), None),
        (native.Gpus(12090, 13000, 1, 80), None),
        (native.Gpus(13000, 12080, 1, 90), r"CUDA 13, .* CUDA 12\.8 .*580 or newer\), or "),
        (native.Gpus(12090, 11080, 0, 0), r"CUDA 12, .* CUDA 11\.8 .*525 or newer"),
        (native.Gpus(13000, 13000, 1, 75), r"8\.0 or more; .* 7\.5"),
    ],
)
def test_unsupported_gpus_and_drivers(gpus, match):
    problem = gpus.find_problem()
    assert problem is None if match is None else re.search(match, str(problem))


@pytest.mark.parametrize(
    ("built", "driver", "plugins", "chosen"),
    [
        ({12, 13}, 14000, {13}, 13),
        ({12, 13}, 13000, {12}, 12),
        ({12, 13}, 13000, {12, 13}, 13),
        ({12, 13}, 13000, set(), 13),
        ({12, 13}, 12080, {13}, 12),
        ({12, 13}, 11080, {12}, 12),  # is refused with a message, see above
        ({12, 13}, None, {12}, 12),  # without a driver, programs are planned
        ({12, 13}, None, set(), 13),
        ({12, 13}, "unknown", {12}, 12),
        ({12}, 13000, {13}, 12),
        ({13}, 12080, {12}, 13),
    ],
)
def test_choice_between_cuda_libraries(folder, monkeypatch, built, driver, plugins, chosen):
    def load_driver(name):
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")

        def get_version(pointer):
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents.value = driver

        functions = {} if driver == "unknown" else {"cuDriverGetVersion": get_version}
        return types.SimpleNamespace(**functions)

    for version in built:
        (folder / f"libeffjax_cuda{version}.so").touch()
    names = {f"jax_cuda{version}_plugin" for version in plugins}
    monkeypatch.setattr(ctypes, "CDLL", load_driver)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)
    with native.library_file("cuda") as path:
        assert path == folder / f"libeffjax_cuda{chosen}.so"


@pytest.mark.skipif(not native.is_available("cuda"), reason="built without CUDA kernels")
def test_kernels_are_unavailable_with_an_unsupported_driver(fresh, monkeypatch):
    monkeypatch.setattr(native, "_gpus_of", lambda _: native.Gpus(13000, 12080, 1, 90))
    assert "EFFJAX_CUDA12=1" in native.status()["cuda"] and not native.is_available("cuda")
    assert "install a newer driver" in kernels.unavailable_message("convolution", "cuda")


GEOMETRY = dict(
    kernel_h=1, kernel_w=2, stride_h=1, stride_w=1, padding_top=0, padding_left=0, dilation_h=1,
    dilation_w=1, offset_groups=1,
)  # fmt: skip
# Shapes of arguments and result, and attributes.
HANDLERS = {
    "deform_columns": (
        dict(x=(1, 3, 4, 2), offset=(1, 3, 3, 4), mask=(1, 3, 3, 2), row=(1,), y=(1, 3, 3, 4)),
        dict(geometry=GEOMETRY),
    ),
    "ms_deform_attn": (
        dict(
            value=(1, 7, 2, 3), locations=(1, 4, 2, 2, 5, 2), weights=(1, 4, 2, 2, 5),
            y=(1, 4, 2, 3),
        ),
        dict(sizes=(2, 3, 1, 1), normalized=1),
    ),
}  # fmt: skip


def call(name, dtypes=(), attributes=(), **shapes):
    """Call a handler with zeros."""
    usual_shapes, usual_attributes = HANDLERS[name]
    dtypes = dict.fromkeys(usual_shapes, np.float32) | {"row": np.int32} | dict(dtypes)
    *args, y = (np.zeros(shape, dtypes[key]) for key, shape in (usual_shapes | shapes).items())
    function = jax.ffi.ffi_call(f"effjax_{name}", jax.ShapeDtypeStruct(y.shape, args[0].dtype))
    is_list = lambda a: isinstance(a, tuple)  # noqa: E731
    values = jax.tree.map(
        lambda a: np.asarray(a, np.int64)[()], usual_attributes | dict(attributes), is_leaf=is_list
    )
    return jax.jit(lambda *args: function(*args, **values))(*args)


def columns(match, **options):
    return "deform_columns", match, options


def geometry(**changes):
    return {"geometry": GEOMETRY | changes}


def attention(match, **options):
    return "ms_deform_attn", match, options


@needs_cpu
@pytest.mark.parametrize(
    ("name", "match", "options"),
    [
        columns(r"x must be \[N, H, W, C\], not \[1, 3, 4\]", x=(1, 3, 4)),
        columns(r"offset of shape \[1, 3, 3, 5\]", offset=(1, 3, 3, 5)),
        columns(r"mask of shape \[1, 3, 3, 3\]", mask=(1, 3, 3, 3)),
        columns(r"columns of shape \[1, 3, 3, 5\]", y=(1, 3, 3, 5)),
        columns("row one number", row=(2,)),
        columns("must be float32", dtypes={"offset": jnp.bfloat16}),
        columns("must be float32, float64", dtypes={"x": np.int32}),
        columns("must be positive", attributes=geometry(stride_w=0)),
        columns(r"below 2\*\*30", attributes=geometry(kernel_h=2**62, kernel_w=4)),
        columns("9 attributes but got 10", attributes=geometry(of_another_version=1)),
        attention(r"value must be \[N, S, M, D\], not", value=(1, 7, 6)),
        attention(r"locations \[N, Q, M, L, P, 2\]", locations=(1, 4, 2, 10, 2)),
        attention("pixels of value", attributes={"sizes": (2, 3)}),
        attention("must be positive", attributes={"sizes": (2**33, 2**33, 7, 1)}),
        attention("with 1 levels", attributes={"sizes": (7, 1)}),
        attention("do not fit value", weights=(1, 4, 2, 2, 4)),
        attention(r"the result of shape \[1, 4, 2, 4\]", y=(1, 4, 2, 4)),
        attention("must be float32", dtypes={"weights": jnp.bfloat16}),
        attention("must be float32, float64", dtypes={"value": np.int32}),
        attention("expected 2 but got 3", attributes={"of_another_version": 1}),
    ],
)
def test_handler_rejects_bad_buffers(name, match, options):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        call(name, **options)


@needs_cpu
@pytest.mark.parametrize("name", HANDLERS)
def test_handler_accepts_usual_buffers(name):
    np.testing.assert_array_equal(call(name), np.zeros(HANDLERS[name][0]["y"]))


# Without optimizations, the sanitizers check the same accesses, and g++ takes a third of the time.
SANITIZERS = "-g1", "-fno-sanitize-recover=all"
SANITIZERS += ("-fsanitize=address,undefined,float-cast-overflow",)
SANITIZED = ["fuzz", "fuzz_checks", "fuzz_attention", "fuzz_roi"]


@vary(
    "name, flags",
    [("fuzz", ()), *((name, SANITIZERS) for name in SANITIZED)],
    ids=["fuzz", *(f"{name}-sanitizers" for name in SANITIZED)],
)
def test_loops(tmp_path, flags, name):
    """Results are bit-equal for every number of threads; sanitizers report nothing."""
    compiler = shutil.which("g++")
    here = pathlib.Path(__file__).parent
    sources = here.parent.parent / "effjax" / "native"
    if compiler is None or not sources.is_dir():
        pytest.skip("no g++, or a package without its C++ sources")
    program = tmp_path / "fuzz"
    command = [
        compiler, "-std=c++17", "-O0", "-pthread", *flags, f"-I{sources}", "-isystem",
        jax.ffi.include_dir(), here / f"{name}.cc", "-o", program,
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("g++ is installed without its sanitizers' libraries")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "all equal\n", run.stdout + run.stderr[-4000:]
