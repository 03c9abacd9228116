"""Specific properties of the operators that pool boxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import multiscale_roi_align, roi_align
from tests.contexts import assert_trees_close
from tests.ops.arguments import GOOD
from tests.ops.battery import NO_NATIVE, own_rules_or_xla
from tests.ops.samplers.roi import oracle
from tests.ops.samplers.roi.cases import make
from tests.tiers import vary

double = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("name", [name for name, args in GOOD.items() if "boxes" in args])
def test_integer_boxes(name):
    """They are positions, also for images of half precision."""
    rng, (images, *_) = np.random.default_rng(0), GOOD[name]
    x = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(jnp.bfloat16), GOOD[name][images])
    boxes = np.array([[[1, 0, 7, 5], [2, 3, 9, 9], [0, 1, 2, 3]]] * 2)
    got, want = (
        getattr(effjax, name)(**GOOD[name] | {images: x, "boxes": boxes.astype(dtype)})
        for dtype in (np.int64, np.float32)
    )
    np.testing.assert_array_equal(got, want)


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
def test_boxes_have_no_gradient(implementation):
    c = make("ratio", dtype=np.float32)
    run = c.bind(implementation)
    gradient = jax.jit(jax.grad(lambda boxes: jnp.sum(run(c.args[0], boxes) ** 2)))
    assert not np.asarray(gradient(c.args[1].astype(np.float32))).any()


LEVELS = dict(spatial_scales=(1 / 2, 1 / 4, 1 / 8), canonical_scale=20.0, canonical_level=2)


@own_rules_or_xla
def test_level_of_each_box(implementation):
    """As in torchvision, boxes without a level, whose area is NaN or negative, give zeros.

    A level holds its number plus one.
    """
    features = [jnp.full((1, 128 // s, 128 // s, 3), 1.0 + i) for i, s in enumerate((2, 4, 8))]
    sides = {3.0: 0, 9.9: 0, 10: 0, 19.9: 0, 20: 1, 39.9: 1, 40: 2, 75: 2, 0: 0, np.nan: -1}
    corner = np.random.default_rng(0).uniform(8, 40, size=(1, len(sides), 2))
    boxes = np.concatenate([corner, corner + np.array([*sides])[:, None]], -1)
    swapped = [[19.0, 12, 13, 18], [13, 18, 19, 12], [13, 12, 19, 18]]
    boxes = np.concatenate([boxes, [swapped]], 1).astype(np.float32)
    own = np.array([*sides.values(), -1, -1, 0])

    @jax.jit
    def run(features):
        options = dict(output_size=2, sampling_ratio=2, implementation=implementation)
        return multiscale_roi_align(features, boxes, **LEVELS, **options)

    y, backward = jax.vjp(run, features)
    want = np.broadcast_to(1.0 + own[:, None, None, None], y[0].shape)
    np.testing.assert_allclose(y[0], want, rtol=1e-6)
    for level, dx in enumerate(backward(jnp.ones_like(y))[0]):
        np.testing.assert_allclose(dx.sum(), want[own == level].size, rtol=1e-5)


@pytest.mark.skipif(NO_NATIVE, reason="the native library is not built")
def test_levels_are_written_in_place():
    """All levels write to one result."""
    features = [jax.ShapeDtypeStruct((1, s, s, 32), "float32") for s in (64, 32, 16)]
    boxes = jax.ShapeDtypeStruct((1, 50, 4), "float32")
    run = jax.jit(functools.partial(multiscale_roi_align, output_size=7, **LEVELS))
    temporaries = run.lower(features, boxes).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 50 * 49 * 32 * 4 / 2
