"""Tests that linen's and NNX's BatchNorm share."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx

import effjax.linen
import effjax.nnx

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)


class Linen:
    def __init__(self, example=X, of=effjax.linen, **options):
        self.module = of.BatchNorm(**options)
        self.variables: Any = self.module.init(
            jax.random.key(0), example, use_running_average=False
        )

    def train(self, x, **args):
        y, new = self.module.apply(
            self.variables, x, use_running_average=False, mutable=["batch_stats"], **args
        )
        self.variables = {**self.variables, **new}
        return y

    def train_by_example(self, x):
        def one(variables, x):
            return self.module.apply(
                variables, x, use_running_average=False, mutable=["batch_stats"]
            )

        return _over_examples(one)(self.variables, x)

    def evaluate(self, x):
        return self.module.apply(self.variables, x, use_running_average=True)

    @property
    def stats(self):
        return self.variables.get("batch_stats", {})


class Nnx:
    def __init__(self, example=X, of=effjax.nnx, **options):
        axis = options.get("axis", -1)
        features = np.prod([example.shape[a] for a in np.atleast_1d(axis)])
        options |= dict(rngs=nnx.Rngs(0), use_running_average=None)
        self.norm = of.BatchNorm(int(features), **options)

    def train(self, x, **args):
        return self.norm(x, use_running_average=False, **args)

    def train_by_example(self, x):
        graphdef, state = nnx.split(self.norm)

        def one(state, x):
            norm = nnx.merge(graphdef, state, copy=True)
            y = norm(x, use_running_average=False)
            return y, nnx.to_pure_dict(nnx.state(norm, nnx.BatchStat))

        return _over_examples(one)(state, x)

    def evaluate(self, x):
        return self.norm(x, use_running_average=True)

    @property
    def stats(self):
        return nnx.to_pure_dict(nnx.state(self.norm, nnx.BatchStat))


def _over_examples(one):
    return jax.vmap(one, in_axes=(None, 0), out_axes=(0, None), axis_name="batch")


FLAX = {Linen: linen, Nnx: nnx}


@pytest.fixture(params=[Linen, Nnx])
def flavor(request):
    return request.param


def test_cumulative_average(flavor):
    norm = flavor(momentum=None)
    batches = np.split(X, 3)
    for batch in batches:
        norm.train(batch)
    assert set(norm.stats) == {"mean", "var", "num_batches"}
    for name in ("mean", "var"):
        want = np.mean([getattr(b, name)((0, 1)) for b in batches], 0)
        np.testing.assert_allclose(norm.stats[name], want, rtol=1e-5)
    np.testing.assert_array_equal(norm.stats["num_batches"], 3)
    assert set(flavor().stats) == {"mean", "var"}


def test_evaluation_without_running_stats(flavor):
    # apex #1071
    norm = flavor(track_running_stats=False)
    assert not norm.stats
    y = norm.evaluate(X)
    np.testing.assert_allclose(y.mean((0, 1)), 0, atol=1e-5)


def test_single_examples_match_flax(flavor):
    """Single examples under vmap; linen initializes without the axis."""
    x, options = X[:, 0], dict(axis_name="batch", momentum=0.5)
    ours, flax_norm = (flavor(x[0], **options, **of) for of in ({}, {"of": FLAX[flavor]}))
    got, want = (norm.train_by_example(x) for norm in (ours, flax_norm))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    np.testing.assert_allclose(ours.evaluate(x[0]), flax_norm.evaluate(x[0]), atol=1e-5)
    with pytest.raises(ValueError, match="rank 2 or more, or rank 1 where `axis_name`"):
        flavor(x[0]).train(x[0])


def test_mask_along_one_of_two_feature_axes(flavor):
    mask = np.random.default_rng(1).random((6, 4, 1)) < 0.7
    norm = flavor(axis=(1, 2), momentum=0.0)
    y = norm.train(X, mask=mask)
    want = np.stack([X[mask[:, i, 0], i].mean(0) for i in range(4)])
    np.testing.assert_allclose(norm.stats["mean"].reshape(4, 5), want, rtol=1e-5)
    assert y.shape == X.shape


def test_complex_evaluation(flavor):
    """Complex running statistics, applied to complex and real inputs."""
    x = (X + 1j * np.roll(X, 1, 0)).astype(np.complex64)
    norm = flavor(momentum=0.0)
    y = norm.train(x)
    np.testing.assert_allclose(norm.evaluate(x), y, atol=1e-5)
    assert norm.evaluate(X).dtype == np.complex64


@pytest.mark.parametrize("average", [True, False])
def test_zero_epsilon_in_evaluation_only(flavor, average):
    options: Any = dict(epsilon=0.0, use_running_average=average)

    def normalize():
        if flavor is Nnx:
            return effjax.nnx.BatchNorm(5, **options, rngs=nnx.Rngs(0))(X)
        return effjax.linen.BatchNorm(**options).init_with_output(jax.random.key(0), X)[0]

    if average:
        np.testing.assert_array_equal(normalize(), X)
    else:
        with pytest.raises(ValueError, match=r"`epsilon` \(=0.0\) must be positive"):
            normalize()
