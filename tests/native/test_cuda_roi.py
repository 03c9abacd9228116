"""CUDA kernels of box pooling without a GPU: emulated on a CPU, and compiled."""

import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from effjax.memory import plan
from effjax.ops.roi import reference
from effjax.ops.roi.reference import Pooling
from tests.native.emulation import compile_emulated, pointers
from tests.programs import needs_gpu_compiler

NAMES = "x", "first", "step", "count", "dy", "y", "dx", "dfirst"


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Return a function that runs the kernel of the requested results on NumPy arrays."""
    directory = tmp_path_factory.mktemp("emulated")
    function = compile_emulated("emulate_roi.cc", directory).emulate

    def run(pooling, arrays, adds=False, **results):
        (n, h, w, c), (_, boxes, bins, groups, _) = arrays["x"].shape, arrays["first"].shape
        sizes = (
            n, h, w, c // pooling.parts**2, boxes, bins, groups, *pooling.output_size,
            pooling.parts,
        )  # fmt: skip
        function(
            arrays["x"].dtype.name.encode(),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_double(pooling.margin),
            ctypes.c_bool(pooling.average_inside_only),
            ctypes.c_bool(adds),
            pointers([(arrays | results).get(name) for name in NAMES]),
        )
        return results

    return run


def make(dtype, channels, pooling, groups):
    rng = np.random.default_rng(0)
    wide = np.float64 if dtype == np.float64 else np.float32
    n, boxes, bins = 2, 3, pooling.output_size[0] * pooling.output_size[1]
    first = rng.uniform(-2, 5, size=(n, boxes, bins, groups, 2))
    first[0, 0, 0, 0] = np.nan, 1
    first[0, 0, 1, 0] = 1, -np.inf
    first[0, 1, 0, 0] = -1e30, 2
    count = pooling.samples or rng.integers(1, 4, size=(n, boxes, 1))
    count = np.broadcast_to(count, (n, boxes, 2)).astype(wide)
    count[1, 0] = 0
    return {
        "x": rng.normal(size=(n, 4, 5, pooling.parts**2 * channels)).astype(dtype),
        "first": first.astype(wide),
        "step": rng.uniform(0.3, 0.9, size=(n, boxes, 2)).astype(wide),
        "count": count,
        "dy": rng.normal(size=(n, boxes, bins, channels)).astype(dtype),
    }


BOXES = Pooling(
    (2, 2), parts=1, margin=1.0, average_inside_only=False, samples=0, has_position_gradients=True
)
PARTS = Pooling(
    (2, 3), parts=2, margin=0.5, average_inside_only=True, samples=2, has_position_gradients=True
)


# Channels of a group: packs of 16 bytes, more than one read of a warp, an odd number.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "channels", "pooling", "groups"),
    [
        (np.float32, 264, BOXES, 1),
        (np.float32, 10, PARTS, 2),
        (np.float64, 12, BOXES, 1),
        (jnp.bfloat16, 32, PARTS, 2),
        (np.float16, 6, BOXES._replace(has_position_gradients=False), 1),
    ],
    ids=str,
)
def test_kernels_emulated(emulate, dtype, channels, pooling, groups, x64):
    arrays = make(dtype, channels, pooling, groups)
    on_device = [jnp.asarray(arrays[name]) for name in NAMES[:5]]
    dy, wide = arrays.pop("dy"), arrays["first"].dtype
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}
    none = jnp.zeros((*dy.shape[:3], 0), dy.dtype)
    want = np.asarray(reference.pool(*on_device[:4], none, pooling), np.float64)
    y = emulate(pooling, arrays, y=np.full_like(dy, np.nan))["y"].astype(np.float64)
    np.testing.assert_allclose(y, want, rtol=0, atol=4 * tolerance[dy.dtype.name])
    more = emulate(pooling, arrays, adds=True, y=np.ones_like(dy))["y"].astype(np.float64)
    np.testing.assert_allclose(more, want + 1, rtol=0, atol=8 * tolerance[dy.dtype.name])

    results = {"dx": np.zeros(arrays["x"].shape, wide)}
    if pooling.has_position_gradients:
        results["dfirst"] = np.full_like(arrays["first"], np.nan)
    got = emulate(pooling, arrays | {"dy": dy}, **results)
    want = reference.pool_backward(*on_device, pooling)
    for name, value in zip(("dx", "dfirst"), want, strict=True):
        if name in got:
            atol = 10 * np.abs(value).max() * tolerance[wide.name]
            np.testing.assert_allclose(got[name], value, rtol=0, atol=atol)


needs_library = pytest.mark.skipif(
    not native.is_available("cuda"), reason="built without CUDA kernels"
)


@needs_library
@needs_gpu_compiler
def test_programs_compile_for_a_gpu():

    def loss(x, boxes, offset):
        y = effjax.deform_roi_pool(x, boxes, offset, output_size=2, implementation="native")
        return jnp.sum(jnp.sin(y))

    shapes = (2, 16, 16, 8), (2, 5, 4), (2, 5, 2, 2, 2)
    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    calls = re.findall(
        r'custom_call_target="effjax_(\w+)"', plan(jax.grad(loss, (0, 2)), *args).hlo
    )
    assert set(calls) <= {"roi_pool", "roi_pool_backward"} and "roi_pool_backward" in calls
