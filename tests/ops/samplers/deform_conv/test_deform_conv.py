"""Specific properties of deform_conv2d."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import deform_conv2d
from effjax.ops._common.platform import trace_for_platform
from tests import oracles
from tests.contexts import assert_trees_close
from tests.ops.battery import own_rules_or_xla
from tests.ops.samplers.deform_conv.cases import make, make_random
from tests.tiers import vary


@vary("padding, pads", [((0, 1), ((0, 0), (1, 1))), ("SAME", "SAME")])
def test_zero_offset_is_a_convolution(padding, pads):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 6, 7, 4)), rng.normal(size=(3, 2, 2, 6))
    conv_options = dict(rhs_dilation=(1, 2), feature_group_count=2, precision="highest")
    want = oracles.conv(x, kernel, (2, 1), pads, **conv_options)
    offset, mask = np.zeros((*want.shape[:3], 24)), np.ones((*want.shape[:3], 12))
    options: dict[str, Any] = dict(strides=(2, 1), kernel_dilation=(1, 2), padding=padding)
    options |= dict(feature_group_count=2, offset_groups=2, precision="highest")
    for m in (None, mask):
        assert_trees_close(deform_conv2d(x, offset, kernel, m, **options), want, 1e-6)


@own_rules_or_xla
def test_non_finite_pixel_stays_local(implementation):
    """Corners and samples out of range neither read nor scale other pixels."""
    window = dict(size=(4, 4), kernel=(1, 1), padding=((0, 0), (0, 0)))
    c = make_random(c=2, o=1, batch=1, spread=0, dtype=np.float32, **window)
    x, offset, _, mask, _ = c.args
    x[0, 0, 0] = [np.nan, np.inf]
    offset[0, 0, 1] = [-0.5, 0.25]  # between the rows 0 and -1, right of the bad pixel
    offset[0, 0, 0] = np.nan
    offset[0, 1, 0, 0] = 99
    mask[0, 1, 0] = np.nan  # of a sample that is outside
    for a in c.got(implementation):
        assert np.all(np.isfinite(a))


@own_rules_or_xla
@vary("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_a_convolution(implementation, dtype):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 8, 8, 32), (3, 3, 32, 16)))
    offset = jnp.zeros((2, 8, 8, 18), dtype)
    dy = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), dtype)

    def run(f, dtype):
        y, backward = jax.vjp(jax.jit(f), x.astype(dtype), kernel.astype(dtype))
        return y, *backward(dy.astype(dtype))

    def conv(x, kernel):
        return deform_conv2d(x, offset, kernel, padding="SAME", implementation=implementation)

    exact = run(oracles.conv, jnp.float32)
    for ours, theirs, e in zip(run(conv, dtype), run(oracles.conv, dtype), exact, strict=True):
        assert ours.dtype == dtype
        error, other = (jnp.linalg.norm(a.astype(jnp.float32) - e) for a in (ours, theirs))
        assert error <= 1.02 * other  # the same sum, rounded in two ways


@own_rules_or_xla
def test_positions_are_exact_in_half_precision(implementation):
    x = jnp.asarray(np.arange(1000).reshape(1, 1, 1000, 1) % 2, jnp.bfloat16)
    offset = jnp.full((1, 1, 1000, 2), jnp.array([0, 0.25]), jnp.bfloat16)
    kernel = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    y = deform_conv2d(x, offset, kernel, implementation=implementation)
    assert_trees_close(y[0, 0, :-1, 0], np.arange(999) % 2 * 0.5 + 0.25, 0)


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


@pytest.mark.parametrize("implementation", ["default"], indirect=True)
def test_split_kernel_gradient(implementation, x64):
    """Programs for a GPU split the sum over pixels; this one runs on the CPU."""
    c = make_random(c=4, o=3, size=(22, 30), kernel=(1, 1), padding=((0, 0), (0, 0)))
    with trace_for_platform("cuda"):
        run = c.compile(implementation)
        program, got = str(jax.make_jaxpr(run)(c.args, c.dy)), run(c.args, c.dy)
    assert "[5,264," in program
    assert_trees_close(got, c.want(), 1e-12)
