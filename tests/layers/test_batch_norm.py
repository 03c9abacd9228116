"""Tests of BatchNorm in linen and nnx."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import effjax.linen
import effjax.nnx
from tests.tiers import vary

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
MASK = np.random.default_rng(1).random((6, 4, 1)) < 0.6
SAME: dict[str, Any] = dict(atol=2e-6, rtol=2e-6)


class Linen:
    def __init__(self, example=X, of=effjax.linen, **options):
        self.module = of.BatchNorm(**options)
        self.variables: Any = self.module.init(
            jax.random.key(0), example, use_running_average=False
        )

    def split(self):
        """Return ``apply(params, stats, x) -> (y, new stats)``, params and stats."""

        def apply(params, stats, x, **args):
            y, new = self.module.apply(
                {"params": params, "batch_stats": stats}, x, use_running_average=False,
                mutable=["batch_stats"], **args,
            )  # fmt: skip
            return y, new.get("batch_stats", {})

        return apply, self.params, self.stats

    def train(self, x, **args):
        apply, params, stats = self.split()
        y, new = apply(params, stats, x, **args)
        self.variables = {**self.variables, "batch_stats": new}
        return y

    def evaluate(self, x, **args):
        return self.module.apply(self.variables, x, use_running_average=True, **args)

    @property
    def params(self):
        return self.variables.get("params", {})

    @property
    def stats(self):
        return self.variables.get("batch_stats", {})


class Nnx:
    def __init__(self, example=X, of=effjax.nnx, **options):
        axis = options.get("axis", -1)
        features = np.prod([example.shape[a] for a in np.atleast_1d(axis)])
        options |= dict(rngs=nnx.Rngs(0), use_running_average=None)
        self.norm = of.BatchNorm(int(features), **options)

    def split(self):
        graphdef, params, stats = nnx.split(self.norm, nnx.Param, nnx.BatchStat)

        def apply(params, stats, x, **args):
            norm = nnx.merge(graphdef, params, stats, copy=True)
            y = norm(x, use_running_average=False, **args)
            return y, nnx.to_pure_dict(nnx.state(norm, nnx.BatchStat))

        return apply, params, stats

    def train(self, x, **args):
        return self.norm(x, use_running_average=False, **args)

    def evaluate(self, x, **args):
        return self.norm(x, use_running_average=True, **args)

    @property
    def params(self):
        return nnx.to_pure_dict(nnx.state(self.norm, nnx.Param))

    @property
    def stats(self):
        return nnx.to_pure_dict(nnx.state(self.norm, nnx.BatchStat))


FLAX = {Linen: linen, Nnx: nnx}
OURS = {Linen: effjax.linen, Nnx: effjax.nnx}


@pytest.fixture(params=[Linen, Nnx])
def flavor(request):
    return request.param


def assert_same(got, want, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance or SAME), got, want)


def test_signature_extends_that_of_flax(flavor):
    def arguments(package):
        params = inspect.signature(package.BatchNorm).parameters.values()
        functions = ("scale_init", "bias_init")  # equal functions, but other objects in nnx
        return [
            (p.name, p.kind, None if p.name in functions else p.default)
            for p in params
            if p.name not in ("parent", "name")
        ]

    theirs = arguments(FLAX[flavor])
    assert arguments(OURS[flavor])[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "options",
    [
        dict(axis=1, momentum=0.9, epsilon=1e-3, use_bias=False, use_scale=False),
        dict(
            use_scale=False,
            use_fast_variance=False,
            dtype=jnp.float32,
            bias_init=jax.nn.initializers.ones,
        ),
    ],
    ids=["axis", "dtype"],
)
def test_matches_flax(flavor, options):
    """Variables, outputs and running statistics match."""
    ours, flax_norm = flavor(**options), flavor(of=FLAX[flavor], **options)
    before = [(norm.params, norm.stats) for norm in (ours, flax_norm)]
    jax.tree.map(np.testing.assert_array_equal, *before)
    assert_same(ours.train(X), flax_norm.train(X))
    assert_same(ours.stats, flax_norm.stats)
    assert_same(ours.evaluate(X), flax_norm.evaluate(X))


def test_masked_values_are_ignored(flavor):
    x = np.where(MASK, X, np.nan)
    norm, counted = flavor(momentum=0.9), X[MASK[..., 0]]
    y = np.asarray(norm.train(x, mask=MASK))[MASK[..., 0]]
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(y.var(0), 1, rtol=1e-4)
    want = dict(mean=0.1 * counted.mean(0), var=0.9 + 0.1 * counted.var(0))
    assert_same(norm.stats, want, rtol=1e-5)


def test_mask_along_one_of_two_feature_axes(flavor):
    mask = np.random.default_rng(1).random((6, 4, 1)) < 0.7
    norm = flavor(axis=(1, 2), momentum=0.0)
    y = norm.train(X, mask=mask)
    want = np.stack([X[mask[:, i, 0], i].mean(0) for i in range(4)])
    np.testing.assert_allclose(norm.stats["mean"].reshape(4, 5), want, rtol=1e-5)
    assert y.shape == X.shape


def test_residual_activation_and_unbiased_variance(flavor):
    """The running variance is n/(n - 1) times that of the output (torch #22192)."""
    norm = flavor(momentum=0.0, unbiased_running_var=True, activation="relu")
    residual = np.random.default_rng(3).normal(size=X.shape).astype(np.float32)
    want = (X - X.mean((0, 1))) / np.sqrt(X.var((0, 1)) + 1e-5) + residual
    y = norm.train(X, residual=residual)
    np.testing.assert_allclose(y, np.maximum(want, 0), atol=1e-5)
    var = X.reshape(-1, 5).var(0, ddof=1)
    np.testing.assert_allclose(norm.stats["var"], var, rtol=1e-5)
    want = (X - X.mean((0, 1))) / np.sqrt(var + 1e-5) + residual
    y = norm.evaluate(X, residual=residual)
    np.testing.assert_allclose(y, np.maximum(want, 0), atol=1e-5)


def test_dtypes(flavor):
    for x, dtype, want in (
        (jnp.asarray(X, jnp.bfloat16), None, jnp.bfloat16),
        (jnp.asarray(X, jnp.bfloat16), jnp.float32, jnp.float32),
        (jnp.asarray(X, jnp.int32), None, jnp.float32),
    ):
        norm = flavor(dtype=dtype)
        assert norm.train(x).dtype == want
        assert all(v.dtype == jnp.float32 for v in norm.stats.values())
    with pytest.raises(ValueError, match="`dtype` .* must be floating"):
        flavor(dtype=jnp.int32).train(X)


def test_statistics_are_stable(flavor):
    """The error of Flax's default variance is 25 % here, and float16 would lose the deviations."""
    x = np.random.default_rng(2).normal(1e3, 1, (512, 3)).astype(np.float32)
    norm = flavor(x, momentum=0.0, use_fast_variance=True, dtype=jnp.float16)
    assert norm.train(x).dtype == jnp.float16
    np.testing.assert_allclose(norm.stats["var"], x.astype(np.float64).var(0), rtol=5e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_value_batches(flavor, n):
    """An empty batch changes no statistics; one value has variance 0 (apex #262, torch #36530)."""
    norm = flavor(momentum=0.5, unbiased_running_var=True)
    y = norm.train(X[:n, 0])
    assert y.shape == (n, 5)
    np.testing.assert_allclose(y, 0, atol=1e-6)
    np.testing.assert_allclose(norm.stats["mean"], 0.5 * X[0, 0] if n else 0)
    np.testing.assert_allclose(norm.stats["var"], 0.5 if n else 1)


@vary("momentum", [0.5, None])
def test_masked_channels_preserve_their_running_stats(flavor, momentum):
    norm = flavor(momentum=momentum)
    mask = np.array([True, False, True, True, False])
    assert np.isfinite(norm.train(X, mask=mask)).all()
    np.testing.assert_array_equal(norm.stats["mean"][~mask], 0)
    np.testing.assert_array_equal(norm.stats["var"][~mask], 1)
    assert (norm.stats["mean"][mask] != 0).all()


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


def test_evaluation_without_running_stats(flavor):
    # apex #1071
    norm = flavor(track_running_stats=False)
    assert not norm.stats
    y = norm.evaluate(X)
    np.testing.assert_allclose(y.mean((0, 1)), 0, atol=1e-5)


def test_no_gradient_through_running_stats(flavor):
    apply, params, stats = flavor().split()

    @jax.jit
    def gradients(x, stats):
        def running(x, stats):
            return sum(v.sum() for v in jax.tree.leaves(apply(params, stats, x)[1]))

        return jax.grad(running, argnums=(0, 1))(x, stats)

    assert not any(np.any(g) for g in jax.tree.leaves(gradients(X, stats)))


def test_single_examples_match_flax(flavor):
    """Single examples under vmap; linen initializes without the axis."""
    x, options = X[:, 0], dict(axis_name="batch", momentum=0.5)

    def train(norm):
        apply, *variables = norm.split()
        run = jax.vmap(lambda x: apply(*variables, x), out_axes=(0, None), axis_name="batch")
        return jax.jit(run)(x)

    ours, flax_norm = (flavor(x[0], **options, **of) for of in ({}, {"of": FLAX[flavor]}))
    assert_same(train(ours), train(flax_norm), atol=1e-5)


def test_an_example_of_rank_one_matches_flax(flavor):
    """Without a batch it is its own mean, in initialization too."""
    x, options = X[0, 0], dict(momentum=0.5, bias_init=jax.nn.initializers.ones)
    ours, flax_norm = (flavor(x, **options, **of) for of in ({}, {"of": FLAX[flavor]}))

    def train(norm):
        apply, params, stats = norm.split()

        def loss(params, x):
            y, new = apply(params, stats, x)
            return (x * y).sum(), (y, new)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    (_, (y, _)) = got = train(ours)
    assert_same(got, train(flax_norm), **SAME)
    np.testing.assert_array_equal(y, np.ones_like(x))
    if flavor is Linen:
        y, _ = ours.module.init_with_output(jax.random.key(0), x, use_running_average=False)
        np.testing.assert_array_equal(y, np.ones_like(x))


def test_evaluation_needs_no_axis(flavor):
    """A single image, without scale and bias (apex #913, #158)."""
    norm = flavor(use_scale=False, use_bias=False, axis_name="absent")
    np.testing.assert_allclose(norm.evaluate(X[:1, 0]), X[:1, 0] / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_complex_input(flavor):
    """The variance is E|x - mean|²; running statistics apply to complex and real inputs."""
    x = (X + 1j * np.roll(X, 1, 0)).astype(np.complex64)
    norm = flavor(momentum=0.0)
    y = norm.train(x)
    centered = x - x.mean((0, 1))
    want = centered / np.sqrt((np.abs(centered) ** 2).mean((0, 1)) + 1e-5)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(norm.evaluate(x), y, atol=1e-5)
    assert norm.stats["mean"].dtype == norm.evaluate(X).dtype == np.complex64
    with pytest.raises(ValueError, match="`dtype` .* must be complex for complex"):
        flavor(dtype=jnp.float32).train(x)
    with pytest.raises(TypeError, match="`residual` must be integer or floating"):
        flavor().train(X, residual=x)


@pytest.mark.parametrize("average", [True, False])
def test_zero_epsilon_in_evaluation_only(average):
    norm = effjax.nnx.BatchNorm(5, epsilon=0.0, use_running_average=average, rngs=nnx.Rngs(0))
    if average:
        np.testing.assert_array_equal(norm(X), X)
    else:
        with pytest.raises(ValueError, match=r"`epsilon` \(=0.0\) must be positive"):
            norm(X)


def value_and_grad(apply, stats, reduce=lambda value: value):
    """Return ``step(params, x, mask, w) -> (loss, gradients, new stats)``."""

    def step(params, x, mask, w):
        def loss(params):
            y, new = apply(params, stats, x, mask=mask)
            return reduce((jnp.sin(y) * w).sum()), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, new

    return step


@vary(
    ("flavor", "how"),
    [
        (Nnx, "shard_map"),
        (Linen, "pmap"),
        (Linen, "shard_map unchecked"),
        (Linen, "jit"),
    ],
)
def test_gradients_and_statistics_over_devices(flavor, how, mesh8):
    """Unequal counts on eight devices, one of them 0, are weighted (apex #387)."""
    rng = np.random.default_rng(4)
    x, w = rng.normal(2, 3, (2, 16, 5)).astype(np.float32)
    mask = rng.random((16, 1)) < 0.7
    mask[2:4] = False  # nothing on the second device
    apply, params, stats = flavor(x, momentum=0.0).split()
    want = jax.jit(value_and_grad(apply, stats))(params, x, mask, w)
    psum = functools.partial(lax.psum, axis_name="data")
    apply = flavor(x, momentum=0.0, axis_name=None if how == "jit" else "data").split()[0]
    step = value_and_grad(apply, stats)

    def reduced(*args):
        value, grads, new = step(*args)
        return psum(value), psum(grads), new

    batch = (x, mask, w)
    if how == "pmap":
        run = jax.pmap(reduced, axis_name="data", in_axes=(None, 0, 0, 0), out_axes=None)
        got = run(params, *(a.reshape(8, 2, -1) for a in batch))
    elif how == "jit":
        sharding = jax.NamedSharding(mesh8, jax.P("data"))
        got = jax.jit(step)(params, *jax.device_put(batch, sharding))
    else:
        checked = how == "shard_map"
        run = jax.shard_map(
            value_and_grad(apply, stats, psum) if checked else reduced, mesh=mesh8,
            in_specs=(jax.P(), *(jax.P("data"),) * 3), out_specs=jax.P(), check_vma=checked,
        )  # fmt: skip
        got = jax.jit(run)(params, *batch)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want), rtol=1e-4, atol=1e-4)
    counted = x[mask[:, 0]]
    assert_same(got[2], dict(mean=counted.mean(0), var=counted.var(0)), rtol=1e-5)


IMAGE_LAYERS = {
    "nnx.DeformConv": lambda: effjax.nnx.DeformConv(4, 2, 3, predict_offset=True, rngs=nnx.Rngs(0)),
    "nnx.DenseBlock": lambda: effjax.nnx.DenseBlock(4, 1, growth_rate=2, rngs=nnx.Rngs(0)),
    "linen.BatchNorm": lambda: effjax.linen.BatchNorm(use_running_average=False),
    "linen.DCNv3": lambda: effjax.linen.DCNv3(4),
}


@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_images_with_channels_first_are_refused(name):
    nhwc, nchw = jnp.ones((1, 6, 5, 4)), jnp.ones((1, 4, 6, 5))
    if name.startswith("linen"):
        module: Any = IMAGE_LAYERS[name]()
        layer = jax.eval_shape(module.init, jax.random.key(0), nhwc)
        call = functools.partial(module.apply, mutable=["batch_stats"])
    else:
        layer = nnx.eval_shape(IMAGE_LAYERS[name])
        call = lambda layer, x: layer(x)  # noqa: E731
    nnx.eval_shape(call, layer, nhwc)
    with pytest.raises(ValueError, match=r"[Ff]eatures (are )?last") as error:
        nnx.eval_shape(call, layer, nchw)
    assert "(1, 4, 6, 5)" in str(error.value) or "the network needs" in str(error.value)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_axis_is_needed_in_evaluation_without_running_statistics(flavor):
    options: Any = dict(axis_name="data", track_running_stats=False, use_running_average=True)
    if flavor == "nnx":
        layer: Any = effjax.nnx.BatchNorm(5, **options, rngs=nnx.Rngs(0))
    else:
        module = effjax.linen.BatchNorm(**options)
        layer = functools.partial(module.apply, module.init(jax.random.key(0), X))
    with pytest.raises(ValueError, match="with track_running_stats=False always"):
        layer(X)
