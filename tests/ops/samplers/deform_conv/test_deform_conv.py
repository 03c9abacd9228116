"""Specific properties of deform_conv2d: borders, half precision, memory."""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from effjax import deform_conv2d
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from effjax.ops.samplers.deform_conv import chunks
from tests.contexts import assert_trees_close
from tests.ops.battery import (
    Case,
    on_random_shapes,
    only_own_rules,
    own_rules_or_xla,
)
from tests.ops.samplers.deform_conv import oracle
from tests.ops.samplers.deform_conv.cases import make, make_random
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

double = pytest.mark.usefixtures("x64")


@only_own_rules
@vary("padding, pads", [((0, 1), ((0, 0), (1, 1))), ("SAME", "SAME")])
def test_zero_offset_is_a_convolution(implementation, padding, pads):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 6, 7, 4)), rng.normal(size=(3, 2, 2, 6))
    want = lax.conv_general_dilated(
        x, kernel, (2, 1), pads, rhs_dilation=(1, 2), feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest",
    )  # fmt: skip
    offset, mask = np.zeros((*want.shape[:3], 24)), np.ones((*want.shape[:3], 12))
    options: dict[str, Any] = dict(padding=padding, feature_group_count=np.int64(2))
    options |= dict(strides=np.array([2, 1]), kernel_dilation=(1, 2), offset_groups=2)
    options |= dict(implementation=implementation, precision="highest")
    for m in (None, mask):
        y = deform_conv2d(x, offset, kernel, m, **options)
        assert_trees_close(y, want, 1e-6)


@double
@own_rules_or_xla
def test_integer_offsets_shift(implementation):
    x = np.random.default_rng(0).normal(size=(1, 5, 6, 3))
    offset = np.broadcast_to(np.array([2.0, -1.0]), (1, 5, 6, 2))
    want = np.zeros_like(x)
    want[:, :3, 1:] = x[:, 2:, :-1]
    y = deform_conv2d(x, offset, np.eye(3)[None, None], implementation=implementation)
    assert_trees_close(y, want, 0)


EDGES = [-1e30, 1e30, -np.inf, np.inf, np.nan, -2.0, -1.0, -1 + 1e-6, 0.0, 4.0, 4.5, 5 - 1e-6, 5.0]


@double
@own_rules_or_xla
def test_positions_at_and_beyond_the_border(implementation):
    """One output pixel per position: zero with zero gradients unless -1 < position < size."""
    rng = np.random.default_rng(0)
    n = 2 * len(EDGES)
    x, kernel = rng.normal(size=(n, 5, 5, 2)), rng.normal(size=(1, 1, 2, 3))
    offset = rng.uniform(0, 3, size=(n, 1, 1, 2))
    offset[: n // 2, 0, 0, 0] = offset[n // 2 :, 0, 0, 1] = EDGES
    mask, dy = rng.normal(size=(n, 1, 1, 1)), rng.normal(size=(n, 1, 1, 3))
    c = Case(
        lambda name: functools.partial(deform_conv2d, strides=(5, 5), implementation=name),
        functools.partial(oracle.deform_conv, strides=(5, 5)),
        [x, offset, kernel, mask, None], dy, differentiable=5,
    )  # fmt: skip
    got = c.got(implementation)
    assert_trees_close(got, c.want(), 1e-13)
    outside = np.array([not -1 < e < 5 for e in EDGES] * 2)
    for g in (got[0], got[1], got[2], got[4]):
        assert np.all(np.asarray(g)[outside] == 0)
    assert np.all(np.abs(np.asarray(got[4])[~outside]).sum((1, 2, 3)) > 0)


@own_rules_or_xla
def test_non_finite_pixel_stays_local(implementation):
    """Corners and samples out of range neither read nor scale other pixels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 4, 4, 2)).astype(np.float32)
    x[0, 0, 0] = [np.nan, np.inf]
    offset = np.zeros((1, 4, 4, 2), np.float32)
    offset[0, 0, 1] = [-0.5, 0.25]  # between the rows 0 and -1, right of the bad pixel
    offset[0, 0, 0] = np.nan
    offset[0, 1, 0, 0] = 99
    mask = np.ones((1, 4, 4, 1), np.float32)
    mask[0, 1, 0] = np.nan  # of a sample that is outside
    kernel = np.ones((1, 1, 2, 1), np.float32)

    @jax.jit
    def run(x, offset, mask):
        conv = lambda x, o, m: deform_conv2d(x, o, kernel, m, implementation=implementation)  # noqa: E731
        y, backward = jax.vjp(conv, x, offset, mask)
        return y, *backward(jnp.ones_like(y))

    for a in run(x, offset, mask):
        assert np.all(np.isfinite(a))


@own_rules_or_xla
@vary("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_a_convolution(implementation, dtype):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 8, 8, 32), (3, 3, 32, 16)))
    offset = jnp.zeros((2, 8, 8, 18), dtype)
    dy = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), dtype)

    def lax_conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def run(f, dtype):
        y, backward = jax.vjp(jax.jit(f), x.astype(dtype), kernel.astype(dtype))
        return y, *backward(dy.astype(dtype))

    def conv(x, kernel):
        return deform_conv2d(x, offset, kernel, padding="SAME", implementation=implementation)

    exact = run(lax_conv, jnp.float32)
    for ours, theirs, e in zip(run(conv, dtype), run(lax_conv, dtype), exact, strict=True):
        assert ours.dtype == dtype
        errors = [
            float(jnp.sqrt(jnp.mean((a.astype(jnp.float32) - e) ** 2))) for a in (ours, theirs)
        ]
        assert errors[0] <= 1.02 * errors[1]  # the same sum, rounded in two ways


@own_rules_or_xla
def test_positions_are_exact_in_half_precision(implementation):
    x = jnp.asarray(np.arange(1000).reshape(1, 1, 1000, 1) % 2, jnp.bfloat16)
    offset = jnp.full((1, 1, 1000, 2), jnp.array([0, 0.25]), jnp.bfloat16)
    kernel = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    y = deform_conv2d(x, offset, kernel, implementation=implementation)
    assert_trees_close(y[0, 0, :-1, 0], np.arange(999) % 2 * 0.5 + 0.25, 0)


def test_mixed_dtypes():
    c = make("plain", dtype=np.float32)
    x, offset, kernel, mask, bias = map(jnp.asarray, c.args)
    f = c.bind(None)
    y, backward = jax.vjp(
        lambda x, k, b: f(x, offset, k, mask, b), x.astype(jnp.bfloat16), kernel, bias
    )
    assert [a.dtype for a in (y, *backward(y))] == ["bfloat16", "bfloat16", "float32", "float32"]
    with jax.enable_x64(True):
        y = jax.eval_shape(f, x, np.float64(offset), kernel)
        assert y.dtype == jnp.float32


@own_rules_or_xla
def test_gradient_inside_custom_jvp(implementation):
    """The rule passes zeros as the tangents of arguments that are not differentiated."""
    c = make("plain", dtype=np.float32)
    x, offset, kernel, *_ = map(jnp.asarray, c.args)
    f = c.bind(implementation)
    run = lambda kernel, x: f(x, offset, kernel)  # noqa: E731
    wrapped = jax.custom_jvp(run)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(run, primals, tangents))
    got, want = (
        jax.jit(jax.grad(lambda k: jnp.sum(f(k, x) ** 2)))(kernel)  # noqa: B023
        for f in (wrapped, run)
    )
    assert_trees_close(got, want, 1e-6)


def _shapes(dtype, height=24):
    image = 2, height, 32
    shapes = (*image, 32), (*image, 18), (3, 3, 32, 32), (*image, 9)
    types = dtype, "float32", dtype, "float32"
    return [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]


def _gradients(implementation, workspace_bytes):
    def loss(*args):
        y = deform_conv2d(
            *args, padding=1, workspace_bytes=workspace_bytes, implementation=implementation
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2, 3))


@own_rules_or_xla
@vary("dtype, height", [("float32", 47), ("bfloat16", 23)])
def test_memory_stays_under_the_workspace(implementation, dtype, height):
    """The last slice is smaller."""
    mib = 2**20
    args = _shapes(dtype, height)
    program = jax.jit(_gradients(implementation, 2 * mib)).lower(*args).compile()
    # In addition to the workspace: y, its gradient, and the gradients in the dtype of accumulation.
    outputs = sum(4 * a.size for a in args) + 2 * 4 * args[0].size
    assert program.memory_analysis().temp_size_in_bytes <= 2 * mib + outputs


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_on_a_gpu():
    mib, shapes = 2**20, _shapes("bfloat16")
    temporaries = plan(_gradients("xla", mib), *shapes).device.temporaries
    assert temporaries <= mib + sum(4 * a.size for a in shapes) + 2 * 4 * shapes[0].size


def test_plan_uses_the_slices_of_a_gpu():
    """The slices of a CPU are smaller; the order of tracing must not matter."""
    shapes = (1, 64, 64, 64), (1, 64, 64, 18), (3, 3, 64, 64)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    for platforms in ("cpu", "cuda"), ("cuda", "cpu"):
        run = jax.jit(functools.partial(deform_conv2d, padding=1, implementation="xla"))
        for platform in platforms:
            with trace_for_platform(platform):
                text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text) == (platform == "cpu")


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_plan_after_tracing_for_a_cpu():
    run = jax.jit(functools.partial(deform_conv2d, padding=1, implementation="xla"))
    shapes = (1, 64, 64, 64), (1, 64, 64, 18), (3, 3, 64, 64)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    run.trace(*args)
    assert " while(" not in plan(run, *args).hlo


def test_split_kernel_gradient_matches_whole_sum():
    """Programs for a GPU split the sum over pixels."""
    rng, examples = np.random.default_rng(0), 3
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    columns, dy = normal(examples, 2, 22, 30, 8), normal(examples, 2, 22, 30, 3)
    kernel = chunks.kernel_blocks(normal(1, 2, 2, 2, 3), "float32", 1)
    static = chunks.Static(None, 1, None, "highest", 0)  # pyright: ignore
    run = functools.partial(
        chunks.multiply_backward_kernel, columns, dy, kernel, jnp.dtype("float32"), static
    )
    with trace_for_platform("cuda"):
        jaxpr, got = jax.make_jaxpr(run)(), run()
    assert f"[{5 * examples},264," in str(jaxpr) and got.shape == (examples, 1, 3, 1, 8)
    assert_trees_close(got, run(), 1e-5)


@on_random_shapes
def test_random_shapes(implementation, data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    two = lambda low, high: (draw(low, high), draw(low, high))  # noqa: E731
    kernel, dilation = two(1, 3), two(1, 2)
    padding = two(0, 2), two(0, 2)
    size = tuple(
        draw(max(1, (k - 1) * d + 1 - sum(p)), 6)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    groups, offset_groups = draw(1, 2), draw(1, 3)
    c = make_random(
        c=groups * offset_groups * draw(1, 2), o=groups * draw(1, 2), batch=draw(0, 3), size=size,
        optional=data.draw(st.booleans()), seed=draw(0, 99), spread=draw(0, 4) / 2, kernel=kernel,
        dilation=dilation, padding=padding, strides=two(1, 3), groups=groups,
        offset_groups=offset_groups,
    )  # fmt: skip
    got = c.got(implementation, workspace_bytes=2 ** draw(8, 20))
    assert_trees_close(got, c.want(), 1e-12)
