"""The work that native kernels state to the planner, against counts by hand."""

import functools
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


def stated_work(function, *args, **options):
    """Return the FLOPs in float32 and the bytes of each native kernel that a function calls.

    The FLOPs of a kernel that does not state them are None.
    """
    run = jax.jit(functools.partial(function, **options))
    hlo: Any = run.lower(*args).compiler_ir("hlo")
    counter = WorkCounter(module := parse(hlo.as_hlo_module().to_string()))
    calls = (i for i in module.instructions.values() if 'call_target="effjax_' in i.attributes)
    found = {}
    for call in calls:
        work = counter.work(call)
        assert set(work.flops) == (set() if work.unknown else {"f32_highest"})
        name = call.attributes.partition("effjax_")[2].partition('"')[0]
        found[name] = work.flops.get("f32_highest"), work.memory_bytes
    return found


# 2 images of 16 x 16 pixels with 8 channels, sampled by 9 taps at 3 of 16 rows of 10 columns.
X = 2 * 16 * 16 * 8
ROWS = 2 * 3 * 10 * 9  # taps of three rows
SAMPLES = ROWS * 8


def test_deform_conv():
    options: dict[str, Any] = {"geometry": Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)}
    x = shape(2, 16, 16, 8, dtype="bfloat16")
    offset, mask, row = shape(2, 16, 10, 18), shape(2, 16, 10, 9), shape(1, dtype="int32")
    dcolumns, dx = shape(2, 3, 10, 72), shape(2, 16, 16, 8)
    work = stated_work(deform_conv._columns, x, offset, mask, row, rows=3, **options)
    # The image and columns in bfloat16; an offset of two numbers and a mask for each tap.
    assert [*work.values()] == [(8 * SAMPLES, 2 * X + 2 * SAMPLES + 4 * (2 + 1) * ROWS)]
    args = x, offset, mask, row, dcolumns, dx, offset, mask
    moves = 2 * X + 4 * SAMPLES + 2 * 4 * (2 + 1) * ROWS
    # Four additions in float32 for each sample.
    work = stated_work(deform_conv._columns_backward, *args, **options)
    assert [*work.values()] == [(16 * SAMPLES, moves + 4 * 4 * SAMPLES)]
    work = stated_work(deform_conv.DETERMINISTIC_CUDA.columns_backward, *args, **options)
    assert work["deform_columns_backward"] == (8 * SAMPLES, moves)
    # Two int32 for each corner of a tap; dx is read and written.
    corners = 2 * 4 * 4 * ROWS
    moves = 4 * SAMPLES + 4 * 3 * ROWS + corners + 2 * 4 * X
    assert work["deform_scatter_sorted"][1] == moves


def test_deform_attention():
    options = {"levels": Levels(((8, 8), (4, 4)), normalized=True), "chunk_bytes": 1}
    value, points = shape(2, 80, 2, 32), (2, 2, 2, 2, 4)  # few samples: not all pixels are read
    args = value, shape(*points, 2), shape(*points)
    samples, numbers, y = 64 * 32, 4 * 64, 4 * 2 * 2 * 2 * 32
    sampled = 4 * 4 * samples
    work = stated_work(attention.attend, *args, **options)
    assert [*work.values()] == [(8 * samples, sampled + 3 * numbers + y)]
    work = stated_work(attention.attend_backward, *args, shape(2, 2, 2, 32), **options)
    zeroed, added = 4 * 2 * 80 * 2 * 32, 4 * 4 * samples
    assert [*work.values()] == [(16 * samples, sampled + 6 * numbers + y + zeroed + added)]


@pytest.mark.parametrize("samples", [2, 0])
def test_roi(samples):
    options = {"pooling": Pooling((2, 2), 1, 1.0, False, samples, True)}
    step = shape(2, 5, 2)
    args = shape(2, 16, 16, 8), shape(2, 5, 4, 1, 2), step, step
    bins, boxes, numbers = 4 * 2 * 2 * 5 * 4, 2 * 4 * 2 * 2 * 5, 2 * 5 * 4 * 8
    known = numbers * max(samples, 1) ** 2
    sampled = 4 * min(X, 4 * known)
    work = stated_work(roi.pool, *args, shape(2, 5, 4, 0), **options)
    flops = 8 * known if samples else None
    assert [*work.values()] == [(flops, sampled + bins + boxes + 4 * numbers)]
    moves = sampled + 2 * bins + boxes + 4 * numbers + 4 * X
    for run, added in ((roi.pool_backward, 4 * 4 * known), (roi.deterministic_pool_backward, 0)):
        ((_, found),) = stated_work(run, *args, shape(2, 5, 4, 8), **options).values()
        assert found == moves + added


def test_symbolic_sizes_state_no_work():
    """An exported program has none, because the batch size is unknown."""
    (n,) = jax.export.symbolic_shape("n")
    run = functools.partial(roi.pool, pooling=Pooling((2, 2), 1, 1.0, False, 2, False))
    exported = jax.export.export(jax.jit(run), disabled_checks=export_checks())(
        shape(n, 4, 4, 2), shape(n, 3, 4, 1, 2), *[shape(n, 3, 2)] * 2, shape(n, 3, 4, 0)
    )
    assert "effjax_roi_pool" in exported.mlir_module()
    assert "memory_bytes" not in exported.mlir_module()
