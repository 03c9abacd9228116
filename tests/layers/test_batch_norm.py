"""BatchNorm of linen and nnx."""

import functools
import inspect
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import effjax.linen
import effjax.nnx
from tests.contexts import CONTEXTS, assert_trees_close, single_device
from tests.tiers import vary

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
COMPLEX = (X + 1j * np.roll(X, 1, 0)).astype(np.complex64)
MASK = np.random.default_rng(1).random((6, 4, 1)) < 0.6
ONES = jax.nn.initializers.ones


def of_linen(package, x, **options):
    module = package.BatchNorm(**options)
    variables = module.init(jax.random.key(0), x, use_running_average=False)

    def apply(params, stats, x, train=True, **args):
        y, new = module.apply(
            {"params": params, "batch_stats": stats}, x, use_running_average=not train,
            mutable=["batch_stats"], **args,
        )  # fmt: skip
        return y, new.get("batch_stats", {})

    return apply, variables.get("params", {}), variables.get("batch_stats", {})


def of_nnx(package, x, axis: Any = -1, **options):
    features = int(np.prod([x.shape[a] for a in np.atleast_1d(axis)]))
    options |= dict(axis=axis, use_running_average=None, rngs=nnx.Rngs(0))
    graphdef, *states = nnx.split(package.BatchNorm(features, **options), nnx.Param, nnx.BatchStat)

    def apply(params, stats, x, train=True, **args):
        norm = nnx.merge(graphdef, params, stats, copy=True)
        y = norm(x, use_running_average=not train, **args)
        return y, nnx.to_pure_dict(nnx.state(norm, nnx.BatchStat))

    return apply, *map(nnx.to_pure_dict, states)


FLAVORS = {"linen": (of_linen, effjax.linen, linen), "nnx": (of_nnx, effjax.nnx, nnx)}


class Norm:
    """A layer and its variables; ``apply(params, stats, x) -> (y, new stats)``."""

    def __init__(self, flavor, x=X, flax=False, **options):
        make, ours, theirs = FLAVORS[flavor]
        self.apply, self.params, self.stats = make(theirs if flax else ours, x, **options)

    def train(self, x, **args):
        y, self.stats = self.apply(self.params, self.stats, x, **args)
        return y

    def evaluate(self, x, **args):
        return self.apply(self.params, self.stats, x, train=False, **args)[0]


@pytest.fixture(params=FLAVORS)
def make(request):
    return functools.partial(Norm, request.param)


def assert_same(got, want, rtol=2e-6, atol=2e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_signature_extends_that_of_flax(flavor):
    def arguments(package):
        params = inspect.signature(package.BatchNorm.__init__).parameters.values()
        functions = ("scale_init", "bias_init")  # equal functions, but other objects in nnx
        return [
            (p.name, p.kind, None if p.name in functions else p.default)
            for p in params
            if p.name not in ("parent", "name")
        ]

    ours, theirs = map(arguments, FLAVORS[flavor][1:])
    assert ours[: len(theirs)] == theirs


BOTH: list[dict[str, Any]] = [
    dict(axis=1, momentum=0.9, epsilon=1e-3, use_bias=False, use_scale=False),
    dict(use_scale=False, use_fast_variance=False, dtype=jnp.float32, bias_init=ONES),
]
SEVERAL_AXES: list[dict[str, Any]] = [  # with a tuple, Flax has them in linen only
    dict(axis=(-2, 0), scale_init=jax.nn.initializers.normal()),
    dict(axis=(1, -1), force_float32_reductions=False, param_dtype=jnp.float16),
]


@pytest.mark.parametrize(
    ("flavor", "options"),
    [*itertools.product(FLAVORS, BOTH), *itertools.product(["linen"], SEVERAL_AXES)],
)
def test_matches_flax(flavor, options):
    """Variables are equal, so that they load both ways; outputs and statistics match."""
    ours, theirs = (Norm(flavor, flax=flax, **options) for flax in (False, True))
    before = [(norm.params, norm.stats) for norm in (ours, theirs)]
    chex.assert_trees_all_equal(*before, strict=True)
    same = functools.partial(assert_same, **dict.fromkeys(("rtol", "atol"), 2e-3))
    same = same if "param_dtype" in options else assert_same
    same(ours.train(X), theirs.train(X))
    same(ours.stats, theirs.stats)
    same(ours.evaluate(X), theirs.evaluate(X))


def test_masked_values_are_ignored(make):
    norm, counted = make(momentum=0.9), X[MASK[..., 0]]
    y = np.asarray(norm.train(np.where(MASK, X, np.nan), mask=MASK))[MASK[..., 0]]
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(y.var(0), 1, rtol=1e-4)
    assert_same(
        norm.stats, dict(mean=0.1 * counted.mean(0), var=0.9 + 0.1 * counted.var(0)), rtol=1e-5
    )
    norm = make(axis=(1, 2), momentum=0.0)
    assert norm.train(X, mask=MASK).shape == X.shape
    want = np.stack([X[MASK[:, i, 0], i].mean(0) for i in range(4)])
    np.testing.assert_allclose(norm.stats["mean"].reshape(4, 5), want, rtol=1e-5)


def test_residual_activation_and_unbiased_variance(make):
    """The running variance is n/(n - 1) times that of the output (torch #22192)."""
    norm = make(momentum=0.0, unbiased_running_var=True, activation="relu")
    residual = np.random.default_rng(3).normal(size=X.shape).astype(np.float32)
    mean, var, unbiased = X.mean((0, 1)), X.var((0, 1)), X.reshape(-1, 5).var(0, ddof=1)
    for run, used in (norm.train, var), (norm.evaluate, unbiased):
        want = np.maximum((X - mean) / np.sqrt(used + 1e-5) + residual, 0)
        np.testing.assert_allclose(run(X, residual=residual), want, atol=1e-5)
        np.testing.assert_allclose(norm.stats["var"], unbiased, rtol=1e-5)


def test_dtypes(make):
    for x, dtype, want in (
        (jnp.asarray(X, jnp.bfloat16), None, jnp.bfloat16),
        (jnp.asarray(X, jnp.bfloat16), jnp.float32, jnp.float32),
        (jnp.asarray(X, jnp.int32), None, jnp.float32),
    ):
        norm = make(dtype=dtype)
        assert norm.train(x).dtype == want
        assert all(v.dtype == jnp.float32 for v in norm.stats.values())


def test_statistics_are_stable(make):
    """The error of Flax's default variance is 25 % here, and float16 would lose the deviations."""
    x = np.random.default_rng(2).normal(1e3, 1, (512, 3)).astype(np.float32)
    norm = make(x, momentum=0.0, use_fast_variance=True, dtype=jnp.float16)
    assert norm.train(x).dtype == jnp.float16
    np.testing.assert_allclose(norm.stats["var"], x.astype(np.float64).var(0), rtol=5e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_value_batches(make, n):
    """An empty batch changes no statistics; one value has variance 0 (apex #262, torch #36530)."""
    norm = make(momentum=0.5, unbiased_running_var=True)
    y = norm.train(X[:n, 0])
    assert y.shape == (n, 5)
    np.testing.assert_allclose(y, 0, atol=1e-6)
    np.testing.assert_allclose(norm.stats["mean"], 0.5 * X[0, 0] if n else 0)
    np.testing.assert_allclose(norm.stats["var"], 0.5 if n else 1)


@vary("momentum", [0.5, None])
def test_masked_channels_preserve_their_running_stats(make, momentum):
    norm = make(momentum=momentum)
    mask = np.array([True, False, True, True, False])
    assert np.isfinite(norm.train(X, mask=mask)).all()
    np.testing.assert_array_equal(norm.stats["mean"][~mask], 0)
    np.testing.assert_array_equal(norm.stats["var"][~mask], 1)
    assert (norm.stats["mean"][mask] != 0).all()


def test_cumulative_average(make):
    norm, batches = make(momentum=None), np.split(X, 3)
    for batch in batches:
        norm.train(batch)
    want = {n: np.mean([getattr(b, n)((0, 1)) for b in batches], 0) for n in ("mean", "var")}
    assert_same(norm.stats, want | {"num_batches": 3}, rtol=1e-5)


def test_evaluation(make):
    """It needs no axis with running statistics; without them it needs the axis (apex #1071)."""
    norm = make(use_scale=False, use_bias=False, axis_name="absent")  # apex #913, #158
    np.testing.assert_allclose(norm.evaluate(X[:1, 0]), X[:1, 0] / np.sqrt(1 + 1e-5), rtol=1e-6)
    norm = make(track_running_stats=False)
    assert not norm.stats
    np.testing.assert_allclose(norm.evaluate(X).mean((0, 1)), 0, atol=1e-5)
    with pytest.raises(ValueError, match="with track_running_stats=False always"):
        make(axis_name="absent", track_running_stats=False).evaluate(X)


def test_no_gradient_through_running_stats(make):
    norm = make()

    def running(x, stats):
        return sum(v.sum() for v in jax.tree.leaves(norm.apply(norm.params, stats, x)[1]))

    gradients = jax.jit(jax.grad(running, argnums=(0, 1)))(X, norm.stats)
    assert not any(np.any(g) for g in jax.tree.leaves(gradients))


def test_single_examples_match_flax(make):
    """Single examples under vmap; linen initializes without the axis."""
    x, options = X[:, 0], dict(axis_name="batch", momentum=0.5)

    def train(norm):
        one = lambda x: norm.apply(norm.params, norm.stats, x)  # noqa: E731
        return jax.jit(jax.vmap(one, out_axes=(0, None), axis_name="batch"))(x)

    ours, theirs = (train(make(x[0], flax=flax, **options)) for flax in (False, True))
    assert_same(ours, theirs, atol=1e-5)


def test_an_example_of_rank_one_matches_flax(make):
    """Without a batch it is its own mean."""
    x, options = X[0, 0], dict(momentum=0.5, bias_init=ONES)

    def train(norm):
        def loss(params, x):
            y, new = norm.apply(params, norm.stats, x)
            return (x * y).sum(), (y, new)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(norm.params, x)

    ours, theirs = (train(make(x, flax=flax, **options)) for flax in (False, True))
    assert_same(ours, theirs)
    np.testing.assert_array_equal(ours[1][0], np.ones_like(x))


def test_complex_input(make):
    """The variance is E|x - mean|²; running statistics apply to complex and real inputs."""
    norm, centered = make(momentum=0.0), COMPLEX - COMPLEX.mean((0, 1))
    y = norm.train(COMPLEX)
    want = centered / np.sqrt((np.abs(centered) ** 2).mean((0, 1)) + 1e-5)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(norm.evaluate(COMPLEX), y, atol=1e-5)
    assert norm.stats["mean"].dtype == norm.evaluate(X).dtype == np.complex64


@pytest.mark.parametrize(
    ("error", "match", "options", "x", "args"),
    [
        (ValueError, "`dtype`", dict(dtype=jnp.int32), X, {}),
        (ValueError, "`dtype` .* complex", dict(dtype=jnp.float32), COMPLEX, {}),
        (TypeError, "`residual`", {}, X, dict(residual=COMPLEX)),
        (ValueError, r"`epsilon` \(=0.0\)", dict(epsilon=0.0), X, {}),
    ],
)
def test_rejects(make, error, match, options, x, args):
    with pytest.raises(error, match=match):
        make(**options).train(x, **args)


def test_zero_epsilon_in_evaluation():
    np.testing.assert_array_equal(Norm("nnx", epsilon=0.0).evaluate(X), X)


@vary(
    ("flavor", "context"),
    [
        ("nnx", "shard_map_of_grad"),
        ("linen", "pmap"),
        ("linen", "shard_map_of_grad_unchecked"),
        ("linen", "jit_auto"),
    ],
)
def test_gradients_and_statistics_over_devices(flavor, context):
    """Unequal counts on eight devices, one of them 0, are weighted (apex #387)."""
    rng = np.random.default_rng(4)
    x, w = rng.normal(2, 3, (2, 16, 5)).astype(np.float32)
    mask = rng.random((16, 1)) < 0.7
    mask[2:4] = False  # nothing on the second device
    batch = dict(x=x, w=w, mask=mask)

    def op(params, batch, axis_name):
        norm = Norm(flavor, x, momentum=0.0, axis_name=axis_name)
        return norm.apply(params, norm.stats, batch["x"], mask=batch["mask"])

    params, counted = Norm(flavor, x).params, x[mask[:, 0]]
    got = CONTEXTS[context](op, params, batch)
    assert_trees_close(got, single_device(op, params, batch), 1e-5)
    assert_same(got[1], dict(mean=counted.mean(0), var=counted.var(0)), rtol=1e-5)
