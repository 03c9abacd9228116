import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from effjax import ms_deform_attn
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from tests.contexts import assert_trees_close
from tests.ops.deform_attention.implementations import (
    CASES,
    Case,
    all_implementations,
    all_rules,
    needs_native,
    run_by,
)
from tests.programs import needs_gpu_compiler
from tests.tiers import plainly

double = pytest.mark.usefixtures("x64")


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(attn, case):
    c = Case(case)
    assert_trees_close(c.got(attn), c.want(), 1e-13)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (1, 1), (3, 0), (3, 33), (2, 64)])
def test_any_batch_and_queries(attn, batch, queries):
    c = Case("levels", batch=batch, queries=queries)
    assert_trees_close(c.got(attn), c.want(), 1e-12)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("workspace_bytes", [1, 3000, 10_000])
def test_slices_of_queries(attn, workspace_bytes):
    c = Case("levels", queries=11)
    assert_trees_close(c.got(attn, workspace_bytes=workspace_bytes), c.want(), 1e-13)


@double
@all_implementations
def test_centers_of_pixels(attn):
    """Of a level whose sizes are powers of two, where shares are exact."""
    shapes = ((1, 1), (4, 8))
    value = np.random.default_rng(0).normal(size=(1, 33, 1, 3))
    rows, columns = np.mgrid[:4, :8]
    at = np.stack([(columns + 0.5) / 8, (rows + 0.5) / 4], -1).reshape(1, 32, 1, 1, 1, 2)
    locations = np.concatenate([np.full_like(at, np.nan), at], 3)
    y = attn(value, shapes, locations, np.ones((1, 32, 1, 2, 1)))
    np.testing.assert_array_equal(y, value[:, 1:, 0])


EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -1.0, -0.125, -0.124, 0.0, 1.0, 1.124, 1.125, 9.0]


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("axis", [0, 1])
def test_locations_at_and_beyond_the_border(attn, axis):
    """Of a level of four by four: zero with zero gradients unless -1/8 < location < 9/8."""
    c = Case("one", batch=len(EDGES), queries=1)
    c.shapes, rng = ((4, 4),), np.random.default_rng(0)
    c.args[0] = rng.normal(size=(len(EDGES), 16, 1, 1))
    c.args[1] = rng.uniform(0.2, 0.8, size=c.args[1].shape)
    c.args[1][..., axis] = np.reshape(EDGES, (-1, 1, 1, 1, 1))
    got = c.got(attn)
    assert_trees_close(got, c.want(), 1e-13)
    inside = np.array([-0.125 < e < 1.125 for e in EDGES])
    for a in got:
        a = np.abs(np.asarray(a)).reshape(len(EDGES), -1).sum(1)
        assert np.all(a[~inside] == 0) and np.all(a[inside] > 0)


@all_implementations
def test_a_bad_pixel_stays_where_it_is(attn):
    """Neither corners out of range nor samples outside read, or scale, what is not theirs."""
    c = Case("levels", dtype=np.float32)
    value, locations, weights = c.args
    locations[:] = np.clip(locations, 0.0, 0.99)
    start = 26  # of the level of one pixel
    for pixel in (0, start):  # the first ones
        value[:, pixel] = np.nan
    locations[:, :, :, 0] = [0.5, 1.1]  # below the first level, away from its first pixel
    locations[:, :, :, 2] = [2.0, 0.5]  # beside the last
    locations[:, 0, :, 1] = np.nan
    weights[:, 0, :, 1] = np.inf
    weights[:, :, :, 2] = np.nan
    for a in c.got(attn):
        assert np.all(np.isfinite(a))


def _between_pixels(name, **options):
    """A case whose samples are nowhere near a kink of the interpolation."""
    c = Case(name, batch=1, queries=3, **options)
    rng = np.random.default_rng(1)
    for level, (h, w) in enumerate(c.shapes):
        at = c.args[1][:, :, :, level]
        size = np.array([w, h])
        at[:] = (np.floor(at * size - 0.5) + rng.uniform(0.1, 0.9, at.shape) + 0.5) / size
    return c


TOLERANCE = dict(atol=1e-6, rtol=1e-6, eps=1e-5)


@double
@all_implementations
def test_gradients_by_differences(attn):
    c = _between_pixels("levels")
    check_grads(jax.jit(c.run(attn)), c.args, order=1, modes=["rev"], **TOLERANCE)


@double
@pytest.mark.parametrize(
    "order", [1, pytest.param(2, marks=pytest.mark.exhaustive)]
)  # of the second, one by hand below
def test_every_derivative_in_slices(order):
    c = _between_pixels("levels")
    run = jax.jit(c.run(ms_deform_attn, implementation="xla", workspace_bytes=1))
    check_grads(run, c.args, order=order, modes=["fwd", "rev"], **TOLERANCE)


@double
def test_second_derivatives():
    """A result that is bilinear in a weight and a pixel: the derivative by both is a share."""
    c = _between_pixels("one")
    value, locations, weights = c.args
    run = c.run(ms_deform_attn, implementation="xla")
    gradient = jax.jit(jax.grad(lambda v, w: jnp.sum(run(v, locations, w) * c.dy), 0))
    _, mixed = jax.jvp(lambda w: gradient(value, w), (weights,), (np.ones_like(weights),))
    assert_trees_close(mixed, gradient(value, np.ones_like(weights)), 1e-12)


@needs_native
@pytest.mark.parametrize("case", plainly("wide", of=CASES))
def test_native_equals_xla_in_float32(case):
    c = Case(case, batch=3, dtype=np.float32)
    got, want = (
        c.got(functools.partial(ms_deform_attn, implementation=i)) for i in ("native", "xla")
    )
    assert_trees_close(got, want, 1e-5)


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(attn, dtype):
    """Computed in float32 from the rounded inputs, in slices or not."""
    c = Case("wide", queries=9)
    c.args = [jnp.asarray(a, dtype) for a in c.args]
    c.dy = jnp.asarray(c.dy, dtype)
    got = c.got(attn, workspace_bytes=20_000)
    assert all(a.dtype == dtype for a in got)
    c.args, c.dy = [np.asarray(a, np.float64) for a in c.args], np.asarray(c.dy, np.float64)
    for a, b in zip(got, c.want(), strict=True):
        rounded = np.asarray(jnp.asarray(b, jnp.float32).astype(dtype), np.float64)
        one = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(a, np.float64), rounded, rtol=2 * one, atol=1e-4)


@all_implementations
def test_locations_are_exact_in_half_precision(attn):
    """Those of bfloat16 as they are, computed with in float32: a quarter right of each center."""
    value = jnp.asarray(np.arange(256).reshape(1, 256, 1, 1) % 2, jnp.bfloat16)
    at = np.arange(128) * 2 / 256 + 0.75 / 256
    locations = np.stack([at, np.full_like(at, 0.5)], -1).reshape(1, 128, 1, 1, 1, 2)
    y = attn(value, ((1, 256),), jnp.float32(locations), jnp.ones((1, 128, 1, 1, 1)))
    assert_trees_close(y[0, :, 0], np.full(128, 0.25), 0)


def test_mixed_dtypes():
    c = Case("levels", dtype=np.float32)
    value, locations, weights = map(jnp.asarray, c.args)
    run = c.run(ms_deform_attn)
    y, backward = jax.vjp(run, value.astype(jnp.bfloat16), locations, weights)
    found = [a.dtype for a in (y, *backward(y))]
    assert found == ["bfloat16", "bfloat16", "float32", "float32"]
    with jax.enable_x64(True):
        assert run(value, np.float64(locations), weights).dtype == jnp.float32


@run_by("attn", **dict.fromkeys(("xla", "default"), pytest.mark.exhaustive))
def test_ten_runs_are_equal_to_the_bit(attn, optimized):
    c = Case("wide", batch=3, queries=40, dtype=np.float32)
    first, *others = (c.got(attn, workspace_bytes=100_000) for _ in range(10))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@all_rules
def test_keeps_no_copies(attn):
    """What is kept of the inputs, and of those of a scan over layers, lies where it lay."""
    c = Case("levels", dtype=np.float32)
    value, locations, weights = map(jnp.asarray, c.args)
    layers = [jnp.stack([a] * 3) for a in (locations, weights)]

    def network(value, *layers):
        def body(value, layer):
            y = c.run(attn)(value, *layer)
            return value + jnp.mean(y), None

        return lax.scan(body, value, layers)[0]

    one = jax.jit(c.run(attn))
    inputs = value, locations, weights
    for run, args, kept_of in ((one, inputs, inputs), (network, (value, *layers), layers)):
        kept = jax.tree.leaves(jax.vjp(run, *args)[1])
        places = {a.unsafe_buffer_pointer() for a in kept}
        assert places >= {a.unsafe_buffer_pointer() for a in kept_of}


LARGE = dict(shapes=((8, 8), (4, 4)), heads=2, depth=32, points=4)


def _gradients(attn, workspace_bytes):
    c = Case("one")
    c.make(**LARGE, batch=1, queries=1, dtype=np.float32)

    def loss(*args):
        y = c.run(attn, workspace_bytes=workspace_bytes)(*args)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))


def _shapes(dtype, queries):
    levels, heads, depth, points = len(LARGE["shapes"]), LARGE["heads"], 32, LARGE["points"]
    pixels = sum(h * w for h, w in LARGE["shapes"])
    at = 1, queries, heads, levels, points
    shapes = ((1, pixels, heads, depth), dtype), ((*at, 2), "float32"), (at, "float32")
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def _largest(hlo):
    """The numbers of the largest array that a program names."""
    sizes = re.findall(r"(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", hlo)
    return max(np.prod([int(n) for n in size.split(",")]) for size in sizes)


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_samples_of_all_queries(attn, dtype):
    """Neither in the plan nor by name: [queries, levels, points, channels] exists nowhere."""
    args, mib = _shapes(dtype, 1000), 2**20
    samples = args[2].size * 32
    program = jax.jit(_gradients(attn, mib // 2)).lower(*args).compile()
    # Beside the workspace: y and its gradient, the gradients in float32, and locations by slices.
    most = mib // 2 + sum(3 * 4 * a.size for a in args) + 3 * 4 * 1000 * 64
    assert program.memory_analysis().temp_size_in_bytes <= most < 4 * samples
    assert _largest(program.as_text()) <= samples / 4


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_no_samples_on_a_gpu():
    args, mib = _shapes("bfloat16", 4000), 2**20
    xla = functools.partial(ms_deform_attn, implementation="xla")
    found = plan(_gradients(xla, 2 * mib), *args)
    assert _largest(found.hlo) <= args[2].size * 32 / 4
    most = 2 * mib + sum(3 * 4 * a.size for a in args) + 3 * 4 * 4000 * 64
    assert found.device.temporaries <= most


def test_a_plan_has_the_slices_of_a_gpu():
    """Not those of a CPU, which are smaller; whichever was traced first."""
    args = _shapes("float32", 4000)
    for platforms in ("cpu", "cuda"), ("cuda", "cpu"):
        run = lambda *a: ms_deform_attn(a[0], LARGE["shapes"], *a[1:], implementation="xla")  # noqa: E731
        for platform in platforms:
            with trace_for_platform(platform):
                text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text) == (platform == "cpu")


@pytest.mark.exhaustive
@double
@all_implementations
@hypothesis.settings(
    max_examples=6, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(data=st.data())
def test_random_shapes(attn, data):
    draw = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    c = Case("one")
    c.make(
        shapes=tuple((draw(1, 4), draw(1, 4)) for _ in range(draw(1, 3))), heads=draw(1, 3),
        depth=draw(1, 40), points=draw(1, 3), batch=draw(0, 2), queries=draw(0, 5),
        seed=draw(0, 99), spread=draw(0, 4) / 4,
    )  # fmt: skip
    got = c.got(attn, workspace_bytes=2 ** draw(4, 20))
    assert_trees_close(got, c.want(), 1e-12)
