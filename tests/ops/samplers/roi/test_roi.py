"""Specific properties of the operators that pool boxes: errors, borders, half precision, memory."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import multiscale_roi_align, roi_align
from tests.contexts import assert_trees_close
from tests.ops.battery import (
    NO_NATIVE,
    on_random_shapes,
    own_rules_or_xla,
)
from tests.ops.samplers.roi import oracle
from tests.ops.samplers.roi.cases import make, make_from
from tests.tiers import vary

double = pytest.mark.usefixtures("x64")
X = np.zeros((2, 5, 4, 8), np.float32)
GOOD = dict(x=X, boxes=np.zeros((2, 3, 4), np.float32), output_size=2)


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [
        ("roi_align", "x", X[0]),
        ("roi_align", "boxes", np.zeros((2, 3, 5))),
        ("roi_align", "boxes", np.zeros((1, 3, 4))),
        ("roi_align", "spatial_scale", 0.0),
        ("roi_align", "sampling_ratio", -2),
        ("deform_roi_pool", "offset", np.zeros((2, 3, 2, 2, 3))),
        ("deform_psroi_pool", "offset", np.zeros((2, 3, 2, 2, 6))),
        ("deform_psroi_pool", "group_size", 3),
        ("multiscale_roi_align", "features", [X, X[..., :7]]),
        ("multiscale_roi_align", "spatial_scales", (0.5, 0.3)),
    ],
)
def test_rejects_bad_arguments(function, argument, value):
    good = dict(GOOD)
    if function == "multiscale_roi_align":
        good |= {"features": [good.pop("x")] * 2, "spatial_scales": (1.0, 0.5)}
    elif function == "deform_psroi_pool":
        good["group_size"] = 2
    with pytest.raises(ValueError, match=rf"`{argument}\b"):
        jax.eval_shape(lambda: getattr(effjax, function)(**good | {argument: value}))


OPERATORS = {
    "roi_align": roi_align,
    "multiscale_roi_align": lambda x, **options: multiscale_roi_align(
        [x], spatial_scales=[1.0], **options
    ),
    "deform_roi_pool": effjax.deform_roi_pool,
    "deform_psroi_pool": effjax.deform_psroi_pool,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_integer_boxes(name):
    """They are positions, also for images of half precision."""
    x = np.random.default_rng(0).normal(size=(1, 9, 9, 2)).astype(jnp.bfloat16)
    boxes = np.array([[[1, 0, 7, 5], [2, 3, 9, 9]]])
    got, want = (
        OPERATORS[name](x=x, boxes=boxes.astype(dtype), output_size=2)
        for dtype in (np.int64, np.float32)
    )
    np.testing.assert_array_equal(got, want)


@own_rules_or_xla
def test_bins_of_whole_pixels(implementation):
    """Aligned bins of two by two pixels give the means of these pixels."""
    x = np.random.default_rng(0).normal(size=(1, 6, 4, 2)).astype(np.float32)
    y = roi_align(
        x, np.array([[[0, 0, 4, 6.0]]]), output_size=(3, 2), implementation=implementation
    )
    want = x.reshape(1, 1, 3, 2, 2, 2, 2).mean((3, 5))
    assert_trees_close(y, want, 1e-6)


@own_rules_or_xla
def test_adaptive_count_of_samples_is_exact(implementation):
    """2 * 7 / 7 rounds up to 2, however a division by seven is compiled."""
    rng, bins = np.random.default_rng(0), 7
    x = rng.normal(size=(1, 40, 40, 2)).astype(np.float32)
    boxes = np.array([[[4.25, 3.5, 4.25 + k * bins, 3.5 + k * bins] for k in (1, 2, 3, 5)]])
    run = jax.jit(functools.partial(roi_align, output_size=bins, implementation=implementation))
    got = run(x, boxes.astype(np.float32))
    want = oracle.roi_align(x, boxes, output_size=(bins, bins))
    assert_trees_close(got, want, 1e-5)


EDGES = [-1.5, -1.0, -0.5, 0.0, 1.25, 4.0, 4.5, 5.0, 5.5]


@double
@own_rules_or_xla
def test_samples_at_and_beyond_the_border(implementation):
    """Samples are zero unless -1 <= position <= size, and clamped to the outermost pixels."""
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 3))
    at = np.array([[y, x] for y in EDGES for x in EDGES]) + 0.5
    boxes = np.concatenate([at[:, ::-1] - 1, at[:, ::-1] + 1], -1)[None]  # one sample in the middle
    dy = np.random.default_rng(1).normal(size=(1, len(at), 1, 1, 3))
    offset = np.zeros((1, len(at), 1, 1, 2))
    options = dict(output_size=(1, 1), sampling_ratio=1)
    c = make_from("deform_roi_pool", x, offset, boxes, dy, options)
    got = c.got(implementation)
    assert_trees_close(got, c.want(), 1e-13)
    outside = [not (-1 <= a <= 5 and -1 <= b <= 5) for a in EDGES for b in EDGES]
    assert np.all((np.abs(got[0]).sum((0, 2, 3, 4)) == 0) == outside)


@double
@own_rules_or_xla
@vary("case", ["offset_adaptive", "by_position"])
def test_non_finite_pixel_stays_local(implementation, case):
    """Only boxes that touch the pixel are affected."""
    c = make(case, batch=1)
    x = c.args[0]
    ones = np.zeros_like(x)
    ones[0, 4, 5] = 1
    touched = c.oracle(ones, *c.args[1:], c.dy)[0].any(-1)
    x[0, 4, 5] = np.resize([np.nan, np.inf, -np.inf], x.shape[-1])
    y, dx, *doffset = map(np.asarray, c.got(implementation))
    assert np.array_equal(np.isfinite(y).all(-1), ~touched) and touched.any()
    assert np.isfinite(dx).all()
    if case == "offset_adaptive":
        # The slope at a neighbor of the pixel depends on it.
        assert np.isfinite(doffset[0][~touched]).mean() > 0.9


@own_rules_or_xla
@vary("ratio", [0, 3])
def test_huge_boxes_terminate(implementation, ratio):
    """Adaptive boxes would have too many samples to compute."""
    big = 1e30 if ratio == 0 else 1e9
    boxes = np.array([[[-big, -big, big, big], [0, 0, big, 3], [-big, 0, 3, 3]]], np.float32)
    x = np.ones((1, 4, 4, 2), np.float32)
    run = functools.partial(
        roi_align, output_size=1, sampling_ratio=ratio, implementation=implementation
    )
    y = np.asarray(run(x, boxes))
    assert np.isfinite(y).all() and (ratio or not y.any())


@own_rules_or_xla
@vary("dtype, case", [("bfloat16", "offset"), ("float16", "adaptive"), ("bfloat16", "by_position")])
def test_half_precision_rounds_once(implementation, dtype, case):
    """Positions and sums are float32; results are rounded to the dtype of x."""
    c = make(case)
    x, *others = c.args
    x, others = jnp.asarray(x, dtype), [a.astype(np.float32) for a in others]
    c.dy = np.asarray(jnp.asarray(c.dy, dtype), np.float64)
    c.args = [np.asarray(x, np.float64), *others]
    want = c.want()
    c.args = [x, *others]
    got = c.got(implementation)
    assert [a.dtype for a in got[:2]] == [dtype] * 2
    tolerance = {"bfloat16": 4e-3, "float16": 5e-4}[dtype]
    assert_trees_close(got, want, tolerance)


@double
def test_mixed_dtypes():
    c = make("offset")
    x, offset, boxes = c.args
    x = x.astype(np.float32)
    y, backward = jax.vjp(jax.jit(lambda x, o: c.bind(None)(x, o, boxes)), x, offset)
    assert [a.dtype for a in (y, *backward(y))] == ["float32", "float32", "float64"]
    assert_trees_close(y, c.oracle(x, offset, boxes, c.dy)[0], 1e-6)


@own_rules_or_xla
def test_boxes_have_no_gradient(implementation):
    c = make("ratio", dtype=np.float32)
    run = c.bind(implementation)
    gradient = jax.jit(jax.grad(lambda boxes: jnp.sum(run(c.args[0], boxes) ** 2)))
    assert not np.asarray(gradient(c.args[1].astype(np.float32))).any()


@own_rules_or_xla
def test_residual_size(implementation):
    c = make("offset", dtype=np.float32)
    run = c.bind(implementation)
    residuals = jax.eval_shape(lambda x, o: jax.vjp(run, x, o, c.args[2])[1], *c.args[:2])
    assert sum(a.size for a in jax.tree.leaves(residuals)) <= c.args[0].size + 4 * c.args[1].size


@own_rules_or_xla
def test_memory_has_no_axis_of_samples(implementation):
    """Temporaries are a few times the result, not its 64 samples per bin."""
    x, boxes = (jax.ShapeDtypeStruct(s, "float32") for s in ((1, 32, 32, 64), (1, 64, 4)))

    def loss(x, boxes):
        y = roi_align(x, boxes, output_size=7, sampling_ratio=8, implementation=implementation)
        return jnp.sum(y**2)

    compiled = jax.jit(jax.grad(loss)).lower(x, boxes).compile()
    result = 64 * 49 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 10 * result


LEVELS = dict(spatial_scales=(1 / 2, 1 / 4, 1 / 8), canonical_scale=20.0, canonical_level=2)


@double
@own_rules_or_xla
def test_levels_of_a_pyramid(implementation):
    """Each box reads from the level of its size, and gradients reach only that level."""
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(2, 32 // s, 40 // s, 3)) for s in (2, 4, 8)]
    sides = np.array([3.0, 9.9, 10, 19.9, 20, 39.9, 40, 75, 0, np.nan])
    corner = rng.uniform(0, 9, size=(2, sides.size, 2))
    boxes = np.concatenate([corner, corner + sides[:, None]], -1)
    own = np.array([0, 0, 0, 0, 1, 1, 2, 2, 0, -1])
    options = dict(output_size=2, sampling_ratio=2, aligned=True)

    def run(f):
        return multiscale_roi_align(f, boxes, implementation=implementation, **LEVELS, **options)

    y, backward = jax.vjp(jax.jit(run), features)
    dy = rng.normal(size=y.shape)
    for level, (x, dx) in enumerate(zip(features, backward(dy)[0], strict=True)):
        here, scale = own == level, LEVELS["spatial_scales"][level]
        want, (want_dx,) = oracle.roi_align(
            x, boxes[:, here], dy=dy[:, here], **{**options, "output_size": (2, 2)},
            spatial_scale=scale,
        )  # fmt: skip
        assert_trees_close([y[:, here], dx], [want, want_dx], 1e-12)
    assert not np.asarray(y)[:, own == -1].any()


def test_boxes_with_swapped_borders_have_no_level():
    """As in torchvision, whose square root of the negative area is NaN."""
    features = [jnp.ones((1, 32 // s, 40 // s, 3)) for s in (2, 4, 8)]
    boxes = jnp.array([[[9.0, 2, 3, 8], [3, 8, 9, 2], [3, 2, 9, 8]]])
    y = multiscale_roi_align(features, boxes, output_size=2, **LEVELS)
    assert not y[0, :2].any() and y[0, 2].all()


@pytest.mark.skipif(NO_NATIVE, reason="the native library is not built")
def test_levels_are_written_in_place():
    """All levels write to one result."""
    features = [jax.ShapeDtypeStruct((1, s, s, 32), "float32") for s in (64, 32, 16)]
    boxes = jax.ShapeDtypeStruct((1, 50, 4), "float32")
    run = jax.jit(functools.partial(multiscale_roi_align, output_size=7, **LEVELS))
    temporaries = run.lower(features, boxes).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 50 * 49 * 32 * 4 / 2


@on_random_shapes
def test_random_shapes(implementation, data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng = np.random.default_rng(draw(0, 99))
    size = draw(1, 4), draw(1, 4)
    n, r, h, w, c = draw(0, 2), draw(0, 4), draw(1, 7), draw(1, 7), draw(1, 40)
    x, boxes = rng.normal(size=(n, h, w, c)), rng.uniform(-4, 12, size=(n, r, 4))
    boxes[rng.uniform(size=boxes.shape) < 0.05] = np.nan
    options = dict(
        output_size=size, spatial_scale=draw(1, 8) / 4, sampling_ratio=draw(0, 3), gamma=0.2
    )
    offset, dy = rng.normal(size=(n, r, *size, 2)), rng.normal(size=(n, r, *size, c))
    case = make_from("deform_roi_pool", x, offset, boxes, dy, options)
    assert_trees_close(case.got(implementation), case.want(), 1e-11)
