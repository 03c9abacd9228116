"""Dtypes, shapes and argument errors."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import batch_norm_inference, sync_batch_norm
from tests import oracles
from tests.contexts import assert_trees_close
from tests.ops.batch_norm.cases import PARAMS, C, make_batch
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")


@vary("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype):
    batch = make_batch()
    x = jnp.asarray(batch["x"], dtype)
    params = {k: jnp.asarray(v, jnp.float32) for k, v in PARAMS.items()}

    def loss(x, params):
        y, statistics = sync_batch_norm(x, **params, activation="relu")
        return jnp.sum(y.astype(jnp.float64) * batch["w"]), (y, statistics)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (dx, dparams), (y, statistics) = gradient(x, params)
    assert y.dtype == dx.dtype == x.dtype
    assert {v.dtype for v in dparams.values()} == {jnp.dtype(jnp.float32)}
    assert {v.dtype for v in statistics} == {jnp.promote_types(dtype, jnp.float32)}
    exact = x.astype(jnp.float64)
    wide = jax.tree.map(lambda v: v.astype(jnp.float64), params)

    def oracle(x, params):
        y = oracles.batch_norm(x, **params, relu=True)[0]
        return jnp.sum(y * batch["w"]), y

    want, y_want = jax.jit(jax.grad(oracle, argnums=(0, 1), has_aux=True))(exact, wide)
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


X = np.ones((4, 3, C), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"`scale` of shape \(4,\) must be \(5,\)", {"scale": np.ones(4)}),
        (ValueError, r"`epsilon` \(=0\) must be positive", {"epsilon": 0}),
        (ValueError, r"`activation` \(='gelu'\)", {"activation": "gelu"}),
        (ValueError, "`residual` of shape", {"residual": np.ones((4, C), np.float32)}),
        (TypeError, "cast one of them", {"residual": X.astype(np.float64)}),
        (ValueError, "feature_axis: axis 3 is out of bounds", {"feature_axis": 3}),
        (ValueError, "must name at least one axis", {"feature_axis": ()}),
        (ValueError, r"`axis_name` \(='i'\) is not mapped", {"axis_name": "i"}),
        (ValueError, "several different names", {"axis_name": ("i", 0)}),
        (ValueError, "devices of one axis", {"axis_index_groups": [[0], [1]]}),
    ],
)
def test_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        effjax.sync_batch_norm(**{"x": X, **args})


def test_inference_accepts_zero_epsilon():
    # Frozen norms of detection code use 0.
    x, var = np.linspace(-1, 1, C), np.linspace(1, 2, C)
    np.testing.assert_allclose(
        batch_norm_inference(x, np.zeros(C), var, epsilon=0), x / np.sqrt(var)
    )
    with pytest.raises(ValueError, match=r"`epsilon` \(=-1\) must be at least 0"):
        batch_norm_inference(x, np.zeros(C), var, epsilon=-1)
