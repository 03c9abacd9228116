"""BatchNorm in linen's transformations; tests/layers has what both flavors share."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from effjax.linen import BatchNorm

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
KEY = jax.random.key(0)


def test_use_running_average_must_be_given_once():
    for options, args in ({}, {}), ({"use_running_average": True}, {"use_running_average": False}):
        with pytest.raises(Exception, match="use_running_average"):
            BatchNorm(**options).init(KEY, X, **args)


def test_lifted_transformations():
    """Lifted vmap, remat and scan."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return BatchNorm(use_running_average=False)(x), None

    axes: Any = dict(variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True})
    layers = nn.scan(nn.remat(Layer), **axes, length=2)()
    variables: Any = jax.jit(layers.init)(KEY, X, None)
    assert variables["batch_stats"]["BatchNorm_0"]["mean"].shape == (2, 5)

    def loss(params):
        (y, _), new = layers.apply({**variables, **params}, X, None, mutable=["batch_stats"])
        return (y * X).sum(), new

    grads, new = jax.jit(jax.grad(loss, has_aux=True))({"params": variables["params"]})
    assert jax.tree.all(jax.tree.map(lambda g: jnp.isfinite(g).all(), grads))
    running = new["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(running[0], 0.01 * X.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(running[1], 0, atol=1e-6)

    ensemble = nn.vmap(Layer, **axes)()
    (y, _), _ = jax.jit(ensemble.init_with_output)(KEY, np.stack([X, 2 * X]), None)
    np.testing.assert_allclose(y[0], y[1], atol=1e-4)


def test_tabulate_matches_flax():
    """The rows match; the numbers of operations differ."""

    class Net(nn.Module):
        norm: Any

        @nn.compact
        def __call__(self, x):
            norm = self.norm(use_running_average=False, name="norm")
            return norm(norm(nn.Dense(5)(x)))

    options: Any = dict(show_repeated=True, compute_flops=True, compute_vjp_flops=True)
    tables = [Net(norm).tabulate(KEY, X, **options) for norm in (BatchNorm, nn.BatchNorm)]
    rows = [[line.split("│")[1:3] for line in table.splitlines()] for table in tables]
    assert rows[0] == rows[1]


def test_initialization():
    """It normalizes too, also an example without a batch; statistics are created where missing."""
    module = BatchNorm(momentum=0.5, bias_init=nn.initializers.ones, use_running_average=False)
    y, variables = module.init_with_output(KEY, X[0, 0])
    np.testing.assert_array_equal(y, np.ones(5))
    params = {"params": variables["params"]}
    states = [module.apply(v, X, mutable=["batch_stats"])[1] for v in (variables, params)]
    chex.assert_trees_all_equal(*states)
