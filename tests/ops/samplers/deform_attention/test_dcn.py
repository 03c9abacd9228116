"""Specific properties of dcn_aggregate: geometry, dtypes and sharding."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import dcn_aggregate, deform_conv2d
from effjax.memory import collectives
from tests.contexts import assert_trees_close, mesh_of
from tests.ops.battery import on_random_shapes, own_rules_or_xla
from tests.ops.samplers.deform_attention.cases import make_random_window, make_window
from tests.tiers import vary

double = pytest.mark.usefixtures("x64")


@double
@vary("padding", [((0, 2), (1, 0)), "SAME"])
def test_sums_the_samples_of_deform_conv2d(padding):
    """A window of one group has the same samples in another order."""
    c = make_window("plain", groups=1, depth=1)
    x, offset, mask = (a[..., :1] if i == 0 else a for i, a in enumerate(c.args))
    if padding == ((0, 2), (1, 0)):
        offset, mask = (a[:, :, :-1] for a in (offset, mask))
    options = dict(padding=padding, implementation="xla")
    by_columns = lambda a, n: a.reshape(*a.shape[:3], 3, 3, n).swapaxes(3, 4)  # noqa: E731
    reordered = by_columns(offset, 2)[..., ::-1].reshape(offset.shape)
    factors = by_columns(mask, 1).reshape(mask.shape)
    want = deform_conv2d(x, reordered, np.ones((3, 3, 1, 1)), factors, **options)
    assert_trees_close(dcn_aggregate(x, offset, mask, **options), want, 1e-13)


@double
def test_zero_offsets_read_whole_pixels():
    x = np.random.default_rng(0).normal(size=(1, 5, 6, 2))
    mask = np.zeros((1, 5, 6, 16))
    mask[..., [0, 15]] = 1  # top left of the first group, bottom right of the second
    y = dcn_aggregate(x, np.zeros((1, 5, 6, 32)), mask, padding=1, remove_center=True)
    wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    np.testing.assert_array_equal(y[..., 0], wide[:, :-2, :-2, 0])
    np.testing.assert_array_equal(y[..., 1], wide[:, 2:, 2:, 1])


@own_rules_or_xla
def test_non_finite_offsets_give_zero(implementation):
    c = make_window("plain", dtype=np.float32)
    c.args[1][:, 0] = np.nan
    c.args[1][:, 1] = np.inf
    y, dx, doffset, dmask = map(np.asarray, c.got(implementation))
    for a in (y, doffset, dmask):
        assert np.all(a[:, :2] == 0) and np.all(np.isfinite(a))
    assert np.all(np.isfinite(dx))


@own_rules_or_xla
@vary("dtype", ["mixed", "float16"])
def test_half_precision(implementation, dtype):
    c = make_window("plain", depth=16)
    types = ("bfloat16", "float32", "bfloat16") if dtype == "mixed" else (dtype,) * 3
    c.args = [jnp.asarray(a, t) for a, t in zip(c.args, types, strict=True)]
    got = c.got(implementation)
    assert [a.dtype for a in got] == [types[0], *types]
    c.args = [np.asarray(a, np.float64) for a in c.args]
    c.dy = np.asarray(jnp.asarray(c.dy, types[0]), np.float64)
    for a, b, t in zip(got, c.want(), (types[0], *types), strict=True):
        epsilon = float(jnp.finfo(t).eps)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2 * epsilon, atol=2e-2)


@pytest.mark.usefixtures("x64_everywhere")
@own_rules_or_xla
@vary("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch_has_no_collectives(implementation, kind):
    c = make_window("plain", batch=8)
    sharding = NamedSharding(mesh_of((8,), ("i",), kind), P("i"))
    args = [jax.device_put(a, sharding) for a in c.args]
    dy = jax.device_put(c.dy, sharding)
    run = c.compile(implementation).lower(args, dy).compile()
    assert not collectives(run.as_text())
    assert_trees_close(run(args, dy), c.want(), 1e-12)


@on_random_shapes
def test_random_shapes(implementation, data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    two = lambda low, high: (draw(low, high), draw(low, high))  # noqa: E731
    kernel, dilation, padding = two(1, 4), two(1, 2), (two(0, 2), two(0, 2))
    size = tuple(
        draw(max(1, (k - 1) * d + 1 - sum(p)), 8)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    window = dict(
        kernel=kernel, dilation=dilation, padding=padding, strides=two(1, 3),
        scale=draw(1, 4) / 2, remove_center=all(k % 2 for k in kernel) and max(kernel) > 1,
    )  # fmt: skip
    c = make_random_window(
        window, draw(0, 2), size, groups=draw(1, 3), depth=draw(1, 20), seed=draw(0, 99)
    )
    assert_trees_close(c.got(implementation), c.want(), 1e-12)
