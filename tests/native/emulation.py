"""The operators' CUDA kernels compiled for a CPU, where an emulator runs them thread by thread."""

import ctypes
import dataclasses
import math
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.ops.samplers.deform_attention import native as attention_native
from effjax.ops.samplers.deform_attention import reference as attention
from effjax.ops.samplers.deform_attention.reference import Levels
from effjax.ops.samplers.deform_conv import native, xla
from effjax.ops.samplers.deform_conv.reference import Geometry
from effjax.ops.samplers.roi import reference as roi
from effjax.ops.samplers.roi.reference import Pooling

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "effjax" / "native"
Arrays = dict[str, np.ndarray]
BAND = 4096  # bytes before and after each array, which no kernel may change


@dataclasses.dataclass
class Case:
    """A call of an operator's kernels."""

    sizes: Sequence[int]  # for the C++ program
    args: Arrays  # in the order of the reference: the image is first, the cotangent last
    # `results(in_order)` returns new arrays for the results and the gradients, as before the call.
    results: Callable[[bool], Arrays]
    reference: Callable[..., Sequence[jax.Array]]  # of `args`; returns the result and the gradients
    sorted: Callable[[], Arrays] = dict  # more arguments of the kernel that adds in a fixed order

    def want(self) -> Sequence[jax.Array]:
        """Return the result and the gradients in float64."""
        is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
        wide = (jnp.asarray(a, "float64" if is_float(a) else a.dtype) for a in self.args.values())
        return jax.jit(self.reference)(*wide)


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """Description of an operator's CUDA kernels."""

    source: str  # C++ file that compiles them for a CPU
    arrays: tuple[str, ...]  # names in that file: arguments, result and gradients
    # The first gradient is that of the image. It is the sum of atomic additions, or computed by
    # another kernel in a fixed order.
    gradients: tuple[str, ...]
    make: Callable[..., Case]  # `make(dtype, channels, **options)`, with channels of a group
    options: tuple[Mapping[str, Any], ...]  # three sets of them
    crowded: Mapping[str, Any]  # options of a case in which many samples share each pixel
    make_far: Callable[[np.ndarray], Case]  # a case with one sample, at the last pixel of an image
    visits_pixels: bool = False  # the kernel that adds in a fixed order has threads for each pixel
    library: ctypes.CDLL | None = None  # the compiled kernels

    def compile(self, folder: pathlib.Path) -> "Operator":
        compiler = shutil.which("g++")
        if compiler is None or not SOURCES.is_dir():
            pytest.skip("no g++, or a package without its C++ sources")
        path = folder / "emulated.so"
        command = [
            compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-pthread", "-DEMULATED_ARCH=900",
            f"-I{HERE / 'emulated'}", f"-I{SOURCES}", str(HERE / self.source), "-o", str(path),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return dataclasses.replace(self, library=ctypes.CDLL(str(path)))

    def run(self, case: Case, *names: str, in_order: bool = False) -> Arrays:
        """Return the results of these names, which one kernel computes."""
        every = case.results(in_order)
        results = {name: every[name] for name in names if name in every}
        operands = case.args | (case.sorted() if in_order else {})
        self.call(case.sizes, operands | results, in_order, tuple(operands))
        return results

    def call(
        self, sizes: Sequence[int], arrays: Arrays, in_order: bool = False,
        operands: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Run the kernel of the results that are in `arrays`. It must not change `operands`."""
        assert self.library is not None
        # Images with 64-bit addresses stay where they are: most of their memory is never touched.
        blocks = {name: between_bands(a) for name, a in arrays.items() if a.nbytes < 2**30}
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        addresses |= {name: block.ctypes.data + BAND for name, block in blocks.items()}
        pointers = [addresses.get(name) for name in self.arrays]
        self.library.emulate(
            arrays[self.arrays[0]].dtype.name.encode(),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_void_p * len(pointers))(*pointers),
            ctypes.c_bool(in_order),
        )
        for name, block in blocks.items():
            array, data = arrays[name], block[BAND:-BAND]
            bands = np.concatenate([block[:BAND], block[-BAND:]])
            assert (bands == 0xFF).all(), f"a write outside of {name}"
            if name in operands:
                assert data.tobytes() == array.tobytes(), f"a write to {name}"
            else:
                array[...] = data.view(array.dtype).reshape(array.shape)

    def shuffle_threads(self, count: int = 2) -> Iterator[None]:
        """Iterate over runs. Blocks and threads start in another order in each of them."""
        assert self.library is not None
        try:
            for seed in range(count):
                self.library.set_order(ctypes.c_uint64(seed))
                yield
        finally:
            self.library.set_order(ctypes.c_uint64(0))


def between_bands(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a copy of an array between bands.

    The bytes of the bands are numbers that are NaN, so a value that is read there shows in results.
    """
    block = np.full(array.nbytes + 2 * BAND, 0xFF, np.uint8)
    block[BAND : BAND + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return block


def wide(dtype: Any) -> type:
    """Return the dtype of positions and gradients."""
    return np.float64 if dtype == np.float64 else np.float32


def filled(like: np.ndarray, value: float, dtype: Any = None) -> np.ndarray:
    """Return an array of equal numbers. Zeros take no memory until they are written."""
    array = np.zeros(like.shape, like.dtype if dtype is None else dtype)
    if value != 0:
        array[...] = value
    return array


def full(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)


def sort_corners(destination: Any, corners_per_source: int) -> Arrays:
    """Return the pixels of all corners of samples in order, and their samples or corners."""
    destination = np.asarray(destination)
    order = np.argsort(destination, axis=-1, kind="stable")
    return {
        "destination": np.take_along_axis(destination, order, -1),
        "source": (order // corners_per_source).astype(np.int32),
    }


# Deformable convolution: the columns of some rows.


def make_conv(
    dtype: Any, channels: int, masked: bool = True, wide_index: bool = False,
    size: tuple[int, int] = (4, 5), width: int = 2,
) -> Case:  # fmt: skip
    """Return random arrays, with a few positions at NaN, at infinity and on borders."""
    rng = np.random.default_rng(0)
    geometry = Geometry((2, 2), (2, 1), ((1, 0), (0, 1)), (1, 2), 2)
    n, height, rows, taps = 2, 4, 2, geometry.taps * geometry.offset_groups
    offset = rng.normal(scale=2, size=(n, height, width, 2 * taps))
    offset[0, 1, 0, :6] = [np.nan, 0, np.inf, -np.inf, 1e30, -1e30]
    offset[1, 1, 0, :4] = [-1, 0, 2, 1]
    c = channels * geometry.offset_groups
    args = {
        "x": rng.normal(size=(n, *size, c)).astype(dtype),
        "offset": offset.astype(wide(dtype)),
        "mask": rng.normal(size=(n, height, width, taps if masked else 0)).astype(wide(dtype)),
        "row": np.array([1], np.int32),
        "dcolumns": rng.normal(size=(n, rows, width, geometry.taps * c)).astype(wide(dtype)),
    }
    return call_conv(geometry, args, wide_index=wide_index)


def call_conv(geometry: Geometry, args: Arrays, start: float = 1, wide_index: bool = False) -> Case:
    """Return a case that adds dx to `start`, and sets the other gradients in some rows."""
    x, offset, mask, row, dcolumns = args.values()
    n, h, w, c = x.shape
    height, width, rows = *offset.shape[1:3], dcolumns.shape[1]
    (top, _), (left, _) = geometry.padding
    sizes = (
        n, h, w, c, rows, width, geometry.taps, geometry.offset_groups, height,
        geometry.kernel_size[1], *geometry.strides, top, left, *geometry.kernel_dilation,
        mask.size > 0, wide_index,
    )  # fmt: skip

    def results(in_order):
        return {
            "columns": filled(dcolumns, np.nan, x.dtype),
            "dx": filled(x, start, offset.dtype),
            "doffset": filled(offset, 7),
            "dmask": filled(mask, 7),
        }

    def reference(x, offset, mask, row, dcolumns):
        before = [jnp.full(x.shape, start, x.dtype), *(jnp.full_like(a, 7) for a in (offset, mask))]
        y = xla.columns(x, offset, mask, row, geometry, rows)
        return [y, *xla.columns_backward(x, offset, mask, row, dcolumns, *before, geometry)]

    def sort():
        here = offset[:, row[0] : row[0] + rows]
        find = jax.jit(lambda *a: native.destinations(*a, (h, w), geometry))
        return sort_corners(find(here, row), 1)

    return Case(sizes, args, results, reference, sort)


def make_far_conv(x: np.ndarray) -> Case:
    args = {
        "x": x,
        "offset": full(x.shape[1] - 1, 1, 1, 1, 2),
        "mask": full(2, 1, 1, 1, 1),
        "row": np.array([0], np.int32),
        "dcolumns": np.array([[[[1, 2, 3]]]], np.float32),
    }
    return call_conv(Geometry((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1), args, start=0)


CONV = Operator(
    source="emulate.cc",
    arrays=(
        "x", "offset", "mask", "row", "dcolumns", "destination", "source",
        "columns", "dx", "doffset", "dmask",
    ),
    gradients=("dx", "doffset", "dmask"),
    make=make_conv,
    options=(dict(), dict(masked=False), dict(wide_index=True)),
    crowded=dict(channels=4, size=(3, 30), width=30),
    make_far=make_far_conv,
)  # fmt: skip


# Multi-scale deformable attention.


def make_attention(
    dtype: Any, channels: int, normalized: bool = True, points: int = 4,
    shapes: tuple = ((3, 4), (2, 2), (1, 1)), n: int = 2, queries: int = 3, heads: int = 2,
) -> Case:  # fmt: skip
    """Return random arrays, with a few positions at NaN, at infinity and far outside."""
    rng, levels = np.random.default_rng(0), Levels(shapes, normalized)
    at = n, queries, heads, len(shapes), points
    locations = rng.normal(size=(*at, 2)) + 0.5
    locations *= 1 if normalized else 3
    locations[0, 0, 0, 0, 0] = np.nan, 0.5
    locations[-1, 0, 0, -1, 0] = np.inf, -1e30
    pixels = sum(h * w for h, w in shapes)
    args = {
        "value": rng.normal(size=(n, pixels, heads, channels)).astype(dtype),
        "locations": locations.astype(wide(dtype)),
        "weights": rng.normal(size=at).astype(wide(dtype)),
        "dy": rng.normal(size=(n, queries, heads, channels)).astype(dtype),
    }
    return call_attention(levels, args)


def call_attention(levels: Levels, args: Arrays, start: float = 1) -> Case:
    """Return a case that adds dvalue to `start`, and sets the other gradients."""
    value, locations, weights, dy = args.values()
    n, pixels, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    sizes = [n, pixels, heads, channels, queries, points, levels.normalized, len(levels.shapes)]

    def results(in_order):
        return {
            "y": filled(dy, np.nan),
            "dvalue": filled(value, start, weights.dtype),
            "dlocations": filled(locations, np.nan),
            "dweights": filled(weights, np.nan),
        }

    def reference(*args):
        options: Any = dict(levels=levels, chunk_bytes=10**6)
        dvalue, *gradients = attention.attend_backward(*args, **options)
        return [attention.attend(*args[:3], **options), dvalue + start, *gradients]

    def sort():
        find = jax.jit(lambda a: attention_native.destinations(a, levels))
        return sort_corners(find(locations), 4)

    return Case([*sizes, *np.ravel(levels.shapes)], args, results, reference, sort)


def make_far_attention(x: np.ndarray) -> Case:
    size = x.shape[1]
    args = {
        "value": x.reshape(1, size**2, 1, 3),
        "locations": full(size - 1, 1, 1, 1, 1, 1, 2),
        "weights": full(2, 1, 1, 1, 1, 1),
        "dy": np.array([[[[1, 2, 3]]]], x.dtype),
    }
    return call_attention(Levels(((size, size),), False), args, start=0)


ATTENTION = Operator(
    source="emulate_attention.cc",
    arrays=(
        "value", "locations", "weights", "dy", "destination", "source",
        "y", "dvalue", "dlocations", "dweights",
    ),
    gradients=("dvalue", "dlocations", "dweights"),
    make=make_attention,
    options=(dict(), dict(normalized=False, points=1), dict(points=2)),
    crowded=dict(channels=4, shapes=((2, 3),), n=1, queries=80),
    make_far=make_far_attention,
)  # fmt: skip


# Pooling of boxes.

BOXES = Pooling(
    (2, 2), parts=1, margin=1.0, average_inside_only=False, samples=0, has_position_gradients=True
)
PARTS = Pooling(
    (2, 3), parts=2, margin=0.5, average_inside_only=True, samples=2, has_position_gradients=True
)


def make_roi(
    dtype: Any, channels: int, pooling: Pooling = BOXES, groups: int = 1,
    size: tuple[int, int] = (4, 5), boxes: int = 3, adds: bool = False,
) -> Case:  # fmt: skip
    """Return random arrays, with a few positions at NaN, at infinity and far outside."""
    rng = np.random.default_rng(0)
    n, bins, c = 2, math.prod(pooling.output_size), channels * groups
    first = rng.uniform(-2, max(size), size=(n, boxes, bins, groups, 2))
    first[0, 0, 0, 0] = np.nan, 1
    first[0, 0, 1, 0] = 1, -np.inf
    first[0, 1, 0, 0] = -1e30, 2
    step = rng.uniform(0.3, 0.9, size=(n, boxes, 2))
    step[1, 1] = -0.4, 0  # a box with swapped corners, one without width
    count = np.broadcast_to(pooling.samples or rng.integers(1, 4, (n, boxes, 1)), (n, boxes, 2))
    count = count.astype(wide(dtype))
    count[1, 0] = 0
    args = {
        "x": rng.normal(size=(n, *size, pooling.parts**2 * c)).astype(dtype),
        "first": first.astype(wide(dtype)),
        "step": step.astype(wide(dtype)),
        "count": count,
        "dy": rng.normal(size=(n, boxes, bins, c)).astype(dtype),
    }
    return call_roi(pooling, args, adds)


def call_roi(pooling: Pooling, args: Arrays, adds: bool = False) -> Case:
    """Return a case that adds the result to ones if `adds`. A fixed order sets dx."""
    x, first, _, _, dy = args.values()
    n, boxes, bins, groups, _ = first.shape
    sizes = (
        n, *x.shape[1:3], x.shape[3] // pooling.parts**2, boxes, bins, groups, *pooling.output_size,
        pooling.parts, int(2 * pooling.margin), pooling.average_inside_only, adds,
    )  # fmt: skip

    def results(in_order):
        every = {
            "y": filled(dy, 1 if adds else np.nan),
            "dx": filled(x, np.nan if in_order else 0, first.dtype),
            "dfirst": filled(first, np.nan),
        }
        return {k: a for k, a in every.items() if k != "dfirst" or pooling.has_position_gradients}

    def reference(x, first, step, count, dy):
        initial = jnp.ones_like(dy) if adds else jnp.zeros((*dy.shape[:3], 0), dy.dtype)
        y = roi.pool(x, first, step, count, initial, pooling)
        return [y, *roi.pool_backward(x, first, step, count, dy, pooling)]

    return Case(sizes, args, results, reference)


def make_far_roi(x: np.ndarray) -> Case:
    args = {
        "x": x,
        "first": full(x.shape[1] - 1, 1, 1, 1, 1, 2),
        "step": full(1, 1, 1, 2),
        "count": full(1, 1, 1, 2),
        "dy": np.array([[[[1, 2, 3]]]], x.dtype),
    }
    return call_roi(BOXES._replace(output_size=(1, 1)), args)


ROI = Operator(
    source="emulate_roi.cc",
    arrays=("x", "first", "step", "count", "dy", "y", "dx", "dfirst"),
    gradients=("dx", "dfirst"),
    make=make_roi,
    options=(
        dict(size=(9, 11)),
        dict(pooling=PARTS, groups=2),
        dict(pooling=BOXES._replace(has_position_gradients=False), size=(1, 1), adds=True),
    ),
    crowded=dict(channels=8, size=(2, 3), boxes=65),
    make_far=make_far_roi,
    visits_pixels=True,
)
