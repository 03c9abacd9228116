"""The operators' CUDA kernels without a GPU: emulated on a CPU, and compiled."""

import ctypes
import functools
import importlib.resources
import math
import re
import struct
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from effjax.memory import plan
from effjax.memory.compiler import process
from effjax.native import defaults
from effjax.ops.samplers.deform_attention import native as attention
from effjax.ops.samplers.deform_attention import reference
from tests.native import emulation
from tests.native.emulation import ATTENTION, CONV, ROI
from tests.programs import needs_gpu_compiler
from tests.tiers import vary


@pytest.fixture(
    scope="module", params=[CONV, ATTENTION, ROI], ids=["deform_conv", "attention", "roi"]
)
def operator(request, tmp_path_factory):
    """Compile the kernels of an operator."""
    return request.param.compile(tmp_path_factory.mktemp("emulated"))


def only(operator):
    return pytest.mark.parametrize("operator", [operator], ids=[""], indirect=True)


def assert_close(got, want, dtype, scale):
    """Assert equality up to the rounding of `dtype`."""
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}[dtype.name]
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    atol = scale * tolerance * np.abs(want).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=atol)


# Channels of a group: one pack of 16 bytes, several, more than one read of a warp, odd numbers.
@vary(
    "dtype, channels, option",
    [
        (np.float32, 24, 0),
        (jnp.bfloat16, 5, 1),
        (np.float32, 520, 0),
        (np.float64, 6, 2),
        (np.float16, 8, 2),
    ],
)
def test_results_and_gradients(operator, dtype, channels, option, x64):
    """They are those of the reference in float64, with and without atomic additions."""
    case = operator.make(dtype, channels, **operator.options[option])
    y, *want = case.want()
    (got,) = operator.run(case, *case.results(False).keys() - set(operator.gradients)).values()
    assert_close(got, y, got.dtype, scale=1)

    first, *others = operator.gradients
    atomic = operator.run(case, *operator.gradients)
    # The deterministic mode computes positions without the gradient of the image, then that alone.
    in_order = operator.run(case, first, in_order=True)
    if others := [name for name in others if name in atomic]:
        for name, gradient in operator.run(case, *others).items():
            np.testing.assert_array_equal(gradient, atomic[name])
    for got in (atomic, in_order):
        for name, gradient in zip(operator.gradients, want, strict=True):
            if name in got:
                assert_close(got[name], gradient, got[name].dtype, scale=4)


def test_emulator_finds_accesses_outside_of_arrays(operator):
    """The kernel gets arrays without their last image."""
    case = operator.make(np.float32, 8)
    (name,) = case.results(False).keys() - set(operator.gradients)
    y, image = case.results(False)[name], operator.arrays[0]
    with pytest.raises(AssertionError, match=f"a write outside of {name}"):
        operator.call(case.sizes, case.args | {name: y[:-1]})
    operator.call(case.sizes, case.args | {name: y, image: case.args[image][:-1]})
    assert np.isnan(y[-1]).any() and np.isfinite(y[:-1]).all()


def test_bits_do_not_depend_on_the_order_of_threads(operator):
    """Other than with atomic additions, whose order does show: many samples share each pixel."""
    case = operator.make(np.float32, **operator.crowded)
    first, *others = operator.gradients
    atomic, positions, in_order = set(), set(), set()
    for _ in operator.shuffle_threads():
        results = operator.run(case, *operator.gradients)
        atomic.add(results[first].tobytes())
        positions.add(b"".join(results[name].tobytes() for name in others))
        dx = operator.run(case, first, in_order=True)[first]
        in_order.add(dx.tobytes())
    assert len(in_order) == len(positions) == 1 < len(atomic)
    assert_close(dx, results[first], dx.dtype, scale=1)


def test_addresses_are_64_bit(operator):
    """The image has more than 2**31 elements, most of whose memory is never touched."""
    x = np.zeros((1, 32768, 32768, 3), np.float16)
    x[0, -1, -1] = 5, 6, 7
    case = operator.make_far(x)
    weight = case.args.get("weights", case.args.get("mask", np.ones(1))).item()
    (y,) = operator.run(case, *case.results(False).keys() - set(operator.gradients)).values()
    np.testing.assert_array_equal(y.ravel(), weight * np.array([5, 6, 7]))
    first = operator.gradients[0]
    gradients = [operator.run(case, *operator.gradients)[first]]
    if not operator.visits_pixels:
        gradients.append(operator.run(case, first, in_order=True)[first])
    for dx in gradients:
        np.testing.assert_array_equal(dx.reshape(-1, 3)[-1], weight * np.array([1, 2, 3]))


@only(CONV)
def test_index_width(operator):
    """The number of samples, and that of packs of x, must be below 2**31."""
    fits_32_bits = operator.library.fits_32_bits
    fits = lambda *sizes, packed=4: fits_32_bits((ctypes.c_int64 * 9)(*sizes), packed)  # noqa: E731
    assert fits(2, 100, 100, 128, 100, 100, 9, 4)
    image = 1, 2**15, 2**15
    assert fits(*image, 7, 1, 1, 1, 1) and not fits(*image, 8, 1, 1, 1, 1)
    assert fits(*image, 15, 1, 1, 1, 1, packed=8) and not fits(*image, 2, 1, 1, 1, 1, packed=1)
    assert fits(1, 1, 1, 4, 2**15 - 1, 2**15, 1, 2) and not fits(1, 1, 1, 4, 2**15, 2**15, 1, 2)
    assert not fits(*[2**60] * 8)


@only(CONV)
def test_division_by_multiplication(operator):
    rng = np.random.default_rng(0)
    divisors = [*range(1, 300), 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1]
    divisors += rng.integers(1, 2**31, 200).tolist()
    for d in divisors:
        near = np.arange(0, 2**31, max(d, 2**31 // 50), np.int64)[:, None] // d * d + [-1, 0, 1]
        n = np.concatenate([near.ravel(), rng.integers(0, 2**31, 500), [0, 2**31 - 1]])
        n = np.ascontiguousarray(n[(n >= 0) & (n < 2**31)], np.int32)
        pointer = n.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        assert operator.library.wrong_quotients(d, pointer, ctypes.c_int64(n.size)) == 0, d


@only(ATTENTION)
def test_deterministic_gradients_in_slices(operator, monkeypatch):
    """Five queries in slices of two, of which the last one is padded."""
    levels = reference.Levels(((3, 4), (2, 2)), True)
    case = operator.make(np.float32, 4, shapes=levels.shapes, points=3, queries=5)
    names = operator.arrays[:6]
    calls = []

    def ffi_call(target, results, **_):
        is_scatter = target.endswith("_scatter_sorted")

        def run(*args):
            calls.append(target)
            args = list(map(np.array, args))
            if is_scatter:
                *args, dvalue = args
                given = dict(zip(names[1:], args, strict=True))
                slices = {name: given[name] for name in ("locations", "weights", "dy")}
                sizes = emulation.call_attention(levels, case.args | slices).sizes
                operator.call(sizes, {**case.args, **given, "dvalue": dvalue}, in_order=True)
                return dvalue
            assert not results[0].size
            gradients = operator.run(case, "dlocations", "dweights")
            return np.zeros(results[0].shape, np.float32), *gradients.values()

        return lambda *args, **_: jax.pure_callback(run, results, *args)

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    options: Any = dict(levels=levels, chunk_bytes=2 * 2 * 6 * 80 * 2)
    sliced, plain = (
        jax.jit(functools.partial(backward, **options))
        for backward in (attention.sorted_attend_backward, reference.attend_backward)
    )
    got = jax.block_until_ready(sliced(*case.args.values()))
    assert len(calls) == 1 + 3
    for gradient, want in zip(got, plain(*case.args.values()), strict=True):
        assert_close(gradient, want, gradient.dtype, scale=1)


@only(ATTENTION)
def test_weights_of_positions_that_are_rounded_differently(operator):
    """A program may sort a sample by another pixel than the kernel: a rounding error apart."""
    levels = reference.Levels(((2, 4),), False)
    case = operator.make(np.float32, 4, False, 1, shapes=levels.shapes, n=1, queries=1, heads=1)
    case.args["locations"][...] = 2, 0.25
    below = jnp.nextafter(case.args["locations"], np.float32(0))
    sorted_below = emulation.sort_corners(attention.destinations(below, levels), 4)
    case.sorted = lambda: sorted_below
    dvalue = operator.run(case, "dvalue", in_order=True)["dvalue"]
    want = operator.run(case, *operator.gradients)["dvalue"]
    np.testing.assert_allclose(dvalue, want, rtol=0, atol=1e-6)


needs_library = pytest.mark.skipif(
    not native.is_available("cuda"), reason="built without CUDA kernels"
)


def cuda_code(library: bytes) -> set[tuple[str, str]]:
    """Return the architecture, such as "sm_90", and the compression of each piece of code."""
    kinds = {1: "compute", 2: "sm"}
    compressions = {0: "none", 0x2000: "lz4", 0x8000: "zstd"}  # bits of an entry's flags
    result = set()
    for magic in re.finditer(rb"\x50\xed\x55\xba", library):
        # A fat binary is a header, then entries of machine code or PTX.
        header, size = struct.unpack_from("<HQ", library, magic.start() + 6)
        at, end = magic.start() + header, magic.start() + header + size
        while at + 48 <= end:
            kind, entry_header, entry_size = struct.unpack_from("<H2xIQ", library, at)
            if kind not in kinds or entry_header < 32:
                break
            architecture, flags = struct.unpack_from("<I8xQ", library, at + 28)
            result.add((f"{kinds[kind]}_{architecture}", compressions.get(flags & 0xA000, "other")))
            at += entry_header + entry_size
    return result


@pytest.mark.parametrize("version", [12, 13])
def test_code_in_the_library(version):
    """Drivers before 550 read LZ4 only, and drivers of CUDA 12 read the machine code of CUDA 12."""
    path = importlib.resources.files(native) / f"libeffjax_cuda{version}.so"
    if not path.is_file():
        pytest.skip(f"built without kernels for CUDA {version}")
    library = path.read_bytes()
    architectures, compressions = map(set, zip(*cuda_code(library), strict=True))
    machine_code = {f"sm_{number}" for number in (80, 86, 89, 90, 100, 120)}
    assert architectures == machine_code | {"compute_90"}
    if version == 12:
        assert compressions <= {"none", "lz4"}
        assert b"release 12.9" in library and b"release 13." not in library


def convolve(x, offset, kernel, mask, **options):
    return effjax.deform_conv2d(x, offset, kernel, mask, padding=1, **options)


def attend(value, locations, weights, **options):
    return effjax.ms_deform_attn(value, ((8, 8), (4, 4)), locations, weights, **options)


def aggregate(x, offset, mask, **options):
    return effjax.dcn_aggregate(x, offset, mask, padding=1, **options)


def pool(x, offset, boxes, **options):
    return effjax.deform_roi_pool(x, boxes, offset, output_size=2, sampling_ratio=2, **options)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


POINTS = 2, 500, 2, 2, 4  # images, queries, heads, levels and points
# Arguments, number of those with a gradient, and kernels with atomic additions and without.
CONVOLVE = {"deform_columns", "deform_columns_backward"}
ATTEND = {"ms_deform_attn", "ms_deform_attn_backward"}
PROGRAMS = {
    convolve: (
        [shape(2, 16, 16, 8), shape(2, 16, 16, 18), shape(3, 3, 8, 4), shape(2, 16, 16, 9)], 4,
        CONVOLVE, CONVOLVE | {"deform_scatter_sorted"},
    ),
    attend: (
        [shape(2, 80, 2, 32), shape(*POINTS, 2), shape(*POINTS)], 3,
        ATTEND, ATTEND | {"ms_deform_attn_scatter_sorted"},
    ),
    aggregate: (
        [shape(2, 8, 8, 32), shape(2, 8, 8, 36), shape(2, 8, 8, 18)], 3,
        ATTEND, ATTEND | {"ms_deform_attn_scatter_sorted"},
    ),
    pool: (
        [shape(2, 16, 16, 8), shape(2, 5, 2, 2, 2), shape(2, 5, 4)], 2,
        {"roi_pool", "roi_pool_backward"}, {"roi_pool", "roi_pool_backward_deterministic"},
    ),
}  # fmt: skip


@needs_library
@needs_gpu_compiler
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("deterministic", [False, True])
def test_programs_compile_for_a_gpu(function, deterministic):
    args, differentiated, atomic, in_order = PROGRAMS[function]
    chunk_bytes = 10**5
    options: Any = dict(implementation="native", deterministic=deterministic)
    if function is attend:
        options["chunk_bytes"] = chunk_bytes

    def loss(*args):
        return jnp.sum(jnp.sin(function(*args, **options)))

    planned = plan(jax.grad(loss, range(differentiated)), *args)
    calls = set(re.findall(r'custom_call_target="effjax_(\w+)"', planned.hlo))
    assert calls == (in_order if deterministic else atomic)
    assert planned.step_time.flops["f32_highest"] and not planned.step_time.unknown_kernels
    sorted_arrays = [operands.count("%") for operands in re.findall(r" sort\((.*?)\)", planned.hlo)]
    assert set(sorted_arrays) == ({2} if deterministic and function is not pool else set())
    if function is attend:
        # No array of samples. Sorted corners fit into the workspace.
        samples_bytes = 4 * math.prod(POINTS) * args[0].shape[-1]
        limit = samples_bytes / 4 + deterministic * chunk_bytes
        assert planned.device.temporaries < limit


@pytest.mark.exhaustive
@needs_library
@needs_gpu_compiler
def test_workspace_includes_the_sort():
    """With few channels per group in half precision, four sorted corners outweigh the samples."""
    mib, image = 2**20, (1, 64, 64)
    args = (
        shape(*image, 8, dtype="bfloat16"), shape(*image, 8 * 18),
        shape(3, 3, 8, 8, dtype="bfloat16"),
    )  # fmt: skip

    def loss(*args):
        y = effjax.deform_conv2d(
            *args, padding=1, implementation="native", deterministic=True, chunk_bytes=4 * mib
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    temporaries = plan(jax.grad(loss, argnums=(0, 1, 2)), *args).device.temporaries
    # In addition to the workspace: the gradients of x and y, in float32.
    assert mib < temporaries <= 4 * mib + 2 * 4 * args[0].size


@needs_library
@needs_gpu_compiler
def test_no_copies_on_a_gpu():
    """No slices of positions and masks, and no padded columns."""

    def step(*args):
        *args, dy = args
        return jax.vjp(functools.partial(convolve, implementation="native"), *args)[1](dy)

    image = 2, 50, 84
    x = shape(*image, 128, dtype="bfloat16")
    kernel = shape(3, 3, 128, 128, dtype="bfloat16")
    hlo = plan(step, x, shape(*image, 18), kernel, shape(*image, 9), x).hlo
    assert " pad(" not in hlo and " dynamic-slice(" not in hlo
    assert re.search(r"bf16\[2,50,84,1152\]\S* custom-call", hlo)


def gradients(table, tokens, x, offset, kernel, boxes):
    def loss(table, x):
        y = effjax.deform_conv2d(x, offset, kernel, padding=1, implementation="xla")
        bins = effjax.roi_align(x, boxes, output_size=2, sampling_ratio=1, implementation="xla")
        return sum(jnp.sum(jnp.sin(a)) for a in (table[tokens], y, bins))

    return jax.grad(loss, (0, 1))(table, x)


@needs_gpu_compiler
@vary("target", ["a100-80", "h100"])
def test_scatter_adds_are_as_the_warning_says(target, monkeypatch):
    """A loop of compare-and-swap in older versions of jaxlib, later an instruction that adds."""
    dumped = []
    read = process._read_dump

    def read_ptx(folder, name):
        dumped.extend(file.read_text() for file in (folder / "dump").rglob("*.ptx"))
        return read(folder, name)

    monkeypatch.setattr(process, "_read_dump", read_ptx)
    plan(
        gradients, shape(39, 128), shape(40, dtype="int32"), shape(1, 8, 8, 8),
        shape(1, 8, 8, 18), shape(3, 3, 8, 4), shape(1, 3, 4),
        target=target, compiler_options={"xla_dump_emitter_re": ".*"},
    )  # fmt: skip
    kernels = {}
    for entry in "".join(dumped).split(".entry ")[1:]:
        if operations := re.findall(r"\batom\.[\w.]*?\.(add|cas)\b", entry):
            kernels[entry.partition("(")[0]] = set(operations)
    # The embedding, and the corners of samples of deform_conv2d and of roi_align.
    assert len(kernels) >= 3
    version = tuple(int(n) for n in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    operation = "add" if version >= defaults._ATOMIC_SUMS else "cas"
    assert set().union(*kernels.values()) == {operation}
