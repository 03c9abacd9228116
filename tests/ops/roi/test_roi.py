"""What the operators on boxes compute."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import effjax
from effjax import multiscale_roi_align, roi_align
from tests.contexts import assert_trees_close
from tests.ops.roi import oracle
from tests.ops.roi.implementations import (
    CASES,
    Case,
    all_implementations,
    needs_native,
    own_rules,
)
from tests.tiers import exhaustive, plainly

double = pytest.mark.usefixtures("x64")


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(implementation, case):
    c = Case(case)
    assert_trees_close(c.got(implementation), c.want(), 1e-13)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("sizes", [(0, 3, 2), (1, 0, 2), (3, 1, 2), (1, 5, 97)])
@pytest.mark.parametrize("case", ["adaptive", "moved", "by_position_unmoved"])
def test_any_number_of_images_boxes_and_channels(implementation, case, sizes):
    batch, boxes, channels = sizes
    c = Case(case, batch, boxes, channels)
    assert_trees_close(c.got(implementation), c.want(), 1e-12)


@all_implementations
def test_whole_bins_of_pixels(implementation):
    """Bins of two by two pixels, aligned, are the means of these pixels."""
    x = np.random.default_rng(0).normal(size=(1, 6, 4, 2)).astype(np.float32)
    y = roi_align(
        x, np.array([[[0, 0, 4, 6.0]]]), output_size=(3, 2), implementation=implementation
    )
    want = x.reshape(1, 1, 3, 2, 2, 2, 2).mean((3, 5))
    assert_trees_close(y, want, 1e-6)


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("bins", [3, 7])
def test_boxes_of_a_whole_number_of_samples_have_just_these(implementation, bins):
    """2 * 7 / 7 rounded up is 2, whatever a division by seven is compiled to."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 40, 40, 2)).astype(np.float32)
    boxes = np.array([[[4.25, 3.5, 4.25 + k * bins, 3.5 + k * bins] for k in (1, 2, 3, 5)]])
    run = jax.jit(functools.partial(roi_align, output_size=bins, implementation=implementation))
    got = run(x, boxes.astype(np.float32))
    want = oracle.roi_align(x, boxes, output_size=(bins, bins))
    assert_trees_close(got, want, 1e-5)


EDGES = [-1.5, -1.0, -0.5, 0.0, 1.25, 4.0, 4.5, 5.0, 5.5]


@double
@all_implementations
def test_samples_at_and_beyond_the_border(implementation):
    """Zero unless -1 <= position <= size; moved to the outermost pixels there."""
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 3))
    at = np.array([[y, x] for y in EDGES for x in EDGES]) + 0.5
    boxes = np.concatenate([at[:, ::-1] - 1, at[:, ::-1] + 1], -1)[None]  # one sample in the middle
    dy = np.random.default_rng(1).normal(size=(1, len(at), 1, 1, 3))
    offset = np.zeros((1, len(at), 1, 1, 2))
    options = dict(output_size=(1, 1), sampling_ratio=1)

    def run(x, offset):
        return effjax.deform_roi_pool(x, boxes, offset, implementation=implementation, **options)

    y, backward = jax.vjp(run, x, offset)
    want, gradients = oracle.roi_align(x, boxes, offset, dy, **options)
    assert_trees_close([y, *backward(dy)], [want, *gradients], 1e-13)
    outside = [not (-1 <= a <= 5 and -1 <= b <= 5) for a in EDGES for b in EDGES]
    assert np.all((np.abs(y).sum((0, 2, 3, 4)) == 0) == outside)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("case", ["adaptive", "moved_adaptive", "by_position"])
def test_a_bad_pixel_stays_where_it_is(implementation, case):
    """Neither boxes that do not touch it nor those that are none know of it."""
    c = Case(case, batch=1)
    c.x[0, 4, 5] = np.resize([np.nan, np.inf, -np.inf], c.x.shape[-1])
    ones = Case(case, batch=1)
    ones.x[...] = 0
    ones.x[0, 4, 5] = 1
    touched = ones.definition().any(-1)
    y, dx, *doffset = map(np.asarray, c.got(implementation))
    assert np.array_equal(np.isfinite(y).all(-1), ~touched) and touched.any()
    assert np.isfinite(dx).all()
    if doffset and case == "moved_adaptive":
        assert np.isfinite(doffset[0][~touched]).mean() > 0.9  # beside it, the slope knows of it


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("ratio", [0, 3])
def test_boxes_without_end_cost_nothing(implementation, ratio):
    """Finite in name only: adaptive ones would have more samples than there is time for."""
    big = 1e30 if ratio == 0 else 1e9
    boxes = np.array([[[-big, -big, big, big], [0, 0, big, 3], [-big, 0, 3, 3]]], np.float32)
    x = np.ones((1, 4, 4, 2), np.float32)
    run = functools.partial(
        roi_align, output_size=1, sampling_ratio=ratio, implementation=implementation
    )
    y = np.asarray(run(x, boxes))
    assert np.isfinite(y).all() and (ratio or not y.any())


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("case", ["moved", exhaustive("by_position"), exhaustive("adaptive")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_half_precision_rounds_once(implementation, dtype, case):
    """Positions and sums are float32; results are rounded to x's dtype."""
    c = Case(case)
    c.x, c.dy = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (c.x, c.dy))
    if c.offset is not None:
        c.offset = c.offset.astype(np.float32)
    c.boxes = c.boxes.astype(np.float32)
    want = c.want()
    c.x = jnp.asarray(c.x, dtype)
    got = c.got(implementation)
    assert [a.dtype for a in got[:2]] == [dtype] * 2
    tolerance = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}[dtype]
    assert_trees_close(got, want, tolerance)


@double
def test_mixed_dtypes():
    c = Case("moved")
    x = c.x.astype(np.float32)
    y, backward = jax.vjp(lambda x, o: c.run(None)(x, o), x, c.offset)
    assert [a.dtype for a in (y, *backward(y))] == ["float32", "float32", "float64"]
    assert_trees_close(y, c.definition(x=x), 1e-6)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("case", ["ratio", "moved_adaptive", "by_position"])
def test_gradients_by_differences(implementation, case):
    c = _between_pixels(case)
    run = jax.jit(c.run(implementation))
    check_grads(run, c.args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6, eps=1e-5)


@double
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["moved", "by_position"])
def test_second_order_and_forward_mode(case):
    c = _between_pixels(case)
    run = jax.jit(c.run("xla"))
    check_grads(run, c.args, order=1, modes=["fwd"], atol=1e-5, rtol=1e-5, eps=1e-5)
    check_grads(run, c.args, order=2, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-5)


def _between_pixels(case):
    """A small case without samples at the kinks of the interpolation."""
    c = Case(case, batch=1, boxes=3, channels=3 if case == "by_position" else 2)
    c.boxes = np.array([[[2.3, 3.1, 15.2, 12.6], [-5.3, -4.2, 9.1, 8.4], [6.5, 6.4, 9.3, 8.2]]])
    if c.offset is not None:
        c.offset = np.random.default_rng(5).uniform(-0.4, 0.4, size=c.offset.shape)
    return c


@all_implementations
def test_boxes_have_no_gradient(implementation):
    c = Case("ratio", dtype=np.float32)
    boxes = c.boxes.astype(np.float32)
    run = lambda boxes: jnp.sum(c.run(implementation)(c.x, boxes=boxes) ** 2)  # noqa: E731
    assert not np.asarray(jax.grad(run)(boxes)).any()


@needs_native
@pytest.mark.parametrize("case", plainly("ratio", of=CASES))
def test_native_equals_xla_in_float32(case):
    c = Case(case, batch=3, channels=70 if case != "by_position" else 72, dtype=np.float32)
    c.boxes = c.boxes.astype(np.float32)
    c.offset = None if c.offset is None else c.offset.astype(np.float32)
    assert_trees_close(c.got("native"), c.got("xla"), 1e-4)


@needs_native
def test_twenty_runs_are_equal_to_the_bit(optimized):
    c = Case("moved", batch=2, channels=130, dtype=np.float32)
    first, *others = (c.got("native") for _ in range(20))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@all_implementations
def test_memory_has_no_axis_of_samples(implementation):
    """64 samples a bin: temporaries are a few times the result, not that."""
    x, boxes = (jax.ShapeDtypeStruct(s, "float32") for s in ((1, 32, 32, 64), (1, 64, 4)))

    def loss(x, boxes):
        y = roi_align(x, boxes, output_size=7, sampling_ratio=8, implementation=implementation)
        return jnp.sum(y**2)

    compiled = jax.jit(jax.grad(loss)).lower(x, boxes).compile()
    result = 64 * 49 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 10 * result


@own_rules
def test_keeps_its_inputs(implementation):
    c = Case("moved", dtype=np.float32)
    kept = jax.tree.leaves(
        jax.eval_shape(lambda *a: jax.vjp(c.run(implementation), *a)[1], *c.args)
    )
    if implementation != "xla":  # what JAX keeps there is its own
        assert sum(a.size for a in kept) <= c.x.size + 4 * c.offset.size


LEVELS = dict(spatial_scales=(1 / 2, 1 / 4, 1 / 8), canonical_scale=20.0, canonical_level=2)


@double
@own_rules
def test_levels_of_a_pyramid(implementation):
    """Each box from the level of its size; gradients reach that level alone."""
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(2, 32 // s, 40 // s, 3)) for s in (2, 4, 8)]
    sides = np.array([3.0, 9.9, 10, 19.9, 20, 39.9, 40, 75, 0, np.nan])
    corner = rng.uniform(0, 9, size=(2, sides.size, 2))
    boxes = np.concatenate([corner, corner + sides[:, None]], -1)
    own = np.array([0, 0, 0, 0, 1, 1, 2, 2, 0, -1])
    options = dict(output_size=2, sampling_ratio=2, aligned=True)

    def run(f):
        return multiscale_roi_align(f, boxes, implementation=implementation, **LEVELS, **options)

    y, backward = jax.vjp(run, features)
    dy = rng.normal(size=y.shape)
    for level, (x, dx) in enumerate(zip(features, backward(dy)[0], strict=True)):
        here, scale = own == level, LEVELS["spatial_scales"][level]
        want, (want_dx,) = oracle.roi_align(
            x, boxes[:, here], dy=dy[:, here], **{**options, "output_size": (2, 2)},
            spatial_scale=scale,
        )  # fmt: skip
        assert_trees_close([y[:, here], dx], [want, want_dx], 1e-12)
    assert not np.asarray(y)[:, own == -1].any()


@needs_native
def test_levels_are_written_in_place():
    """To one result, which no level but that of a box touches."""
    features = [jax.ShapeDtypeStruct((1, s, s, 32), "float32") for s in (64, 32, 16)]
    boxes = jax.ShapeDtypeStruct((1, 50, 4), "float32")
    run = jax.jit(functools.partial(multiscale_roi_align, output_size=7, **LEVELS))
    temporaries = run.lower(features, boxes).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 50 * 49 * 32 * 4 / 2


@pytest.mark.exhaustive
@double
@all_implementations
@hypothesis.settings(
    max_examples=10, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(data=st.data())
def test_random_shapes(implementation, data):
    draw = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    rng = np.random.default_rng(draw(0, 99))
    size = draw(1, 4), draw(1, 4)
    n, r, h, w, c = draw(0, 2), draw(0, 4), draw(1, 7), draw(1, 7), draw(1, 40)
    x, boxes = rng.normal(size=(n, h, w, c)), rng.uniform(-4, 12, size=(n, r, 4))
    boxes[rng.uniform(size=boxes.shape) < 0.05] = np.nan
    options = dict(
        output_size=size, spatial_scale=draw(1, 8) / 4, sampling_ratio=draw(0, 3), gamma=0.2
    )
    offset, dy = rng.normal(size=(n, r, *size, 2)), rng.normal(size=(n, r, *size, c))

    def run(x, offset):
        return effjax.deform_roi_pool(x, boxes, offset, implementation=implementation, **options)

    y, backward = jax.vjp(run, x, offset)
    want, gradients = oracle.roi_align(x, boxes, offset, dy, **options)
    assert_trees_close([y, *backward(dy)], [want, *gradients], 1e-11)
