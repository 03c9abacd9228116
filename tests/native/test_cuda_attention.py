"""CUDA kernels of deformable attention without a GPU: emulated on a CPU, and compiled."""

import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from effjax.memory import plan
from effjax.ops.deform_attention import reference
from tests.native.emulation import assert_close, compile_emulated, pointers
from tests.programs import needs_gpu_compiler

NAMES = "value", "locations", "weights", "dy", "y", "dvalue", "dlocations", "dweights"


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Return a function that runs the kernel of the requested results on NumPy arrays."""
    directory = tmp_path_factory.mktemp("emulated")
    function = compile_emulated("emulate_attention.cc", directory).emulate

    def run(levels, **arrays):
        value, locations = arrays["value"], arrays["locations"]
        sizes = [*value.shape, locations.shape[1], locations.shape[4], levels.normalized]
        sizes += [size for shape in levels.shapes for size in shape]
        function(
            value.dtype.name.encode(),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_int64(len(levels.shapes)),
            pointers([arrays.get(name) for name in NAMES]),
        )

    return run


# Channels of a head: several packs of 16 bytes, one, more than one read of a warp, odd numbers.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "depth", "points", "normalized"),
    [
        (np.float32, 32, 4, False),
        (np.float32, 136, 2, True),
        (np.float64, 6, 4, True),
        (jnp.bfloat16, 5, 1, True),
        (np.float16, 32, 4, True),
    ],
)
def test_kernels_emulated(emulate, dtype, depth, points, normalized, x64):
    rng, wide = np.random.default_rng(0), np.float64 if dtype == np.float64 else np.float32
    shapes = ((3, 4), (2, 2), (1, 1))
    levels = reference.Levels(shapes, normalized)
    n, queries, heads = 2, 3, 2
    at = n, queries, heads, len(shapes), points
    locations = rng.normal(size=(*at, 2)) + 0.5
    locations *= 1 if normalized else 3
    locations[0, 0, 0, 0, 0] = np.nan, 0.5
    locations[1, 0, 0, 1, 0] = np.inf, -1e30
    arrays = {
        "value": rng.normal(size=(n, 17, heads, depth)).astype(dtype),
        "locations": locations.astype(wide),
        "weights": rng.normal(size=at).astype(wide),
    }
    dy = rng.normal(size=(n, queries, heads, depth)).astype(dtype)
    given = tuple(map(jnp.asarray, arrays.values()))
    options = dict(levels=levels, workspace_bytes=10**6)

    y = np.full(dy.shape, np.nan).astype(dtype)
    emulate(levels, **arrays, y=y)
    assert_close(y, reference.attend(*given, **options), dy.dtype)

    results = {f"d{name}": np.full(a.shape, np.nan, wide) for name, a in arrays.items()}
    results["dvalue"][:] = 0
    emulate(levels, **arrays, dy=dy, **results)
    want = reference.attend_backward(*given, jnp.asarray(dy), **options)
    for got, expected in zip(results.values(), want, strict=True):
        assert_close(got, expected, np.dtype(wide))


@pytest.mark.skipif(not native.is_available("cuda"), reason="built without CUDA kernels")
@needs_gpu_compiler
def test_programs_compile_for_a_gpu():
    """The programs contain no array of samples."""
    shapes = ((8, 8), (4, 4))

    def loss(value, locations, weights, x, offset, mask):
        y = effjax.ms_deform_attn(value, shapes, locations, weights, implementation="native")
        z = effjax.dcn_aggregate(x, offset, mask, padding=1, implementation="native")
        return jnp.sum(jnp.sin(y)) + jnp.sum(z**2)

    at = 2, 500, 2, 2, 4
    sizes = (2, 80, 2, 32), (*at, 2), at, (2, 8, 8, 32), (2, 8, 8, 36), (2, 8, 8, 18)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in sizes]
    planned = plan(jax.grad(loss, range(6)), *args)
    calls = re.findall(r'custom_call_target="effjax_(\w+)"', planned.hlo)
    assert sorted(calls) == ["ms_deform_attn"] * 2 + ["ms_deform_attn_backward"] * 2
    assert planned.device.temporaries < 4 * 2 * 500 * 2 * 8 * 32 / 4
