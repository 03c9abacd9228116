"""CUDA kernels of deformable convolution without a GPU: emulated on a CPU, and compiled."""

import ctypes
import functools
import importlib.resources
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from effjax.memory import plan
from effjax.ops.deform_conv import custom_call, xla
from effjax.ops.deform_conv.reference import Geometry
from tests.native.emulation import assert_close, compile_emulated, pointers
from tests.native.read_fatbin import architectures, compressions
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive

NAMES = ("x", "offset", "mask", "row", "dcolumns", "destination", "source")
RESULTS = ("columns", "dx", "doffset", "dmask")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return compile_emulated("emulate.cc", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def emulate(emulated):
    """Return a function that runs the kernel of the requested results on NumPy arrays."""

    def run(geometry, arrays, wide=False, **results):
        x = arrays["x"]
        (n, h, w, c), (_, height, width, _) = x.shape, arrays["offset"].shape
        rows = arrays.get("dcolumns", results.get("columns")).shape[1]
        (top, _), (left, _) = geometry.padding
        sizes = (
            n, h, w, c, rows, width, geometry.taps, geometry.offset_groups, height,
            geometry.kernel_size[1], *geometry.strides, top, left, *geometry.kernel_dilation,
            arrays["mask"].size > 0,
        )  # fmt: skip
        given = [arrays.get(name) for name in NAMES] + [results.get(name) for name in RESULTS]
        emulated.emulate(
            x.dtype.name.encode(),
            (ctypes.c_int64 * 17)(*sizes),
            pointers(given),
            ctypes.c_bool(wide),
        )
        return results

    return run


GEOMETRY = Geometry((2, 2), (2, 1), ((1, 0), (0, 1)), (1, 2), 2)


@functools.cache
def make(dtype, channels, masked):
    rng = np.random.default_rng(0)
    wide = np.float64 if dtype == np.float64 else np.float32
    n, height, rows, width = 2, 4, 2, 2
    groups, taps = GEOMETRY.offset_groups, GEOMETRY.taps
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    offset = 2 * normal(n, height, width, groups * taps * 2)
    offset[0, 1, 0, :6] = [np.nan, 0, np.inf, -np.inf, 1e30, -1e30]
    offset[1, 1, 0, :4] = [-1, 0, 2, 1]
    return {
        "x": normal(n, 4, 5, channels).astype(dtype),
        "offset": offset.astype(wide),
        "mask": normal(n, height, width, groups * taps if masked else 0).astype(wide),
        "row": np.array([1], np.int32),
        "dcolumns": normal(n, rows, width, taps * channels).astype(wide),
    }


# Channels of a group: one pack of 16 bytes, several, more than one read of a warp, an odd number.
# The last column: 64-bit indices, as for large arrays.
CASES = [
    (np.float32, 48, False, False),
    (jnp.bfloat16, 6, False, True),
    exhaustive(np.float32, 8, True, False),
    exhaustive(np.float32, 264, True, True),
    exhaustive(np.float32, 10, True, False),
    exhaustive(np.float64, 12, True, True),
    exhaustive(jnp.bfloat16, 32, True, False),
    exhaustive(np.float16, 16, True, True),
    exhaustive(np.float32, 1040, False, False),
]


@pytest.mark.parametrize(("dtype", "channels", "masked", "wide"), CASES)
def test_kernels_emulated(emulate, dtype, channels, masked, wide, x64):
    emulate = functools.partial(emulate, wide=wide)
    arrays = make(dtype, channels, masked)
    x, offset, mask, row = (jnp.asarray(arrays[name]) for name in ("x", "offset", "mask", "row"))
    want = xla.columns(x, offset, mask, row, GEOMETRY, rows=arrays["dcolumns"].shape[1])
    columns = np.full_like(arrays["dcolumns"], np.nan, dtype)
    got = emulate(GEOMETRY, {k: arrays[k] for k in NAMES[:4]}, columns=columns)
    assert_close(got["columns"], want, x.dtype)

    wide = arrays["offset"].dtype
    before = [np.ones(x.shape, wide), *(np.full_like(a, 7) for a in (offset, mask))]
    want = xla.columns_backward(
        x, offset, mask, row, *map(jnp.asarray, (arrays["dcolumns"], *before)), GEOMETRY
    )
    dx, unset = before[0], dict(zip(RESULTS[2:], before[1:], strict=True))
    got = emulate(GEOMETRY, arrays, dx=dx.copy(), **{k: a.copy() for k, a in unset.items()})
    for name, value in zip(("dx", "doffset", "dmask"), want, strict=True):
        assert_close(got[name], value, np.dtype(wide))

    # The deterministic mode computes positions without dx, then dx in the order of the pixels.
    again = {name: value.copy() for name, value in unset.items()}
    emulate(GEOMETRY, arrays, **again)
    np.testing.assert_array_equal(again["doffset"], got["doffset"])
    here = offset[:, 1:3]
    destination = np.asarray(custom_call.destinations(here, row, x.shape[1:3], GEOMETRY))
    source = np.argsort(destination, axis=-1, stable=True).astype(np.int32)
    ordered = {
        "destination": np.take_along_axis(destination, source, -1),
        "source": source,
    }
    in_order = emulate(GEOMETRY, arrays | ordered, dx=dx.copy())["dx"]
    assert_close(in_order, want[0], np.dtype(wide))


def test_index_width(emulated):
    """The number of samples, and that of packs of x, must be below 2**31."""
    fits = lambda *sizes, packed=4: emulated.fits_32_bits((ctypes.c_int64 * 9)(*sizes), packed)  # noqa: E731
    assert fits(2, 100, 100, 128, 100, 100, 9, 4)
    image = 1, 2**15, 2**15
    assert fits(*image, 7, 1, 1, 1, 1) and not fits(*image, 8, 1, 1, 1, 1)
    assert fits(*image, 15, 1, 1, 1, 1, packed=8) and not fits(*image, 2, 1, 1, 1, 1, packed=1)
    assert fits(1, 1, 1, 4, 2**15 - 1, 2**15, 1, 2) and not fits(1, 1, 1, 4, 2**15, 2**15, 1, 2)
    assert not fits(*[2**60] * 8)


def test_division_by_multiplication(emulated):
    rng = np.random.default_rng(0)
    divisors = [*range(1, 300), 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1]
    divisors += rng.integers(1, 2**31, 200).tolist()
    for d in divisors:
        near = np.arange(0, 2**31, max(d, 2**31 // 50), np.int64)[:, None] // d * d + [-1, 0, 1]
        n = np.concatenate([near.ravel(), rng.integers(0, 2**31, 500), [0, 2**31 - 1]])
        n = np.ascontiguousarray(n[(n >= 0) & (n < 2**31)], np.int32)
        pointer = n.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        assert emulated.wrong_quotients(d, pointer, ctypes.c_int64(n.size)) == 0, d


def test_addresses_are_64_bit(emulate):
    """The image has more than 2**31 elements; most of its memory is never touched."""
    size, channels = 32768, 3
    geometry = Geometry((1, 1), (1, size - 1), ((0, 0), (0, 0)), (1, 1), 1)
    x, dx = (np.zeros((1, size, size, channels), dtype) for dtype in (np.float16, np.float32))
    x[0, -1, -1] = 5, 6, 7
    arrays = {
        "x": x,
        "offset": np.zeros((1, 1, 2, 2), np.float32),
        "mask": np.zeros((1, 1, 2, 0), np.float32),
        "row": np.array([size - 1], np.int32),
        "dcolumns": np.array([[[[1, 2, 3], [4, 5, 6]]]], np.float32),
    }
    columns = np.full((1, 1, 2, channels), np.nan, np.float16)
    emulate(geometry, {k: arrays[k] for k in NAMES[:4]}, columns=columns)
    np.testing.assert_array_equal(columns[0, 0], [[0, 0, 0], [5, 6, 7]])
    emulate(geometry, arrays, dx=dx, doffset=np.zeros((1, 1, 2, 2), np.float32))
    np.testing.assert_array_equal(dx[0, -1, [0, -1]], [[1, 2, 3], [4, 5, 6]])


needs_library = pytest.mark.skipif(
    not native.is_available("cuda"), reason="built without CUDA kernels"
)


@needs_library
def test_architectures_of_the_library():
    libraries = [
        library
        for version in (12, 13)
        if (library := importlib.resources.files(native) / f"libeffjax_cuda{version}.so").is_file()
    ]
    assert libraries
    for library in libraries:
        machine_code = {f"sm_{number}" for number in (80, 86, 89, 90, 100, 120)}
        assert architectures(library.read_bytes()) == machine_code | {"compute_90"}


@pytest.mark.skipif(
    not (importlib.resources.files(native) / "libeffjax_cuda12.so").is_file(),
    reason="built without kernels for CUDA 12",
)
def test_cuda_12_library_suits_its_drivers():
    """Drivers before 550 read LZ4 only, and drivers of CUDA 12 read the machine code of CUDA 12."""
    library = (importlib.resources.files(native) / "libeffjax_cuda12.so").read_bytes()
    assert compressions(library) <= {"none", "lz4"}
    assert b"release 12.9" in library and b"release 13." not in library


@pytest.mark.exhaustive
@needs_library
@needs_gpu_compiler
def test_workspace_includes_the_sort():
    """With few channels per group in half precision, four sorted corners outweigh the samples."""
    mib, image = 2**20, (1, 64, 64)
    shapes = (*image, 8), (*image, 8 * 18), (3, 3, 8, 8)
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("bfloat16", "float32", "bfloat16"), strict=True)
    ]

    def loss(*args):
        y = effjax.deform_conv2d(
            *args, padding=1, implementation="native", deterministic=True, workspace_bytes=4 * mib
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    temporaries = plan(jax.grad(loss, argnums=(0, 1, 2)), *args).device.temporaries
    # In addition to the workspace: the gradients of x and y, in float32.
    assert mib < temporaries <= 4 * mib + 2 * 4 * args[0].size


@needs_library
@needs_gpu_compiler
@pytest.mark.parametrize("deterministic", [False, True])
def test_programs_compile_for_a_gpu(deterministic):

    def loss(x, offset, weights, mask):
        y = effjax.deform_conv2d(
            x, offset, weights, mask, padding=1, implementation="native",
            deterministic=deterministic,
        )  # fmt: skip
        return jnp.sum(jnp.sin(y))

    shapes = (2, 16, 16, 8), (2, 16, 16, 18), (3, 3, 8, 4), (2, 16, 16, 9)
    planned = plan(
        jax.grad(loss, (0, 1, 2, 3)), *(jax.ShapeDtypeStruct(s, "float32") for s in shapes)
    )
    calls = re.findall(r'custom_call_target="effjax_(\w+)"', planned.hlo)
    expected = {"deform_columns", "deform_columns_backward"}
    assert set(calls) == expected | ({"deform_scatter_sorted"} if deterministic else set())
    sorted_arrays = [operands.count("%") for operands in re.findall(r" sort\((.*?)\)", planned.hlo)]
    assert set(sorted_arrays) == ({2} if deterministic else set())


@needs_library
@needs_gpu_compiler
def test_no_copies_on_a_gpu():
    """No slices of positions and masks, and no padded columns."""

    def step(x, offset, weights, mask, dy):
        def conv(*args):
            return effjax.deform_conv2d(*args, padding=1, implementation="native")

        return jax.vjp(conv, x, offset, weights, mask)[1](dy)

    image = 2, 50, 84
    shapes = (*image, 128), (*image, 18), (3, 3, 128, 128), (*image, 9), (*image, 128)
    types = "bfloat16", "float32", "bfloat16", "float32", "bfloat16"
    hlo = plan(step, *(jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True))).hlo
    assert " pad(" not in hlo and " dynamic-slice(" not in hlo
    assert re.search(r"bf16\[2,50,84,1152\]\S* custom-call", hlo)
