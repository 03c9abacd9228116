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
from tests.native.emulation import compile_emulated, pointers, shuffled_orders
from tests.programs import needs_gpu_compiler

NAMES = "x", "first", "step", "count", "dy", "y", "dx", "dfirst"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return compile_emulated("emulate_roi.cc", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def emulate(emulated):
    """Return a function that runs the kernel of the requested results on NumPy arrays."""

    def run(pooling, arrays, adds=False, gathers=False, **results):
        (n, h, w, c), (_, boxes, bins, groups, _) = arrays["x"].shape, arrays["first"].shape
        sizes = (
            n, h, w, c // pooling.parts**2, boxes, bins, groups, *pooling.output_size,
            pooling.parts,
        )  # fmt: skip
        emulated.emulate(
            arrays["x"].dtype.name.encode(),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_double(pooling.margin),
            ctypes.c_bool(pooling.average_inside_only),
            ctypes.c_bool(adds),
            ctypes.c_bool(gathers),
            pointers([(arrays | results).get(name) for name in NAMES]),
        )
        return results

    return run


def make(dtype, channels, pooling, groups, size=(4, 5), boxes=3):
    """Return random arrays, with a few positions at NaN, at infinity and far outside."""
    rng = np.random.default_rng(0)
    wide = np.float64 if dtype == np.float64 else np.float32
    n, bins = 2, pooling.output_size[0] * pooling.output_size[1]
    first = rng.uniform(-2, max(size), size=(n, boxes, bins, groups, 2))
    first[0, 0, 0, 0] = np.nan, 1
    first[0, 0, 1, 0] = 1, -np.inf
    first[0, 1, 0, 0] = -1e30, 2
    count = pooling.samples or rng.integers(1, 4, size=(n, boxes, 1))
    count = np.broadcast_to(count, (n, boxes, 2)).astype(wide)
    count[1, 0] = 0
    step = rng.uniform(0.3, 0.9, size=(n, boxes, 2))
    step[1, 1] = -0.4, 0  # a box with swapped corners, one without width
    return {
        "x": rng.normal(size=(n, *size, pooling.parts**2 * channels)).astype(dtype),
        "first": first.astype(wide),
        "step": step.astype(wide),
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
    ("dtype", "channels", "pooling", "groups", "size"),
    [
        (np.float32, 264, BOXES, 1, (4, 5)),
        (np.float32, 10, PARTS, 2, (4, 5)),
        (np.float32, 3, BOXES, 1, (17, 19)),
        (np.float32, 8, BOXES, 1, (1, 1)),
        (np.float64, 12, BOXES, 1, (4, 5)),
        (np.float64, 1, PARTS, 1, (9, 3)),
        (jnp.bfloat16, 32, PARTS, 2, (4, 5)),
        (np.float16, 6, BOXES._replace(has_position_gradients=False), 1, (4, 5)),
    ],
    ids=str,
)
def test_kernels_emulated(emulate, dtype, channels, pooling, groups, size, x64):
    """Values and gradients are those of the reference in float64, in both modes."""
    arrays = make(dtype, channels, pooling, groups, size)
    oracle = [jnp.asarray(arrays[name], jnp.float64) for name in NAMES[:5]]
    dy, wide = arrays.pop("dy"), arrays["first"].dtype
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}
    none = jnp.zeros((*dy.shape[:3], 0))
    want = np.asarray(reference.pool(*oracle[:4], initial=none, pooling=pooling))
    y = emulate(pooling, arrays, y=np.full_like(dy, np.nan))["y"].astype(np.float64)
    np.testing.assert_allclose(y, want, rtol=0, atol=4 * tolerance[dy.dtype.name])
    more = emulate(pooling, arrays, adds=True, y=np.ones_like(dy))["y"].astype(np.float64)
    np.testing.assert_allclose(more, want + 1, rtol=0, atol=8 * tolerance[dy.dtype.name])

    arrays["dy"] = dy
    want = reference.pool_backward(*oracle, pooling=pooling)
    results = unset(arrays, pooling)
    emulate(pooling, arrays, **results)
    # The deterministic mode computes positions without dx, then dx in another kernel.
    in_order = {"dx": np.full(arrays["x"].shape, np.nan, wide)}
    emulate(pooling, arrays, gathers=True, **in_order)
    if pooling.has_position_gradients:
        again = unset(arrays, pooling)["dfirst"]
        emulate(pooling, arrays, dfirst=again)
        np.testing.assert_array_equal(again, results["dfirst"])
    for name, value in zip(("dx", "dfirst"), want, strict=True):
        for got in (results, in_order):
            if name in got:
                atol = 10 * np.abs(value).max() * tolerance[wide.name]
                np.testing.assert_allclose(got[name], value, rtol=0, atol=atol)


def unset(arrays, pooling):
    """Return results of the backward pass: dx to add to, and dfirst to be overwritten."""
    first = arrays["first"]
    results = {"dx": np.zeros(arrays["x"].shape, first.dtype)}
    if pooling.has_position_gradients:
        results["dfirst"] = np.full_like(first, np.nan)
    return results


def test_bits_do_not_depend_on_the_order_of_threads(emulate, emulated):
    """Other than with atomic additions, whose order does show: many bins share each pixel."""
    arrays = make(np.float32, 8, BOXES, 1, (2, 3), boxes=65)
    in_order, atomic, positions = set(), set(), set()
    for _ in shuffled_orders(emulated):
        results = emulate(BOXES, arrays, **unset(arrays, BOXES))
        atomic.add(results["dx"].tobytes())
        positions.add(results["dfirst"].tobytes())
        dx = np.full(arrays["x"].shape, np.nan, np.float32)
        emulate(BOXES, arrays, gathers=True, dx=dx)
        in_order.add(dx.tobytes())
    assert len(in_order) == len(positions) == 1 < len(atomic)
    np.testing.assert_allclose(dx, results["dx"], rtol=0, atol=1e-5 * np.abs(dx).max())


def test_addresses_are_64_bit(emulate):
    """The image has more than 2**31 elements; most of its memory is never touched."""
    size, channels = 32768, 3
    x, dx = (np.zeros((1, size, size, channels), t) for t in (np.float16, np.float32))
    x[0, -1, -1] = 5, 6, 7
    arrays = {
        "x": x,
        "first": np.full((1, 1, 1, 1, 2), size - 1, np.float32),
        "step": np.ones((1, 1, 2), np.float32),
        "count": np.ones((1, 1, 2), np.float32),
        "dy": np.array([1, 2, 3], np.float16).reshape(1, 1, 1, 3),
    }
    pooling = BOXES._replace(output_size=(1, 1))
    y = emulate(pooling, arrays, y=np.full((1, 1, 1, channels), np.nan, np.float16))["y"]
    np.testing.assert_array_equal(y[0, 0, 0], [5, 6, 7])
    emulate(pooling, arrays, dx=dx)
    np.testing.assert_array_equal(dx[0, -1, -1], [1, 2, 3])


needs_library = pytest.mark.skipif(
    not native.is_available("cuda"), reason="built without CUDA kernels"
)


@needs_library
@needs_gpu_compiler
@pytest.mark.parametrize("deterministic", [False, True])
def test_programs_compile_for_a_gpu(deterministic):

    def loss(x, boxes, offset):
        y = effjax.deform_roi_pool(
            x, boxes, offset, output_size=2, implementation="native", deterministic=deterministic
        )
        return jnp.sum(jnp.sin(y))

    shapes = (2, 16, 16, 8), (2, 5, 4), (2, 5, 2, 2, 2)
    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    calls = re.findall(
        r'custom_call_target="effjax_(\w+)"', plan(jax.grad(loss, (0, 2)), *args).hlo
    )
    backward = "roi_pool_backward" + "_deterministic" * deterministic
    assert set(calls) <= {"roi_pool", backward} and backward in calls
