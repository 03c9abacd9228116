"""Accuracy of the statistics, masks and empty sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import batch_norm_inference, sync_batch_norm
from effjax.ops.batch_norm.complex import complex_batch_norm
from tests import oracles
from tests.contexts import DEVICES, assert_trees_close
from tests.ops.batch_norm.cases import PARAMS, C, make_batch
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("how", ["local", "jit of sharded x", "gather", "two_psum"])
def test_variance_for_large_mean(how, mesh8):
    x = (np.random.default_rng(0).normal(size=(DEVICES, 4096, 8)) + 1e4).astype(np.float32)
    want = x.astype(np.float64).var((0, 1))
    if how == "local":
        var = jax.jit(sync_batch_norm)(x.reshape(-1, 8))[1].var
    elif how == "jit of sharded x":
        x = jax.device_put(x, NamedSharding(mesh8, P("data")))
        var = jax.jit(sync_batch_norm)(x)[1].var
    else:
        run = functools.partial(sync_batch_norm, axis_name="i", stats=how)
        var = jax.jit(jax.vmap(lambda x: run(x)[1].var, axis_name="i"))(x)[0]
    assert var.dtype == jnp.float32
    assert np.abs(var / want - 1).max() <= 5e-5


@pytest.mark.parametrize(
    ("axis_name", "stats"), [(None, "gather"), ("i", "two_psum"), ("i", "gather")]
)
def test_mask_without_counted_values(axis_name, stats):
    x = make_batch()["x"].reshape(DEVICES, -1, C)
    mask = np.zeros((1, 1), bool)

    def run(x):
        op = functools.partial(sync_batch_norm, axis_name=axis_name, mask=mask, stats=stats)
        (y, statistics), backward = jax.vjp(op, x)
        return y, statistics, backward((y, jax.tree.map(jnp.zeros_like, statistics)))[0]

    y, statistics, dx = jax.jit(jax.vmap(run, axis_name="i"))(x)
    np.testing.assert_array_equal(statistics.mean, 0)
    np.testing.assert_array_equal(statistics.var, 1)
    np.testing.assert_array_equal(statistics.count, 0)
    np.testing.assert_allclose(y, x, rtol=1e-5)
    np.testing.assert_allclose(dx, y, rtol=1e-5)


def test_single_value():
    @jax.jit
    def run(x):
        result, backward = jax.vjp(lambda x: sync_batch_norm(x, bias=jnp.ones(2)), x)
        return result, backward(result)[0]

    (y, statistics), dx = run(jnp.asarray([[3.0, -1.0]]))
    np.testing.assert_array_equal(y, 1)
    np.testing.assert_array_equal(statistics.var, 0)
    np.testing.assert_array_equal(statistics.count, 1)
    np.testing.assert_allclose(dx, 0, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 0, 4), (3, 0), (0, 4)])
def test_zero_sizes(shape):
    x, features = jnp.zeros(shape), jnp.ones(shape[-1])

    @jax.jit
    def run(*args):
        result, backward = jax.vjp(sync_batch_norm, *args)
        return result, backward(result)

    (y, statistics), (dx, dscale, _) = run(x, features, features)
    assert y.shape == shape
    assert dx.shape == shape
    np.testing.assert_array_equal(dscale, 0)
    if x.size == 0 and shape[-1]:
        np.testing.assert_array_equal(statistics.var, 1)
        np.testing.assert_array_equal(statistics.count, 0)


def test_constant_input():
    y, statistics = jax.jit(sync_batch_norm)(jnp.full((1024, 3), 1e4, jnp.float32))
    np.testing.assert_array_equal(statistics.var, 0)
    np.testing.assert_array_equal(y, 0)


def test_odd_width_and_large_maps():  # apex issue 1768
    x = np.random.default_rng(0).normal(1, 3, (2, 96, 96, 65)).astype(np.float32)
    y, _ = jax.jit(sync_batch_norm)(x)
    want, _ = oracles.batch_norm(x.astype(np.float64))
    np.testing.assert_allclose(y, want, atol=2e-5)


@vary("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    ("shape", "spec", "mask_shape", "feature_axis"),
    [
        ((8, 6, 4), ("data", None, "model"), (8, 6, 4), -1),
        ((8, 6, 4), ("data", None, "model"), (1, 6, 1), -1),
        ((4, 8, 3), (None, "data", None), (4, 8, 1), 0),
        ((6, 4, 5), ("model", "data", None), None, -1),
        ((8,), ("data",), None, -1),
        ((8, 0, 4), ("data", None, None), None, -1),
        ((8, 6, 4), (("data", "model"), None, None), (8, 1, 1), -1),
        ((12, 4), ("data", None), (12, 1), -1),
        ((5, 4, 8), (None, None, "data"), None, (0, 2)),
    ],
)
def test_sharded_axes_under_jit(mesh4x2, kind, shape, spec, mask_shape, feature_axis):
    mesh = Mesh(mesh4x2.devices, mesh4x2.axis_names, axis_types=(kind,) * 2)
    rng = np.random.default_rng(0)
    x, w = rng.normal(3, 2, (2, *shape))
    mask = None if mask_shape is None else rng.random(mask_shape) < 0.6

    def run(x, w, mask):
        def loss(x):
            y, statistics = sync_batch_norm(x, mask=mask, feature_axis=feature_axis)
            return jnp.sum(y * w), (y, statistics)

        return jax.grad(loss, has_aux=True)(x)

    want = jax.jit(run)(x, w, mask)
    placed = [jax.device_put(v, NamedSharding(mesh, P(*spec))) for v in (x, w)]
    if mask is not None:
        mask_spec = (s if n > 1 else None for s, n in zip(spec, mask_shape, strict=True))
        mask = jax.device_put(mask, NamedSharding(mesh, P(*mask_spec)))
    assert_trees_close(jax.jit(run)(*placed, mask), want, 1e-12)


def test_mask_per_feature():
    rng = np.random.default_rng(0)
    x, w, mask = rng.normal(size=(8, 6, C)), rng.normal(size=(8, 6, C)), rng.random((8, 6, C)) < 0.5

    def loss(norm, x):
        y, (_, _, count) = norm(x, mask=mask)
        return jnp.sum(y * w), count

    oracle = functools.partial(oracles.batch_norm, axes=(0, 1))
    want, _ = jax.jit(jax.grad(functools.partial(loss, oracle), has_aux=True))(x)
    got, count = jax.jit(jax.grad(functools.partial(loss, sync_batch_norm), has_aux=True))(x)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_array_equal(count, mask.sum((0, 1)))


@vary("shape", [(5, 1, 4), (5, 3, 1), (1, 3, 1)])
def test_mask_along_one_of_two_feature_axes(shape):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(5, 3, 4)), rng.random(shape) < 0.7
    norm = functools.partial(sync_batch_norm, feature_axis=(1, 2))
    y, statistics = jax.jit(norm)(x, mask=mask)
    flat = np.broadcast_to(mask, x.shape).reshape(5, 12)
    want, _ = jax.jit(sync_batch_norm)(x.reshape(5, 12), mask=flat)
    np.testing.assert_allclose(y, want.reshape(x.shape), atol=1e-12)
    np.testing.assert_array_equal(statistics.count, flat.sum(0).reshape(3, 4))


@vary("masked, stats", [(True, "gather"), (False, "two_psum")])
def test_single_examples(masked, stats):
    # The batch is the mapped axis; x has no batch axis.
    x, w = make_batch()["x"][:, 0, 0], make_batch()["w"][:, 0, 0]
    mask = np.arange(32)[:, None] % 3 < 2 if masked else np.ones((32, 1), bool)

    def one(x, mask, scale, bias):
        mask = mask if masked else None
        return sync_batch_norm(x, scale, bias, mask=mask, axis_name="i", stats=stats)

    def loss(norm, x, scale, bias):
        return jnp.sum(norm(x, mask, scale, bias)[0] * w)

    norms = [
        jax.vmap(one, (0, 0, None, None), (0, None), axis_name="i"),
        lambda x, mask, *params: sync_batch_norm(x, *params, mask=mask),
    ]
    args = x, PARAMS["scale"], PARAMS["bias"]
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(*args) for f in norms
    )
    assert_trees_close(got, want, 1e-12)
    assert_trees_close(*(jax.jit(f)(x, mask, *args[1:])[1] for f in norms), 1e-12)


def test_single_examples_of_several_feature_axes():
    x = make_batch()["x"][:, 0]
    norm = functools.partial(sync_batch_norm, feature_axis=(0, 1), axis_name="i")
    y, statistics = jax.jit(jax.vmap(norm, out_axes=(0, None), axis_name="i"))(x)
    want, flat = jax.jit(sync_batch_norm)(x.reshape(32, -1))
    np.testing.assert_allclose(y, want.reshape(x.shape), atol=1e-12)
    np.testing.assert_allclose(statistics.var, flat.var.reshape(3, C), atol=1e-12)
    given = batch_norm_inference(x[0], statistics.mean, statistics.var, feature_axis=(0, 1))
    np.testing.assert_allclose(given, y[0], atol=1e-12)


def test_masked_nan_is_ignored():
    x = np.array([[1.0], [3.0], [np.nan]])
    _, statistics = jax.jit(sync_batch_norm)(x, mask=np.array([[True], [True], [False]]))
    np.testing.assert_array_equal(statistics.mean, 2)


def test_gradient_ignores_masked_nan():
    x, mask = make_batch()["x"], make_batch()["mask"]
    padded = np.where(mask, x, np.nan)

    def loss(x, scale):
        y = sync_batch_norm(x, scale, mask=mask, activation="relu")[0]
        return jnp.sum(jnp.where(mask, y, 0) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    want = gradient(x, PARAMS["scale"])
    got = gradient(padded, PARAMS["scale"])
    assert_trees_close(got, want, 1e-12)


def test_gradient_of_complex_input_ignores_masked_nan():
    x, mask = make_batch()["x"] * (1 + 2j), make_batch()["mask"]

    def loss(x, scale):
        y = complex_batch_norm(x, scale, mask=mask)[0]
        return jnp.sum(jnp.where(mask, y, 0).real ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    want = gradient(x, PARAMS["scale"])
    got = gradient(np.where(mask, x, np.nan), PARAMS["scale"])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_no_gradient_flows_through_the_statistics():
    x = make_batch()["x"]
    statistics = lambda x: sync_batch_norm(x)[1]  # noqa: E731
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(statistics(x).mean + statistics(x).var)))(x)
    np.testing.assert_array_equal(gradient, 0)
