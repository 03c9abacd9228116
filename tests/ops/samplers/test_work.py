"""The work that native kernels state to the planner, against counts by hand."""

from typing import Any

import jax
import pytest

from effjax.memory.read.hlo import parse
from effjax.memory.time.work import WorkCounter
from effjax.native import export_checks
from effjax.ops.samplers.deform_attention import native as attention
from effjax.ops.samplers.deform_attention.reference import Levels
from effjax.ops.samplers.deform_conv import native as deform_conv
from effjax.ops.samplers.deform_conv.reference import Geometry
from effjax.ops.samplers.roi import native as roi
from effjax.ops.samplers.roi.reference import Pooling


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def stated_work(function, *args):
    """Return the FLOPs and bytes of each native kernel that a function calls."""
    hlo: Any = jax.jit(function).lower(*args).compiler_ir("hlo")
    counter = WorkCounter(module := parse(hlo.as_hlo_module().to_string()))
    calls = (i for i in module.instructions.values() if 'call_target="effjax_' in i.attributes)
    return {
        call.attributes.partition("effjax_")[2].partition('"')[0]: counter.work(call)
        for call in calls
    }


# 2 images of 16 x 16 pixels with 8 channels, sampled by 9 taps at 3 of 16 rows of 10 columns.
X = 2 * 16 * 16 * 8
ROWS = 2 * 3 * 10 * 9  # taps of three rows
SAMPLES = ROWS * 8


def test_deform_conv():
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    x = shape(2, 16, 16, 8, dtype="bfloat16")
    offset, mask, row = shape(2, 16, 10, 18), shape(2, 16, 10, 9), shape(1, dtype="int32")
    dcolumns, dx = shape(2, 3, 10, 72), shape(2, 16, 16, 8)

    def forward(*args):
        return deform_conv._columns(*args, geometry=geometry, rows=3)

    (work,) = stated_work(forward, x, offset, mask, row).values()
    assert work.flops == {"f32_highest": 8 * SAMPLES} and not work.unknown
    # The image and columns in bfloat16; an offset of two numbers and a mask for each tap.
    assert work.memory_bytes == 2 * X + 2 * SAMPLES + 4 * (2 + 1) * ROWS

    def backward(*args):
        return deform_conv.DETERMINISTIC_CUDA.columns_backward(*args, geometry=geometry)

    args = x, offset, mask, row, dcolumns, dx, offset, mask
    work = stated_work(backward, *args)
    in_order, scatter = work["deform_columns_backward"], work["deform_scatter_sorted"]
    moves = 2 * X + 4 * SAMPLES + 2 * 4 * (2 + 1) * ROWS
    assert in_order.flops == {"f32_highest": 8 * SAMPLES} and in_order.memory_bytes == moves
    # Two int32 for each corner of a tap; dx is read and written.
    corners = 2 * 4 * 4 * ROWS
    assert scatter.memory_bytes == 4 * SAMPLES + 4 * 3 * ROWS + corners + 2 * 4 * X
    (work,) = stated_work(
        lambda *args: deform_conv._columns_backward(*args, geometry=geometry), *args
    ).values()
    # Four additions in float32 for each sample.
    assert work.flops == {"f32_highest": 16 * SAMPLES}
    assert work.memory_bytes == moves + 4 * 4 * SAMPLES


def test_deform_attention():
    levels = Levels(((8, 8), (4, 4)), normalized=True)
    value, points = shape(2, 80, 2, 32), (2, 2, 2, 2, 4)  # few samples: not all pixels are read
    locations, weights, dy = shape(*points, 2), shape(*points), shape(2, 2, 2, 32)
    samples, numbers, y = 64 * 32, 4 * 64, 4 * 2 * 2 * 2 * 32

    def forward(*args):
        return attention.attend(*args, levels=levels, workspace_bytes=1)

    (work,) = stated_work(forward, value, locations, weights).values()
    assert work.flops == {"f32_highest": 8 * samples}
    sampled = 4 * 4 * samples
    assert work.memory_bytes == sampled + 3 * numbers + y

    def backward(*args):
        return attention.attend_backward(*args, levels=levels, workspace_bytes=1)

    (work,) = stated_work(backward, value, locations, weights, dy).values()
    assert work.flops == {"f32_highest": 16 * samples}
    zeroed, added = 4 * 2 * 80 * 2 * 32, 4 * 4 * samples
    assert work.memory_bytes == sampled + 6 * numbers + y + zeroed + added


@pytest.mark.parametrize("samples", [2, 0])
def test_roi(samples):
    pooling = Pooling((2, 2), 1, 1.0, False, samples, True)
    x, first, step = shape(2, 16, 16, 8), shape(2, 5, 4, 1, 2), shape(2, 5, 2)
    y = shape(2, 5, 4, 8)
    bins, boxes, numbers = 4 * 2 * 2 * 5 * 4, 2 * 4 * 2 * 2 * 5, 2 * 5 * 4 * 8

    (work,) = stated_work(
        lambda *args: roi.pool(*args, pooling=pooling), x, first, step, step, shape(2, 5, 4, 0)
    ).values()
    flops = {"f32_highest": 8 * numbers * samples**2} if samples else {}
    assert work.flops == flops and bool(work.unknown) == (not samples)
    sampled = 4 * min(X, 4 * numbers * max(samples, 1) ** 2)
    assert work.memory_bytes == sampled + bins + boxes + 4 * numbers

    def backward(*args):
        return roi.pool_backward(*args, pooling=pooling)

    (work,) = stated_work(backward, x, first, step, step, y).values()
    added = 4 * 4 * numbers * max(samples, 1) ** 2
    assert work.memory_bytes == sampled + 2 * bins + boxes + 4 * numbers + 4 * X + added
    (work,) = stated_work(
        lambda *args: roi.deterministic_pool_backward(*args, pooling=pooling),
        x, first, step, step, y,
    ).values()  # fmt: skip
    assert work.memory_bytes == sampled + 2 * bins + boxes + 4 * numbers + 4 * X


def test_symbolic_sizes_state_no_work():
    """An exported program has none, because the batch size is unknown."""
    (n,) = jax.export.symbolic_shape("n")
    pooling = Pooling((2, 2), 1, 1.0, False, 2, False)
    exported = jax.export.export(
        jax.jit(lambda *args: roi.pool(*args, pooling=pooling)),
        disabled_checks=export_checks(),
    )(shape(n, 4, 4, 2), shape(n, 3, 4, 1, 2), *[shape(n, 3, 2)] * 2, shape(n, 3, 4, 0))
    assert "effjax_roi_pool" in exported.mlir_module()
    assert "memory_bytes" not in exported.mlir_module()
