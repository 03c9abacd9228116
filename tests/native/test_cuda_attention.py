"""CUDA kernels of deformable attention without a GPU: emulated on a CPU, and compiled."""

import ctypes
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from effjax.memory import plan
from effjax.ops.deform_attention import api, reference
from tests.native.emulation import assert_close, compile_emulated, pointers, shuffled_orders
from tests.programs import needs_gpu_compiler

ARGUMENTS = "value", "locations", "weights", "dy", "destination", "source"
RESULTS = "y", "dvalue", "dlocations", "dweights"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return compile_emulated("emulate_attention.cc", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def emulate(emulated):
    """Return a function that runs the kernel of the requested results on NumPy arrays."""

    def run(levels, **arrays):
        value, locations = arrays["value"], arrays["locations"]
        sizes = [*value.shape, locations.shape[1], locations.shape[4], levels.normalized]
        sizes += [size for shape in levels.shapes for size in shape]
        emulated.emulate(
            value.dtype.name.encode(),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_int64(len(levels.shapes)),
            pointers([arrays.get(name) for name in (*ARGUMENTS, *RESULTS)]),
        )

    return run


def make(dtype, levels, depth, points, n=2, queries=3, heads=2):
    """Return random arrays, with a few positions at NaN, at infinity and far outside."""
    rng, wide = np.random.default_rng(0), np.float64 if dtype == np.float64 else np.float32
    at = n, queries, heads, len(levels.shapes), points
    locations = rng.normal(size=(*at, 2)) + 0.5
    locations *= 1 if levels.normalized else 3
    locations[0, 0, 0, 0, 0] = np.nan, 0.5
    locations[-1, 0, 0, -1, 0] = np.inf, -1e30
    pixels = sum(h * w for h, w in levels.shapes)
    return {
        "value": rng.normal(size=(n, pixels, heads, depth)).astype(dtype),
        "locations": locations.astype(wide),
        "weights": rng.normal(size=at).astype(wide),
        "dy": rng.normal(size=(n, queries, heads, depth)).astype(dtype),
    }


def sort_corners(levels, locations):
    """Return the sorted pixels of all corners, and their samples."""
    destination = np.asarray(api.destinations(jnp.asarray(locations), levels))
    order = np.argsort(destination, axis=-1, kind="stable")
    return {
        "destination": np.take_along_axis(destination, order, -1),
        "source": (order // 4).astype(np.int32),
    }


def unset(arrays) -> dict[str, Any]:
    """Return results of the backward pass: dvalue to add to, the others to be overwritten."""
    wide = arrays["weights"].dtype
    results = {
        f"d{name}": np.full(arrays[name].shape, np.nan, wide) for name in ("locations", "weights")
    }
    return {"dvalue": np.zeros(arrays["value"].shape, wide)} | results


# Channels of a head: several packs of 16 bytes, one, more than one read of a warp, odd numbers.
CASES = [
    (np.float32, 32, 4, False),
    (jnp.bfloat16, 5, 1, True),
    (np.float32, 136, 2, True),
    (np.float32, 3, 2, True),
    (np.float64, 6, 4, True),
    (np.float64, 1, 1, False),
    (jnp.bfloat16, 32, 3, False),
    (np.float16, 32, 4, True),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "depth", "points", "normalized"), CASES)
def test_kernels_emulated(emulate, dtype, depth, points, normalized, x64):
    """Values and gradients are those of the reference in float64, in both modes."""
    levels = reference.Levels(((3, 4), (2, 2), (1, 1)), normalized)
    arrays = make(dtype, levels, depth, points)
    dy, wide = arrays["dy"], arrays["weights"].dtype
    oracle = [jnp.asarray(arrays[name], jnp.float64) for name in ARGUMENTS[:4]]
    options = dict(levels=levels, workspace_bytes=10**6)

    y = np.full(dy.shape, np.nan).astype(dtype)
    emulate(levels, **arrays, y=y)
    assert_close(y, reference.attend(*oracle[:3], **options), dy.dtype)

    want = reference.attend_backward(*oracle, **options)
    results = unset(arrays)
    emulate(levels, **arrays, **results)
    for got, expected in zip(results.values(), want, strict=True):
        assert_close(got, expected, wide)

    # The deterministic mode computes positions without dvalue, then dvalue pixel by pixel.
    without = unset(arrays) | {"dvalue": None}
    emulate(levels, **arrays, **without)
    for name in ("dlocations", "dweights"):
        np.testing.assert_array_equal(without[name], results[name])
    dvalue = np.ones(arrays["value"].shape, wide)
    emulate(levels, **arrays, **sort_corners(levels, arrays["locations"]), dvalue=dvalue)
    assert_close(dvalue - 1, want[0], wide, scale=4)


def test_bits_do_not_depend_on_the_order_of_threads(emulate, emulated):
    """Other than with atomic additions, whose order does show: many samples share each pixel."""
    levels = reference.Levels(((2, 3),), True)
    arrays = make(np.float32, levels, 4, 4, n=1, queries=80, heads=2)
    corners = sort_corners(levels, arrays["locations"])
    in_order, atomic, rest = set(), set(), set()
    for _ in shuffled_orders(emulated):
        results = unset(arrays)
        emulate(levels, **arrays, **results)
        atomic.add(results["dvalue"].tobytes())
        results |= unset(arrays) | {"dvalue": None}
        emulate(levels, **arrays, **results)
        rest.add(results["dlocations"].tobytes() + results["dweights"].tobytes())
        dvalue = np.zeros_like(arrays["value"])
        emulate(levels, **arrays, **corners, dvalue=dvalue)
        in_order.add(dvalue.tobytes())
    assert len(in_order) == len(rest) == 1 < len(atomic)
    want = np.frombuffer(atomic.pop(), np.float32).reshape(dvalue.shape)
    np.testing.assert_allclose(dvalue, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("workspace_bytes", [10**6, 2 * 2 * 6 * 80 * 2])
def test_deterministic_gradients_in_slices(emulate, monkeypatch, workspace_bytes):
    """Five queries at once, or in slices of two, of which the last one is padded."""
    levels = reference.Levels(((3, 4), (2, 2)), True)
    arrays = make(np.float32, levels, 4, 3, queries=5)
    calls = []

    def ffi_call(target, results, **_):
        names = ARGUMENTS[:4] if target.endswith("_backward") else ARGUMENTS[1:]

        def run(*args):
            calls.append(target)
            given = dict(zip((*names, "dvalue"), map(np.array, args), strict=False))
            if "destination" in given:
                emulate(levels, **given | {"value": arrays["value"]})
                return given["dvalue"]
            gradients = unset(given) | {"dvalue": None}
            emulate(levels, **given | gradients)
            assert not results[0].size
            return np.zeros(results[0].shape, np.float32), *list(gradients.values())[1:]

        return lambda *args, **_: jax.pure_callback(run, results, *args)

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    args = [jnp.asarray(arrays[name]) for name in ARGUMENTS[:4]]
    options: Any = dict(levels=levels, workspace_bytes=workspace_bytes)
    got = jax.block_until_ready(api._sorted_attend_backward(*args, **options))
    assert len(calls) == (2 if workspace_bytes == 10**6 else 4)
    for gradient, want in zip(got, reference.attend_backward(*args, **options), strict=True):
        assert_close(gradient, want, np.dtype(np.float32))


def test_weights_of_positions_that_are_rounded_differently(emulate):
    """A program may sort a sample by another pixel than the kernel: a rounding error apart."""
    levels = reference.Levels(((2, 4),), False)
    arrays = make(np.float32, levels, 4, 1, n=1, queries=1, heads=1)
    arrays["locations"][...] = 2, 0.25
    sorted_below = sort_corners(levels, np.nextafter(arrays["locations"], np.float32(0)))
    dvalue = np.zeros_like(arrays["value"])
    emulate(levels, **arrays, **sorted_below, dvalue=dvalue)
    want = unset(arrays)
    emulate(levels, **arrays, **want)
    np.testing.assert_allclose(dvalue, want["dvalue"], rtol=0, atol=1e-6)


def test_addresses_are_64_bit(emulate):
    """The image has more than 2**31 elements; most of its memory is never touched."""
    size, depth = 32768, 3
    levels = reference.Levels(((size, size),), False)
    value, dvalue = (np.zeros((1, size**2, 1, depth), t) for t in (np.float16, np.float32))
    value[0, -1, 0] = 5, 6, 7
    arrays = {
        "value": value,
        "locations": np.full((1, 1, 1, 1, 1, 2), size - 1, np.float32),
        "weights": np.full((1, 1, 1, 1, 1), 2, np.float32),
        "dy": np.array([1, 2, 3], np.float16).reshape(1, 1, 1, 3),
    }
    y = np.full((1, 1, 1, depth), np.nan, np.float16)
    emulate(levels, **arrays, y=y)
    np.testing.assert_array_equal(y[0, 0, 0], [10, 12, 14])
    emulate(levels, **arrays, **unset(arrays | {"value": value[:, :0]}) | {"dvalue": dvalue})
    np.testing.assert_array_equal(dvalue[0, -1, 0], [2, 4, 6])
    emulate(levels, **arrays, **sort_corners(levels, arrays["locations"]), dvalue=dvalue)
    np.testing.assert_array_equal(dvalue[0, -1, 0], [4, 8, 12])


@pytest.mark.skipif(not native.is_available("cuda"), reason="built without CUDA kernels")
@needs_gpu_compiler
@pytest.mark.parametrize("deterministic", [False, True])
def test_programs_compile_for_a_gpu(deterministic):
    """The programs contain no array of samples; sorted corners fit into the workspace."""
    shapes = ((8, 8), (4, 4))
    options: Any = dict(implementation="native", deterministic=deterministic, workspace_bytes=10**5)

    def loss(value, locations, weights, x, offset, mask):
        y = effjax.ms_deform_attn(value, shapes, locations, weights, **options)
        z = effjax.dcn_aggregate(x, offset, mask, padding=1, **options)
        return jnp.sum(jnp.sin(y)) + jnp.sum(z**2)

    at = 2, 500, 2, 2, 4
    sizes = (2, 80, 2, 32), (*at, 2), at, (2, 8, 8, 32), (2, 8, 8, 36), (2, 8, 8, 18)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in sizes]
    planned = plan(jax.grad(loss, range(6)), *args)
    calls = re.findall(r'custom_call_target="effjax_(\w+)"', planned.hlo)
    expected = ["ms_deform_attn"] * 2 + ["ms_deform_attn_backward"] * 2
    assert sorted(calls) == expected + ["ms_deform_attn_scatter_sorted"] * 2 * deterministic
    sorted_arrays = [operands.count("%") for operands in re.findall(r" sort\((.*?)\)", planned.hlo)]
    assert set(sorted_arrays) == ({2} if deterministic else set())
    samples_bytes = 4 * 2 * 500 * 2 * 8 * 32
    limit = samples_bytes / 4 + deterministic * options["workspace_bytes"]
    assert planned.device.temporaries < limit
