import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from effjax import deform_conv2d
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from effjax.ops.deform_conv import chunks
from tests.contexts import assert_trees_close
from tests.ops.deform_conv.implementations import (
    CASES,
    Case,
    all_implementations,
    all_rules,
    needs_native,
)
from tests.programs import needs_gpu_compiler

double = pytest.mark.usefixtures("x64")


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(conv, case, optional):
    c = Case(case, optional=optional)
    assert_trees_close(c.got(conv), c.want(), 1e-13)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize(("batch", "optional"), [
    (0, True), (0, False), (1, True), (33, True), (33, False), (37, True), (65, False), (128, True)
])  # fmt: skip
def test_any_batch(conv, batch, optional):
    c = Case("all", batch, optional)
    assert_trees_close(c.got(conv), c.want(), 1e-12)


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("kilobytes", [4, 24, 36, 150])
def test_slices_of_rows(conv, kilobytes):
    """Of one row, of all, and 2 + 2 + 1: in each pass of each implementation with one of these."""
    for name in ("one_sided", "plain"):
        c = Case(name, batch=3)
        assert_trees_close(c.got(conv, workspace_bytes=kilobytes * 1000), c.want(), 1e-13)


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize(
    ("padding", "pads"),
    [
        ("SAME", "SAME"),
        ("valid", "VALID"),
        (2, ((2, 2), (2, 2))),
        ((0, 1), ((0, 0), (1, 1))),
        (((1, 0), (2, 1)), ((1, 0), (2, 1))),
    ],
)
def test_zero_offset_is_a_convolution(conv, padding, pads):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 6, 7, 4)), rng.normal(size=(3, 2, 2, 6))
    want = lax.conv_general_dilated(
        x, kernel, (2, 1), pads, rhs_dilation=(1, 2), feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest",
    )  # fmt: skip
    offset, mask = np.zeros((*want.shape[:3], 24)), np.ones((*want.shape[:3], 12))
    options: dict[str, Any] = dict(padding=padding, feature_group_count=np.int64(2))
    options |= dict(strides=np.array([2, 1]), kernel_dilation=(1, 2))
    for m in (None, mask):
        y = conv(x, offset, kernel, m, offset_groups=2, precision="highest", **options)
        assert_trees_close(y, want, 1e-6)


@double
@all_implementations
def test_whole_offsets_shift(conv):
    x = np.random.default_rng(0).normal(size=(1, 5, 6, 3))
    offset = np.broadcast_to(np.array([2.0, -1.0]), (1, 5, 6, 2))
    want = np.zeros_like(x)
    want[:, :3, 1:] = x[:, 2:, :-1]
    assert_trees_close(conv(x, offset, np.eye(3)[None, None]), want, 0)


EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -2.0, -1.0, -1 + 1e-6, 0.0, 4.0, 4.5, 5 - 1e-6, 5.0]


@double
@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("axis", [0, 1])
def test_positions_at_and_beyond_the_border(conv, axis):
    """One pixel for each position: zero with zero gradients unless -1 < position < size."""
    rng = np.random.default_rng(0)
    n = len(EDGES)
    x, kernel = rng.normal(size=(n, 5, 5, 2)), rng.normal(size=(1, 1, 2, 3))
    offset = rng.uniform(0, 3, size=(n, 1, 1, 2))
    offset[:, 0, 0, axis] = EDGES
    mask, dy = rng.normal(size=(n, 1, 1, 1)), rng.normal(size=(n, 1, 1, 3))
    c = Case("plain")
    c.args, c.dy = [x, offset, kernel, mask, None], dy
    c.options = c.oracle_options = dict(strides=(5, 5))
    got, want = c.got(conv), c.want()
    assert_trees_close(got, want, 1e-13)
    outside = [not -1 < e < 5 for e in EDGES]
    for g in (got[0], got[1], got[2], got[4]):
        assert np.all(np.asarray(g)[outside] == 0)
    inside = np.logical_not(outside)
    assert np.all(np.abs(np.asarray(got[4])[inside]).sum((1, 2, 3)) > 0)


@all_implementations
def test_a_bad_pixel_stays_where_it_is(conv):
    """Neither corners out of range nor samples outside read, or scale, what is not theirs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 4, 4, 2)).astype(np.float32)
    x[0, 0, 0] = [np.nan, np.inf]
    offset = np.zeros((1, 4, 4, 2), np.float32)
    offset[0, 0, 1] = [-0.5, 0.25]  # between the rows 0 and -1, right of the bad pixel
    offset[0, 0, 0] = np.nan
    offset[0, 1, 0, 0] = 99
    mask = np.ones((1, 4, 4, 1), np.float32)
    mask[0, 1, 0] = np.nan  # of a sample that is outside
    run = functools.partial(conv, kernel=np.ones((1, 1, 2, 1), np.float32))
    y, backward = jax.vjp(lambda x, o, m: run(x, o, mask=m), x, offset, mask)
    gradients = backward(jnp.ones_like(y))
    for a in (y, *gradients):
        assert np.all(np.isfinite(a))


TOLERANCE = dict(atol=1e-6, rtol=1e-6, eps=1e-5)


def _between_pixels(name):
    """A case whose samples are nowhere near a kink of the interpolation."""
    c = Case(name, batch=1)
    c.args[1] = np.floor(c.args[1]) + np.random.default_rng(1).uniform(0.1, 0.9, c.args[1].shape)
    return c


@double
@all_implementations
def test_gradients_by_differences(conv):
    c = _between_pixels("all")
    run = jax.jit(functools.partial(conv, workspace_bytes=8000, **c.options))
    check_grads(run, c.args, order=1, modes=["rev"], **TOLERANCE)


@double
def test_second_order_and_forward_mode():
    c = _between_pixels("one_sided")
    run = jax.jit(functools.partial(deform_conv2d, implementation="xla", **c.options))
    check_grads(run, c.args, order=2, modes=["fwd", "rev"], **TOLERANCE)
    sliced = jax.jit(
        functools.partial(deform_conv2d, implementation="xla", workspace_bytes=1, **c.options)
    )
    check_grads(sliced, c.args, order=1, modes=["fwd"], **TOLERANCE)


@needs_native
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "all" else pytest.mark.exhaustive) for c in CASES]
)
def test_native_equals_xla_in_float32(case):
    c = Case(case, batch=3, dtype=np.float32)
    got, want = (
        c.got(functools.partial(deform_conv2d, implementation=i, precision="highest"))
        for i in ("native", "xla")
    )
    assert_trees_close(got, want, 1e-5)


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_good_as_a_convolution(conv, dtype):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 8, 8, 32), (3, 3, 32, 16)))
    offset = jnp.zeros((2, 8, 8, 18), dtype)
    dy = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), dtype)

    def lax_conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def run(f, dtype):
        y, backward = jax.vjp(f, x.astype(dtype), kernel.astype(dtype))
        return y, *backward(dy.astype(dtype))

    exact = run(lax_conv, jnp.float32)
    ours = run(lambda x, k: conv(x, offset, k, padding="SAME"), dtype)
    for o, t, e in zip(ours, run(lax_conv, dtype), exact, strict=True):
        assert o.dtype == dtype
        errors = [float(jnp.sqrt(jnp.mean((a.astype(jnp.float32) - e) ** 2))) for a in (o, t)]
        assert errors[0] <= 1.02 * errors[1]  # two ways to round the same sum


@all_implementations
def test_positions_are_exact_in_half_precision(conv):
    x = jnp.asarray(np.arange(1000).reshape(1, 1, 1000, 1) % 2, jnp.bfloat16)
    offset = jnp.full((1, 1, 1000, 2), jnp.array([0, 0.25]), jnp.bfloat16)
    y = conv(x, offset, jnp.ones((1, 1, 1, 1), jnp.bfloat16))
    assert_trees_close(y[0, 0, :-1, 0], np.arange(999) % 2 * 0.5 + 0.25, 0)


def test_mixed_dtypes():
    c = Case("plain", dtype=np.float32)
    x, offset, kernel, mask, bias = map(jnp.asarray, c.args)
    run = lambda x, k, b: deform_conv2d(x, offset, k, mask, b, **c.options)  # noqa: E731
    y, backward = jax.vjp(run, x.astype(jnp.bfloat16), kernel, bias)
    assert [a.dtype for a in (y, *backward(y))] == ["bfloat16", "bfloat16", "float32", "float32"]
    with jax.enable_x64(True):
        y = deform_conv2d(x, np.float64(offset), kernel, **c.options)
        assert y.dtype == jnp.float32


@all_rules
def test_twenty_runs_are_equal_to_the_bit(conv, optimized):
    c = Case("all", batch=4, dtype=np.float32, spread=0.5)
    first, *others = (c.got(conv, deterministic=True, workspace_bytes=10_000) for _ in range(20))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_keeps_its_inputs():
    c = Case("all", dtype=np.float32)
    run = functools.partial(deform_conv2d, **c.options)
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(run, *a)[1], *c.args))
    assert sum(a.size for a in kept) <= sum(a.size for a in c.args)


@all_rules
def test_keeps_no_copies(conv):
    """What is kept of the inputs, and of those of a scan over layers, lies where it lay."""
    c = Case("plain", batch=2, dtype=np.float32)
    x, *layer = map(jnp.asarray, c.args[:4])
    layers = [jnp.stack([a] * 3) for a in layer]

    def network(x, *layers):
        def body(x, layer):
            y = conv(x, *layer, **c.options)
            return jnp.tile(y, (1, 1, 1, x.shape[-1]))[..., : x.shape[-1]], None

        return lax.scan(body, x, layers)[0]

    one = jax.jit(functools.partial(conv, **c.options))
    for run, args, inputs in ((one, (x, *layer), [x, *layer]), (network, (x, *layers), layers)):
        kept = jax.tree.leaves(jax.vjp(run, *args)[1])
        places = {a.unsafe_buffer_pointer() for a in kept}
        assert places >= {a.unsafe_buffer_pointer() for a in inputs}


@all_rules
def test_the_gradient_inside_a_rule_of_ones_own(conv):
    """That gives zeros as the tangents of what is not differentiated."""
    c = Case("plain", batch=2, dtype=np.float32)
    x, offset, kernel, *_ = map(jnp.asarray, c.args)
    run = lambda kernel, x: conv(x, offset, kernel, **c.options)  # noqa: E731
    ruled = jax.custom_jvp(run)
    ruled.defjvp(lambda primals, tangents: jax.jvp(run, primals, tangents))
    got, want = (jax.grad(lambda k: jnp.sum(f(k, x) ** 2))(kernel) for f in (ruled, run))  # noqa: B023
    assert_trees_close(got, want, 1e-6)


def _shapes(dtype, height=24):
    image = 2, height, 32
    shapes = (*image, 32), (*image, 18), (3, 3, 32, 32), (*image, 9)
    types = dtype, "float32", dtype, "float32"
    return [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]


def _gradients(conv, workspace_bytes):
    def loss(*args):
        y = conv(*args, padding=1, workspace_bytes=workspace_bytes)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2, 3))


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize(("dtype", "height"), [("float32", 24), ("float32", 47), ("bfloat16", 23)])
def test_memory_stays_under_the_workspace(conv, dtype, height):
    """That of a last, smaller slice included."""
    mib = 2**20
    args = _shapes(dtype, height)
    program = jax.jit(_gradients(conv, 2 * mib)).lower(*args).compile()
    # Beside the workspace: y, its gradient, and the gradients in the dtype they are added up in.
    outputs = sum(4 * a.size for a in args) + 2 * 4 * args[0].size
    assert program.memory_analysis().temp_size_in_bytes <= 2 * mib + outputs


@needs_gpu_compiler
def test_memory_on_a_gpu():
    mib, shapes = 2**20, _shapes("bfloat16")
    xla = functools.partial(deform_conv2d, implementation="xla")
    temporaries = plan(_gradients(xla, mib), *shapes).device.temporaries
    assert temporaries <= mib + sum(4 * a.size for a in shapes) + 2 * 4 * shapes[0].size


def test_a_plan_has_the_slices_of_a_gpu():
    """Not those of a CPU, which are smaller; whichever was traced first."""
    shapes = (1, 64, 64, 64), (1, 64, 64, 18), (3, 3, 64, 64)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    for platforms in ("cpu", "cuda"), ("cuda", "cpu"):
        run = jax.jit(functools.partial(deform_conv2d, padding=1, implementation="xla"))
        for platform in platforms:
            with trace_for_platform(platform):
                text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text) == (platform == "cpu")


@pytest.mark.parametrize("examples", [1, 3])
def test_a_sum_in_parts(examples):
    """As programs for a GPU have it, whose results are those of the whole sum."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    columns, dy = normal(examples, 2, 22, 30, 8), normal(examples, 2, 22, 30, 3)
    kernel = chunks.kernel_blocks(normal(1, 2, 2, 2, 3), "float32", 1)
    static = chunks.Static(None, 1, None, "highest", 0)  # pyright: ignore
    run = functools.partial(
        chunks.multiply_backward_kernel, columns, dy, kernel, jnp.dtype("float32"), static
    )
    with trace_for_platform("cuda"):
        parts, got = jax.make_jaxpr(run)(), run()
    assert f"[{5 * examples},264," in str(parts) and got.shape == (examples, 1, 3, 1, 8)
    assert_trees_close(got, run(), 1e-5)


@needs_gpu_compiler
def test_a_plan_of_what_ran_on_a_cpu():
    run = jax.jit(functools.partial(deform_conv2d, padding=1, implementation="xla"))
    args = [jnp.ones(s) for s in ((1, 64, 64, 64), (1, 64, 64, 18), (3, 3, 64, 64))]
    run(*args)
    assert " while(" not in plan(run, *args).hlo


@pytest.mark.exhaustive
@double
@all_implementations
@hypothesis.settings(
    max_examples=6, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(data=st.data())
def test_random_shapes(conv, data):
    draw = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    two = lambda least, most: (draw(least, most), draw(least, most))  # noqa: E731
    kernel, dilation = two(1, 3), two(1, 2)
    padding = two(0, 2), two(0, 2)
    size = tuple(
        draw(max(1, (k - 1) * d + 1 - sum(p)), 6)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    groups, offset_groups = draw(1, 2), draw(1, 3)
    c = Case("plain")
    c.make(
        c=groups * offset_groups * draw(1, 2), o=groups * draw(1, 2), batch=draw(0, 3), size=size,
        optional=data.draw(st.booleans()), seed=draw(0, 99), spread=draw(0, 4) / 2, kernel=kernel,
        dilation=dilation, padding=padding, strides=two(1, 3), groups=groups,
        offset_groups=offset_groups,
    )  # fmt: skip
    got = c.got(conv, workspace_bytes=2 ** draw(8, 20))
    assert_trees_close(got, c.want(), 1e-12)
