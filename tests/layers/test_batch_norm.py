"""BatchNorm of linen and of NNX keep the same statistics: one battery for both."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import effjax.linen
import effjax.nnx

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)


class Linen:
    def __init__(self, **options):
        self.module = effjax.linen.BatchNorm(**options)
        self.variables: Any = self.module.init(jax.random.key(0), X, use_running_average=False)

    def train(self, x):
        y, new = self.module.apply(
            self.variables, x, use_running_average=False, mutable=["batch_stats"]
        )
        self.variables = {**self.variables, **new}
        return y

    def evaluate(self, x):
        return self.module.apply(self.variables, x, use_running_average=True)

    @property
    def stats(self):
        return self.variables.get("batch_stats", {})


class Nnx:
    def __init__(self, **options):
        self.norm = effjax.nnx.BatchNorm(5, rngs=nnx.Rngs(0), use_running_average=None, **options)

    def train(self, x):
        return self.norm(x, use_running_average=False)

    def evaluate(self, x):
        return self.norm(x, use_running_average=True)

    @property
    def stats(self):
        return nnx.to_pure_dict(nnx.state(self.norm, nnx.BatchStat))


@pytest.fixture(params=[Linen, Nnx])
def flavour(request):
    return request.param


def test_momentum_none_is_the_mean_over_batches(flavour):
    norm = flavour(momentum=None)
    batches = np.split(X, 3)
    for batch in batches:
        norm.train(batch)
    assert set(norm.stats) == {"mean", "var", "num_batches"}
    for name in ("mean", "var"):
        want = np.mean([getattr(b, name)((0, 1)) for b in batches], 0)
        np.testing.assert_allclose(norm.stats[name], want, rtol=1e-5)
    np.testing.assert_array_equal(norm.stats["num_batches"], 3)
    assert set(flavour().stats) == {"mean", "var"}  # no counter otherwise


def test_without_running_stats_evaluation_uses_the_batch(flavour):
    """apex #1071."""
    norm = flavour(track_running_stats=False)
    assert not norm.stats
    y = norm.evaluate(X)
    np.testing.assert_allclose(y.mean((0, 1)), 0, atol=1e-5)
