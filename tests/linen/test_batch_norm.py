import dataclasses
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

from effjax.linen import BatchNorm
from tests.tiers import exhaustive

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
MASK = np.random.default_rng(1).random((6, 4, 1)) < 0.6
SAME: dict[str, Any] = dict(atol=2e-6, rtol=2e-6)


def train(module, variables, x, **kwargs) -> Any:
    return module.apply(variables, x, use_running_average=False, mutable=["batch_stats"], **kwargs)


def evaluate(module, variables, x) -> Any:
    return module.apply(variables, x, use_running_average=True)


def init(module, x, **kwargs) -> Any:
    return module.init(jax.random.key(0), x, use_running_average=False, **kwargs)


def test_fields_extend_those_of_flax():
    def fields(cls):
        skip = ("parent", "name")
        return [(f.name, f.default) for f in dataclasses.fields(cls) if f.name not in skip]

    assert fields(BatchNorm)[: len(fields(nn.BatchNorm))] == fields(nn.BatchNorm)


@pytest.mark.parametrize(
    "options, axis",
    [
        ({}, -1),
        (dict(force_float32_reductions=False, param_dtype=jnp.float16), (1, -1)),
        (dict(bias_init=nn.initializers.normal(), scale_init=nn.initializers.normal()), (-1, 0)),
        *itertools.starmap(
            exhaustive,
            [
                (dict(momentum=0.9, epsilon=1e-3), 1),
                (dict(use_scale=False), -1),
                (dict(use_bias=False, use_scale=False), 0),
                (dict(use_fast_variance=False, dtype=jnp.float32), (-2, 0)),
            ],
        ),
    ],
)
def test_matches_flax(options, axis):
    """Variables, outputs and running statistics match; variables load both ways."""
    ours, flax_norm = BatchNorm(axis=axis, **options), nn.BatchNorm(axis=axis, **options)
    variables = init(flax_norm, X)
    chex.assert_trees_all_equal(init(ours, X), variables, strict=True)
    y, new = train(ours, variables, X)
    want_y, want = train(flax_norm, variables, X)
    tolerance: Any = dict(atol=2e-3, rtol=2e-3) if "param_dtype" in options else SAME
    np.testing.assert_allclose(y, want_y, **tolerance)
    assert y.dtype == want_y.dtype
    stored = serialization.to_bytes({**variables, **new})
    restored = serialization.from_bytes(variables, stored)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, want)
    for name in ("mean", "var"):
        np.testing.assert_allclose(new["batch_stats"][name], want["batch_stats"][name], **tolerance)
    np.testing.assert_allclose(
        evaluate(ours, restored, X), evaluate(flax_norm, restored, X), **tolerance
    )


def test_mask():
    x = np.where(MASK, X, np.nan)  # masked values must not matter, even NaN
    ours = BatchNorm(momentum=0.9)
    y, new = train(ours, init(ours, X), x, mask=MASK)
    counted = X[MASK[..., 0]]
    np.testing.assert_allclose(np.asarray(y)[MASK[..., 0]].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(y)[MASK[..., 0]].var(0), 1, rtol=1e-4)
    np.testing.assert_allclose(new["batch_stats"]["mean"], 0.1 * counted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(new["batch_stats"]["var"], 0.9 + 0.1 * counted.var(0), rtol=1e-5)


def test_initialization_needs_no_axis():
    module = BatchNorm(axis_name="absent", axis_index_groups=[[0, 1], [2, 3]])
    variables = init(module, X)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], 0)
    np.testing.assert_array_equal(variables["batch_stats"]["var"], 1)


def test_shared_layer():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = BatchNorm(name="norm", use_running_average=False, axis_name="absent")
            x = norm(x)
            return x, norm(x)

    (first, second), variables = Twice().init_with_output(jax.random.key(0), X)
    assert list(variables["params"]) == ["norm"]
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_use_running_average_must_be_given_once():
    with pytest.raises(Exception, match="use_running_average"):
        BatchNorm().init(jax.random.key(0), X)
    with pytest.raises(Exception, match="use_running_average"):
        BatchNorm(use_running_average=True).init(jax.random.key(0), X, use_running_average=False)


def test_dtypes():
    x = jnp.asarray(X, jnp.bfloat16)
    module = BatchNorm(momentum=0.0)
    y, new = train(module, init(module, x), x)
    assert y.dtype == jnp.bfloat16
    stats = new["batch_stats"]
    assert stats["mean"].dtype == stats["var"].dtype == jnp.float32
    np.testing.assert_allclose(stats["var"], np.asarray(x, np.float64).var((0, 1)), rtol=1e-5)
    module = BatchNorm(momentum=0.0, dtype=jnp.float32)
    assert train(module, init(module, x), x)[0].dtype == jnp.float32
    ints = jnp.arange(12).reshape(4, 3)
    assert train(module, init(module, ints), ints)[0].dtype == jnp.float32
    with pytest.raises(ValueError, match="int32"):
        init(BatchNorm(dtype=jnp.int32), x)


def test_statistics_have_the_precision_of_the_input():
    x = jnp.asarray(X + 300)  # float16 would lose most of the deviations
    module = BatchNorm(momentum=0.0, dtype=jnp.float16)
    y, new = train(module, init(module, x), x)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(new["batch_stats"]["var"], np.asarray(x).var((0, 1)), rtol=1e-4)


def test_variance_is_stable():
    """The error of Flax's default variance is 25 % here; `use_fast_variance` has no effect."""
    x = np.random.default_rng(2).normal(1e3, 1, (512, 3)).astype(np.float32)
    module = BatchNorm(momentum=0.0, use_fast_variance=True)
    _, new = train(module, init(module, x), x)
    np.testing.assert_allclose(new["batch_stats"]["var"], x.astype(np.float64).var(0), rtol=5e-6)


def test_complex_input():
    """Complex mean and variance E|x - mean|², as in Flax, with a mask and gradients."""
    x = (X + 1j * np.roll(X, 1, 0)).astype(np.complex64)
    module, flax_norm = (
        cls(momentum=0.9, dtype=jnp.complex64) for cls in (BatchNorm, nn.BatchNorm)
    )
    variables = init(module, x)
    y, new = train(module, variables, x, mask=MASK)
    want_y, want = train(flax_norm, variables, x, mask=MASK)
    assert y.dtype == new["batch_stats"]["mean"].dtype == jnp.complex64
    np.testing.assert_allclose(y, want_y, atol=1e-5)
    for name in ("mean", "var"):
        np.testing.assert_allclose(new["batch_stats"][name], want["batch_stats"][name], rtol=1e-5)
    grads = [
        jax.grad(lambda x, m=m: jnp.real(train(m, variables, x)[0] * x[::-1]).sum())(jnp.asarray(x))
        for m in (module, flax_norm)
    ]
    np.testing.assert_allclose(*grads, atol=2e-4)
    with pytest.raises(TypeError, match="complex64"):
        train(BatchNorm(activation="relu", dtype=jnp.complex64), variables, x)


def test_unbiased_running_var():
    """The running variance is n/(n - 1) times that of the output (torch #22192)."""
    biased, unbiased = BatchNorm(momentum=0.0), BatchNorm(momentum=0.0, unbiased_running_var=True)
    variables = init(biased, X)
    y, new = train(unbiased, variables, X, mask=MASK)
    np.testing.assert_array_equal(y, train(biased, variables, X, mask=MASK)[0])
    np.testing.assert_allclose(new["batch_stats"]["var"], X[MASK[..., 0]].var(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_value_batches(n):
    """An empty batch changes no statistics; one value has variance 0 (apex #262, torch #36530)."""
    module = BatchNorm(momentum=0.5, unbiased_running_var=True)
    variables = init(module, X)
    y, new = train(module, variables, X[:n, 0])
    assert y.shape == (n, 5)
    np.testing.assert_allclose(y, 0, atol=1e-6)
    np.testing.assert_allclose(new["batch_stats"]["mean"], 0.5 * X[0, 0] if n else 0)
    np.testing.assert_allclose(new["batch_stats"]["var"], 0.5 if n else 1)


@pytest.mark.parametrize("momentum", [0.5, None])
def test_masked_channels_preserve_their_running_stats(momentum):
    module = BatchNorm(momentum=momentum)
    mask = np.array([True, False, True, True, False])
    y, new = train(module, init(module, X), X, mask=mask)
    stats = new["batch_stats"]
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(stats["mean"][~mask], 0)
    np.testing.assert_array_equal(stats["var"][~mask], 1)
    assert (stats["mean"][mask] != 0).all()


def test_residual_and_activation():
    module = BatchNorm(activation="relu")
    residual = np.random.default_rng(3).normal(size=X.shape).astype(np.float32)
    variables = init(module, X)
    for average in (False, True):
        plain, _ = BatchNorm().apply(variables, X, average, mutable=["batch_stats"])
        y, _ = module.apply(variables, X, average, residual=residual, mutable=["batch_stats"])
        np.testing.assert_allclose(y, np.maximum(plain + residual, 0), **SAME)
    with pytest.raises(ValueError, match="gelu"):
        init(BatchNorm(activation="gelu"), X)  # type: ignore[arg-type]


def test_no_gradient_through_running_stats():
    module = BatchNorm()
    variables = init(module, X)

    def running(x, mean):
        stats = {**variables["batch_stats"], "mean": mean}
        _, new = train(module, {**variables, "batch_stats": stats}, x)
        return sum(v.sum() for v in jax.tree.leaves(new))

    grads = jax.grad(running, argnums=(0, 1))(jnp.asarray(X), jnp.ones(5))
    assert all((g == 0).all() for g in grads)


def test_rejects_axis_out_of_range():
    with pytest.raises(ValueError, match="rank 3"):
        init(BatchNorm(axis=3), X)


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
    variables: Any = layers.init(jax.random.key(0), X, None)
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
    (y, _), variables = ensemble.init_with_output(jax.random.key(0), np.stack([X, 2 * X]), None)
    np.testing.assert_allclose(y[0], y[1], atol=1e-4)


@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map unchecked", "jit"])
def test_statistics_over_devices(how, mesh8):
    """Unequal counts on eight devices, one of them 0, are weighted (apex #387)."""
    x = np.random.default_rng(4).normal(2, 3, (16, 5)).astype(np.float32)
    mask = np.random.default_rng(5).random((16, 1)) < 0.7
    mask[2:4] = False  # nothing on the second device
    module = BatchNorm(momentum=0.0, axis_name=None if how == "jit" else "data")
    variables = init(module, x)

    def local(variables, x, mask):
        y, new = train(module, variables, x, mask=mask)
        return y, new["batch_stats"]

    if how == "pmap":
        run = jax.pmap(local, axis_name="data", in_axes=(None, 0, 0), out_axes=(0, None))
        y, stats = run(variables, x.reshape(8, 2, 5), mask.reshape(8, 2, 1))
        y = y.reshape(x.shape)
    elif how == "jit":
        sharded = jax.NamedSharding(mesh8, jax.P("data"))
        y, stats = jax.jit(local)(variables, jax.device_put(x, sharded), mask)
    else:
        specs: dict[str, Any] = dict(
            in_specs=(jax.P(), jax.P("data"), jax.P("data")), out_specs=(jax.P("data"), jax.P())
        )
        run = jax.shard_map(local, mesh=mesh8, check_vma=how == "shard_map", **specs)
        y, stats = jax.jit(run)(variables, x, mask)
    counted = x[mask[:, 0]]
    np.testing.assert_allclose(stats["mean"], counted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["var"], counted.var(0), rtol=1e-5)
    want = (x - counted.mean(0)) / np.sqrt(counted.var(0) + 1e-5)
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(compute_flops=True, compute_vjp_flops=True)])
def test_tabulate_matches_flax(options):
    """The rows match; the numbers of operations differ."""

    class Net(nn.Module):
        norm: Any

        @nn.compact
        def __call__(self, x):
            norm = self.norm(use_running_average=False, name="norm")
            return norm(norm(nn.Dense(5)(x)))

    tables = [
        Net(cls).tabulate(jax.random.key(0), X, show_repeated=True, **options)
        for cls in (BatchNorm, nn.BatchNorm)
    ]
    if options:
        tables = [[line.split("│")[1:3] for line in table.splitlines()] for table in tables]
    assert tables[0] == tables[1]


def test_apply_without_running_stats_creates_them():
    module = BatchNorm(momentum=0.5)
    variables = init(module, X)
    _, want = train(module, variables, X)
    _, new = train(module, {"params": variables["params"]}, X)
    chex.assert_trees_all_equal(new, want)
