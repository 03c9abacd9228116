from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

from effjax.linen import BatchNorm
from tests.tiers import vary

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
SAME: dict[str, Any] = dict(atol=2e-6, rtol=2e-6)


def train(module, variables, x, **kwargs) -> Any:
    return module.apply(variables, x, use_running_average=False, mutable=["batch_stats"], **kwargs)


def init(module, x, **kwargs) -> Any:
    return module.init(jax.random.key(0), x, use_running_average=False, **kwargs)


@vary(
    "options",
    [
        dict(axis=(1, -1), force_float32_reductions=False, param_dtype=jnp.float16),
        dict(axis=(-2, 0), scale_init=nn.initializers.normal()),
    ],
)
def test_several_axes_match_flax(options):
    """Variables, outputs and running statistics match; variables load both ways."""
    ours, flax_norm = BatchNorm(**options), nn.BatchNorm(**options)
    variables, same = jax.jit(lambda: [init(norm, X) for norm in (flax_norm, ours)])()
    chex.assert_trees_all_equal(same, variables, strict=True)
    steps = jax.jit(lambda v: [train(norm, v, X) for norm in (ours, flax_norm)])
    (y, new), (want_y, want) = steps(variables)
    tolerance: Any = dict(atol=2e-3, rtol=2e-3) if "param_dtype" in options else SAME
    np.testing.assert_allclose(y, want_y, **tolerance)
    chex.assert_trees_all_close(new, want, **tolerance)
    stored = serialization.to_bytes({**variables, **new})
    restored = serialization.from_bytes(variables, stored)
    evaluated = [norm.apply(restored, X, use_running_average=True) for norm in (ours, flax_norm)]
    np.testing.assert_allclose(*evaluated, **tolerance)


def test_use_running_average_must_be_given_once():
    with pytest.raises(Exception, match="use_running_average"):
        BatchNorm().init(jax.random.key(0), X)
    with pytest.raises(Exception, match="use_running_average"):
        BatchNorm(use_running_average=True).init(jax.random.key(0), X, use_running_average=False)


def test_lifted_transformations():
    """Lifted vmap, remat and scan."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return BatchNorm(use_running_average=False)(x), None

    layers = nn.scan(
        nn.remat(Layer), variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True},
        length=2,
    )()  # fmt: skip
    variables: Any = jax.jit(layers.init)(jax.random.key(0), X, None)
    assert variables["batch_stats"]["BatchNorm_0"]["mean"].shape == (2, 5)

    def loss(params):
        (y, _), new = layers.apply({**variables, **params}, X, None, mutable=["batch_stats"])
        return (y * X).sum(), new

    grads, new = jax.jit(jax.grad(loss, has_aux=True))({"params": variables["params"]})
    assert jax.tree.all(jax.tree.map(lambda g: jnp.isfinite(g).all(), grads))
    running = new["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(running[0], 0.01 * X.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(running[1], 0, atol=1e-6)

    ensemble = nn.vmap(
        Layer, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}
    )()
    examples = np.stack([X, 2 * X])
    (y, _), variables = jax.jit(ensemble.init_with_output)(jax.random.key(0), examples, None)
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
    tables = [
        Net(cls).tabulate(jax.random.key(0), X, **options) for cls in (BatchNorm, nn.BatchNorm)
    ]
    rows = [[line.split("│")[1:3] for line in table.splitlines()] for table in tables]
    assert rows[0] == rows[1]


def test_apply_without_running_stats_creates_them():
    module = BatchNorm(momentum=0.5)
    variables = init(module, X)
    _, want = train(module, variables, X)
    _, new = train(module, {"params": variables["params"]}, X)
    chex.assert_trees_all_equal(new, want)
