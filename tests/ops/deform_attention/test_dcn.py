"""DCNv3's aggregation: its points, and that it is the operator of test_deform_attention.py."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from effjax import dcn_aggregate, deform_conv2d
from effjax.memory import collectives
from effjax.ops._common.arguments import conv_output_size
from tests.contexts import assert_trees_close, mesh_of
from tests.ops.deform_attention import oracle
from tests.ops.deform_attention.implementations import run_by

double = pytest.mark.usefixtures("x64")
implementations = run_by("dcn")

CASES = {
    "plain": dict(padding=((1, 1), (1, 1))),
    "all": dict(
        kernel=(3, 5), strides=(2, 1), dilation=(1, 2), padding=((0, 1), (4, 2)), scale=1.5,
        remove_center=True,
    ),
    "even": dict(kernel=(2, 4), padding=((1, 1), (2, 2)), dilation=(2, 1), scale=0.5),
}  # fmt: skip
NAMES = dict(kernel="kernel_size", dilation="kernel_dilation", scale="offset_scale")


class Case:
    """Arguments of one case, and its results by the definition."""

    def __init__(self, options, batch=2, size=(5, 6), groups=3, depth=2, seed=0, dtype=np.float64):
        kernel = options.get("kernel", (3, 3))
        out = conv_output_size(
            size, kernel, options.get("strides", (1, 1)), options["padding"],
            options.get("dilation", (1, 1)),
        )  # fmt: skip
        points = groups * (kernel[0] * kernel[1] - options.get("remove_center", False))
        rng = np.random.default_rng(seed)
        shapes = (*size, groups * depth), (*out, points * 2), (*out, points), (*out, groups * depth)
        *self.args, self.dy = (rng.normal(size=(batch, *s)).astype(dtype) for s in shapes)
        self.definition = options
        self.options = {NAMES.get(k, k): v for k, v in options.items()}

    def want(self):
        y, gradients = oracle.dcn(*self.args, self.dy, **self.definition)
        return [y, *gradients]

    def got(self, dcn):
        run = functools.partial(dcn, **self.options)
        y, backward = jax.vjp(run, *map(jnp.asarray, self.args))
        return [y, *backward(jnp.asarray(self.dy, y.dtype))]


@double
@pytest.mark.covering
@implementations
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(dcn, case):
    c = Case(CASES[case])
    assert_trees_close(c.got(dcn), c.want(), 1e-13)


@double
@pytest.mark.parametrize("padding", [1, "SAME", ((0, 2), (1, 0))])
def test_is_a_sum_of_what_deform_conv2d_samples(padding):
    """A window of one group without its products: the same points in another order."""
    c = Case(CASES["plain"], groups=1, depth=1)
    x, offset, mask = (a[..., :1] if i == 0 else a for i, a in enumerate(c.args))
    if padding == ((0, 2), (1, 0)):
        offset, mask = (a[:, :, :-1] for a in (offset, mask))
    options = dict(padding=padding, implementation="xla")
    by_columns = lambda a, n: a.reshape(*a.shape[:3], 3, 3, n).swapaxes(3, 4)  # noqa: E731
    moved = by_columns(offset, 2)[..., ::-1].reshape(offset.shape)
    factors = by_columns(mask, 1).reshape(mask.shape)
    want = deform_conv2d(x, moved, np.ones((3, 3, 1, 1)), factors, **options)
    assert_trees_close(dcn_aggregate(x, offset, mask, **options), want, 1e-13)


@double
def test_no_offsets_are_whole_pixels():
    """Without a scale: exactly the pixels of the window, whose middle is left out."""
    x = np.random.default_rng(0).normal(size=(1, 5, 6, 2))
    mask = np.zeros((1, 5, 6, 16))
    mask[..., [0, 15]] = 1  # of two groups: up left, and down right
    y = dcn_aggregate(x, np.zeros((1, 5, 6, 32)), mask, padding=1, remove_center=True)
    wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    np.testing.assert_array_equal(y[..., 0], wide[:, :-2, :-2, 0])
    np.testing.assert_array_equal(y[..., 1], wide[:, 2:, 2:, 1])


@double
def test_every_derivative_of_xla():
    c = Case(CASES["all"], batch=1, groups=1, size=(4, 4))
    c.args[1] = np.round(c.args[1]) + np.random.default_rng(1).uniform(-0.1, 0.1, c.args[1].shape)
    run = jax.jit(functools.partial(dcn_aggregate, implementation="xla", **c.options))
    # 1.5 times whole steps are halves; 0.15 more is between pixels still.
    check_grads(run, c.args, order=1, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6, eps=1e-6)


@implementations
def test_bad_offsets_give_zero(dcn):
    c = Case(CASES["plain"], dtype=np.float32)
    c.args[1][:, 0] = np.nan
    c.args[1][:, 1] = np.inf
    y, dx, doffset, dmask = map(np.asarray, c.got(dcn))
    for a in (y, doffset, dmask):
        assert np.all(a[:, :2] == 0) and np.all(np.isfinite(a))
    assert np.all(np.isfinite(dx))


@pytest.mark.covering
@implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed"])
def test_half_precision(dcn, dtype):
    c = Case(CASES["plain"], depth=16)
    types = ("bfloat16", "float32", "bfloat16") if dtype == "mixed" else (dtype,) * 3
    c.args = [jnp.asarray(a, t) for a, t in zip(c.args, types, strict=True)]
    got = c.got(dcn)
    assert [a.dtype for a in got] == [types[0], *types]
    c.args, c.dy = ([np.asarray(a, np.float64) for a in c.args], np.asarray(c.dy, types[0]))
    for a, b, t in zip(got, c.want(), (types[0], *types), strict=True):
        one = float(jnp.finfo(t).eps)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2 * one, atol=2e-2)


@pytest.mark.usefixtures("x64_everywhere")
@pytest.mark.covering
@implementations
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_sharded_batch(dcn, kind):
    c = Case(CASES["plain"], batch=8)
    mesh = mesh_of((8,), ("i",), kind)
    args = [jax.device_put(a, NamedSharding(mesh, P("i"))) for a in (*c.args, c.dy)]

    def both(*args):
        y, backward = jax.vjp(functools.partial(dcn, **c.options), *args[:3])
        return y, *backward(args[3])

    run = jax.jit(both).lower(*args).compile()
    assert not collectives(run.as_text())
    assert_trees_close(list(run(*args)), c.want(), 1e-12)


@double
@implementations
def test_vmap_and_an_empty_batch(dcn):
    c = Case(CASES["even"], batch=4)
    run = jax.vmap(functools.partial(dcn, **c.options))
    y = run(*(a.reshape(2, 2, *a.shape[1:]) for a in c.args))
    assert_trees_close(y.reshape(c.dy.shape), c.want()[0], 1e-13)
    empty = Case(CASES["even"], batch=0)
    assert_trees_close(empty.got(dcn), empty.want(), 0)


@pytest.mark.exhaustive
@double
@implementations
@hypothesis.settings(
    max_examples=6, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(data=st.data())
def test_random_shapes(dcn, data):
    draw = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    two = lambda least, most: (draw(least, most), draw(least, most))  # noqa: E731
    kernel, dilation, padding = two(1, 4), two(1, 2), (two(0, 2), two(0, 2))
    size = tuple(
        draw(max(1, (k - 1) * d + 1 - sum(p)), 8)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    options = dict(
        kernel=kernel, dilation=dilation, padding=padding, strides=two(1, 3),
        scale=draw(1, 4) / 2, remove_center=all(k % 2 for k in kernel) and max(kernel) > 1,
    )  # fmt: skip
    c = Case(options, draw(0, 2), size, groups=draw(1, 3), depth=draw(1, 20), seed=draw(0, 99))
    assert_trees_close(c.got(dcn), c.want(), 1e-12)
