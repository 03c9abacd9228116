"""Specific properties of ms_deform_attn: borders, half precision, memory."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import ms_deform_attn
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from tests.contexts import assert_trees_close
from tests.ops.battery import (
    IMPLEMENTATIONS,
    on_random_shapes,
    own_rules_or_xla,
)
from tests.ops.samplers.deform_attention.cases import between_pixels, make, make_random
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

double = pytest.mark.usefixtures("x64")


@double
@own_rules_or_xla
def test_pixel_centers_are_exact(implementation):
    # Weights are exact in a level whose sizes are powers of two.
    shapes = ((1, 1), (4, 8))
    value = np.random.default_rng(0).normal(size=(1, 33, 1, 3))
    rows, columns = np.mgrid[:4, :8]
    at = np.stack([(columns + 0.5) / 8, (rows + 0.5) / 4], -1).reshape(1, 32, 1, 1, 1, 2)
    locations = np.concatenate([np.full_like(at, np.nan), at], 3)
    weights = np.ones((1, 32, 1, 2, 1))
    y = ms_deform_attn(value, shapes, locations, weights, implementation=implementation)
    np.testing.assert_array_equal(y, value[:, 1:, 0])


EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -1.0, -0.125, -0.124, 0.0, 1.0, 1.124, 1.125, 9.0]


@double
@own_rules_or_xla
def test_locations_at_and_beyond_the_border(implementation):
    """Results and gradients in a level of four by four are zero unless -1/8 < location < 9/8."""
    n = len(EDGES)
    c = make_random(((4, 4),), heads=1, depth=1, points=1, batch=2 * n, queries=1)
    c.args[1] = np.random.default_rng(0).uniform(0.2, 0.8, size=c.args[1].shape)
    c.args[1][:n, ..., 0] = c.args[1][n:, ..., 1] = np.reshape(EDGES, (-1, 1, 1, 1, 1))
    got = c.got(implementation)
    assert_trees_close(got, c.want(), 1e-13)
    inside = np.array([-0.125 < e < 1.125 for e in EDGES] * 2)
    for a in got:
        a = np.abs(np.asarray(a)).reshape(2 * n, -1).sum(1)
        assert np.all(a[~inside] == 0) and np.all(a[inside] > 0)


@own_rules_or_xla
def test_non_finite_pixel_stays_local(implementation):
    """Corners and samples out of range neither read nor scale other pixels."""
    c = make("levels", dtype=np.float32)
    value, locations, weights = c.args
    locations[:] = np.clip(locations, 0.0, 0.99)
    last_level = 26  # its only pixel
    for pixel in (0, last_level):
        value[:, pixel] = np.nan
    locations[:, :, :, 0] = [0.5, 1.1]  # below the first level, away from its first pixel
    locations[:, :, :, 2] = [2.0, 0.5]  # right of the last
    locations[:, 0, :, 1] = np.nan
    weights[:, 0, :, 1] = np.inf
    weights[:, :, :, 2] = np.nan
    for a in c.got(implementation):
        assert np.all(np.isfinite(a))


@double
def test_mixed_second_derivative():
    """The result is bilinear in weights and pixels: the derivative by both is a gradient."""
    c = between_pixels("one")
    value, locations, weights = c.args
    run = c.bind("xla")
    gradient = jax.jit(jax.grad(lambda v, w: jnp.sum(run(v, locations, w) * c.dy), 0))
    _, mixed = jax.jvp(lambda w: gradient(value, w), (weights,), (np.ones_like(weights),))
    assert_trees_close(mixed, gradient(value, np.ones_like(weights)), 1e-12)


@own_rules_or_xla
@vary("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(implementation, dtype):
    """Sums are float32, in slices or not."""
    c = make("wide", queries=9)
    c.args = [jnp.asarray(a, dtype) for a in c.args]
    c.dy = jnp.asarray(c.dy, dtype)
    got = c.got(implementation, workspace_bytes=20_000)
    assert all(a.dtype == dtype for a in got)
    c.args, c.dy = [np.asarray(a, np.float64) for a in c.args], np.asarray(c.dy, np.float64)
    for a, b in zip(got, c.want(), strict=True):
        rounded = np.asarray(jnp.asarray(b, jnp.float32).astype(dtype), np.float64)
        epsilon = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(a, np.float64), rounded, rtol=2 * epsilon, atol=1e-4)


@own_rules_or_xla
def test_locations_are_exact_in_half_precision(implementation):
    """Locations are computed in float32; these lie a quarter right of each center."""
    value = jnp.asarray(np.arange(256).reshape(1, 256, 1, 1) % 2, jnp.bfloat16)
    at = np.arange(128) * 2 / 256 + 0.75 / 256
    locations = np.stack([at, np.full_like(at, 0.5)], -1).reshape(1, 128, 1, 1, 1, 2)
    weights = jnp.ones((1, 128, 1, 1, 1))
    y = ms_deform_attn(
        value, ((1, 256),), jnp.float32(locations), weights, implementation=implementation
    )
    assert_trees_close(y[0, :, 0], np.full(128, 0.25), 0)


def test_mixed_dtypes():
    c = make("levels", dtype=np.float32)
    value, locations, weights = map(jnp.asarray, c.args)
    run = c.bind(None)
    y, backward = jax.vjp(run, value.astype(jnp.bfloat16), locations, weights)
    dtypes = [a.dtype for a in (y, *backward(y))]
    assert dtypes == ["bfloat16", "bfloat16", "float32", "float32"]
    with jax.enable_x64(True):
        assert jax.eval_shape(run, value, np.float64(locations), weights).dtype == jnp.float32


LARGE = dict(shapes=((8, 8), (4, 4)), heads=2, depth=32, points=4)


def _gradients(implementation, workspace_bytes):
    run = make_random(**LARGE, batch=1, queries=1).bind(
        implementation, workspace_bytes=workspace_bytes
    )
    return jax.grad(lambda *a: jnp.sum(run(*a).astype(jnp.float32) ** 2), argnums=(0, 1, 2))


def _shapes(dtype, queries):
    levels, heads, depth, points = len(LARGE["shapes"]), LARGE["heads"], 32, LARGE["points"]
    pixels = sum(h * w for h, w in LARGE["shapes"])
    at = 1, queries, heads, levels, points
    shapes = ((1, pixels, heads, depth), dtype), ((*at, 2), "float32"), (at, "float32")
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def _largest(hlo):
    """Return the number of elements of the largest array that a program names."""
    sizes = re.findall(r"(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", hlo)
    return max(np.prod([int(n) for n in size.split(",")]) for size in sizes)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [(name, "float32" if name == "xla" else "bfloat16") for name in IMPLEMENTATIONS],
    indirect=["implementation"],
)
def test_no_array_of_all_samples(implementation, dtype):
    """No program has an array [queries, levels, points, channels]."""
    args, mib = _shapes(dtype, 1000), 2**20
    samples = args[2].size * 32
    program = jax.jit(_gradients(implementation, mib // 2)).lower(*args).compile()
    # In addition to the workspace: y, its gradient, float32 gradients, and slices of locations.
    most = mib // 2 + sum(3 * 4 * a.size for a in args) + 3 * 4 * 1000 * 64
    assert program.memory_analysis().temp_size_in_bytes <= most < 4 * samples
    assert _largest(program.as_text()) <= samples / 4


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_no_array_of_all_samples_on_a_gpu():
    args, mib = _shapes("bfloat16", 4000), 2**20
    planned = plan(_gradients("xla", 2 * mib), *args)
    assert _largest(planned.hlo) <= args[2].size * 32 / 4
    most = 2 * mib + sum(3 * 4 * a.size for a in args) + 3 * 4 * 4000 * 64
    assert planned.device.temporaries <= most


def test_plan_uses_the_slices_of_a_gpu():
    """The slices of a CPU are smaller; the order of tracing must not matter."""
    args = _shapes("float32", 4000)
    for platforms in ("cpu", "cuda"), ("cuda", "cpu"):
        run = lambda *a: ms_deform_attn(a[0], LARGE["shapes"], *a[1:], implementation="xla")  # noqa: E731
        for platform in platforms:
            with trace_for_platform(platform):
                text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text) == (platform == "cpu")


@on_random_shapes
def test_random_shapes(implementation, data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    c = make_random(
        shapes=tuple((draw(1, 4), draw(1, 4)) for _ in range(draw(1, 3))), heads=draw(1, 3),
        depth=draw(1, 40), points=draw(1, 3), batch=draw(0, 2), queries=draw(0, 5),
        seed=draw(0, 99), spread=draw(0, 4) / 4,
    )  # fmt: skip
    got = c.got(implementation, workspace_bytes=2 ** draw(4, 20))
    assert_trees_close(got, c.want(), 1e-12)
