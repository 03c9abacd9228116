"""Accuracy of the statistics, masks, shapes and dtypes."""

import functools

import hypothesis
import hypothesis.strategies as st
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
from tests.ops.batch_norm.cases import PARAMS, C, make_batch, results
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


@vary("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype):
    batch = make_batch()
    x = jnp.asarray(batch["x"], dtype)
    params = [jnp.asarray(v, jnp.float32) for v in PARAMS.values()]
    norm = functools.partial(sync_batch_norm, activation="relu")
    (dx, dparams), (y, statistics) = results(norm, x, params, batch["w"])
    assert y.dtype == dx.dtype == x.dtype
    assert {str(v.dtype) for v in (*dparams, *statistics)} == {"float32"}
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), (x, params))
    oracle = functools.partial(oracles.batch_norm, relu=True)
    want, (y_want, _) = results(oracle, *wide, batch["w"])
    assert_trees_close((y, dx, dparams), (y_want, *want), 4 * float(jnp.finfo(dtype).eps) + 1e-6)


@hypothesis.given(data=st.data())
def test_any_rank_and_feature_axes(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple))
    axis_count = data.draw(st.integers(1, len(shape) - 1))
    chosen = data.draw(st.permutations(range(len(shape))))[:axis_count]
    negative = data.draw(st.booleans())
    axis = tuple(a - len(shape) if negative else a for a in chosen)
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    features = tuple(n for a, n in enumerate(shape) if a in chosen)
    scale, bias = rng.normal(size=(2, *features))
    reduced = tuple(a for a in range(len(shape)) if a not in chosen)

    @jax.jit
    def run(x, scale, bias):
        norm = functools.partial(sync_batch_norm, feature_axis=axis if len(axis) > 1 else axis[0])
        y, statistics = norm(x, scale, bias)
        given = statistics.mean, statistics.var, scale, bias
        return y, statistics, batch_norm_inference(x, *given, feature_axis=axis)

    y, statistics, inferred = run(x, scale, bias)
    mean, var = x.mean(reduced, keepdims=True), x.var(reduced, keepdims=True)
    want = (x - mean) / np.sqrt(var + 1e-5) * scale.reshape(mean.shape) + bias.reshape(mean.shape)
    assert statistics.mean.shape == statistics.var.shape == features
    assert statistics.count == x.size // mean.size
    np.testing.assert_allclose(y, want, atol=1e-9)
    np.testing.assert_allclose(statistics.mean.ravel(), mean.ravel(), atol=1e-12)
    np.testing.assert_allclose(inferred, y, atol=1e-12)


def test_inference_accepts_zero_epsilon():
    # Frozen norms of detection code use 0.
    x, var = np.linspace(-1, 1, C), np.linspace(1, 2, C)
    y = batch_norm_inference(x, np.zeros(C), var, epsilon=0)
    np.testing.assert_allclose(y, x / np.sqrt(var))


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


@pytest.mark.parametrize("count", [1, 1024])
def test_constant_input(count):
    x, params = np.full((count, 2), 1e4, np.float32), (np.ones(2), np.ones(2))
    (dx, _), (y, statistics) = results(sync_batch_norm, x, params, w=2.0)
    np.testing.assert_array_equal(y, 1)
    np.testing.assert_array_equal(statistics.var, 0)
    np.testing.assert_array_equal(statistics.count, count)
    np.testing.assert_allclose(dx, 0, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 0, 4), (3, 0), (0, 4)])
def test_zero_sizes(shape):
    x, features = np.zeros(shape), np.ones(shape[-1])
    (dx, (dscale, _)), (y, statistics) = results(sync_batch_norm, x, (features, features))
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dscale, 0)
    if shape[-1]:
        np.testing.assert_array_equal(statistics.var, 1)
        np.testing.assert_array_equal(statistics.count, 0)


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

    def place(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, P(*spec)))

    rng = np.random.default_rng(0)
    x, w = rng.normal(3, 2, (2, *shape))
    mask = None if mask_shape is None else rng.random(mask_shape) < 0.6
    params = rng.normal(size=(2, *(shape[axis] for axis in np.atleast_1d(feature_axis))))
    run = functools.partial(results, functools.partial(sync_batch_norm, feature_axis=feature_axis))
    want = run(x, (*params,), w, mask=mask)
    if mask is not None:
        mask = place(mask, *(s if n > 1 else None for s, n in zip(spec, mask_shape, strict=True)))
    got = run(place(x, *spec), (*place(params),), place(w, *spec), mask=mask)
    assert_trees_close(got, want, 1e-12)


def test_mask_per_feature():
    rng = np.random.default_rng(0)
    x, w, mask = rng.normal(size=(8, 6, C)), rng.normal(size=(8, 6, C)), rng.random((8, 6, C)) < 0.5
    got, (_, (_, _, count)) = results(sync_batch_norm, x, w=w, mask=mask)
    want, _ = results(functools.partial(oracles.batch_norm, axes=(0, 1)), x, w=w, mask=mask)
    assert_trees_close(got, want, 1e-12)
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
    x, w = (make_batch()[name][:, 0, 0] for name in "xw")
    mask = {"mask": np.arange(32)[:, None] % 3 < 2} if masked else {}

    def mapped(x, *params, **mask):
        norm = functools.partial(sync_batch_norm, axis_name="i", stats=stats)
        one = jax.vmap(lambda x, mask: norm(x, *params, **mask), out_axes=(0, None), axis_name="i")
        return one(x, mask)

    got, want = (results(f, x, (*PARAMS.values(),), w, **mask) for f in (mapped, sync_batch_norm))
    assert_trees_close(got, want, 1e-12)


def test_single_examples_of_several_feature_axes():
    x = make_batch()["x"][:, 0]
    norm = functools.partial(sync_batch_norm, feature_axis=(0, 1), axis_name="i")
    y, statistics = jax.jit(jax.vmap(norm, out_axes=(0, None), axis_name="i"))(x)
    want, flat = jax.jit(sync_batch_norm)(x.reshape(32, -1))
    np.testing.assert_allclose(y, want.reshape(x.shape), atol=1e-12)
    np.testing.assert_allclose(statistics.var, flat.var.reshape(3, C), atol=1e-12)
    given = batch_norm_inference(x[0], statistics.mean, statistics.var, feature_axis=(0, 1))
    np.testing.assert_allclose(given, y[0], atol=1e-12)


@pytest.mark.parametrize("is_complex", [False, True])
def test_masked_nan_is_ignored(is_complex):
    batch = make_batch()
    mask, x = batch["mask"], batch["x"] * (1 + 2j if is_complex else 1)
    relu = functools.partial(sync_batch_norm, activation="relu")
    norm = complex_batch_norm if is_complex else relu

    def counted(x, scale):
        y, statistics = norm(x, scale, mask=mask)
        return jnp.where(mask, y, 0).real ** 2, statistics

    got, want = (results(counted, x, (PARAMS["scale"],)) for x in (np.where(mask, x, np.nan), x))
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    jax.tree.map(close, got, want)


def test_no_gradient_flows_through_the_statistics():
    x = make_batch()["x"]
    statistics = lambda x: sync_batch_norm(x)[1]  # noqa: E731
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(statistics(x).mean + statistics(x).var)))(x)
    np.testing.assert_array_equal(gradient, 0)
