"""DenseNet in both flavors; all forms of it compute the same function, in float64."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax import models
from effjax.memory import residual_bytes
from effjax.models import linen as linen_models
from effjax.models.densenet import DenseNetConfig, block_widths
from tests.contexts import assert_trees_close
from tests.models.flavors import Linen, Nnx, draw, train_step
from tests.tiers import vary

OPTIONS: dict[str, Any] = dict(
    growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=3, drop_rate=0.2,
    unbiased_running_var=True,
)  # fmt: skip
FLAVORS: dict[str, Any] = {
    "nnx": functools.partial(Nnx, models.DenseNet, **OPTIONS),
    "linen": functools.partial(Linen, linen_models.DenseNet, **OPTIONS),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(efficient=False),
    "conv": dict(efficient=True, save="conv"),
    "features": dict(efficient=True, save="features", num_chunks=3),
}
MASK = np.array([True, True, False, True])
KEY = jax.random.key(7)


def loss_of(logits):
    return (logits * np.random.default_rng(2).normal(size=logits.shape)).sum()


@functools.cache
def reference():
    """Return values, images, linen's dropout key, and what the plain nnx network computes."""
    x = np.random.default_rng(1).normal(size=(4, 16, 16, 3))
    key = linen_models.DenseNet(**OPTIONS).bind({}, rngs={"dropout": KEY}).make_rng("dropout")
    plain = FLAVORS["nnx"](**FORMS["plain"])
    values = [draw(names) for names in plain.names(x)]
    return values, x, key, train_step(plain, values, x, loss_of, key=key, mask=MASK)


@pytest.mark.usefixtures("x64")
@vary(
    ("flavor", "form"),
    [("linen", "features"), ("nnx", "conv"), ("nnx", "features"), ("linen", "plain")],
)
def test_forms_match_plain_nnx(flavor, form):
    """Compare outputs, all gradients and running statistics, with dropout and a mask."""
    values, x, key, want = reference()
    model = FLAVORS[flavor](**FORMS[form])
    assert [{n: v.shape for n, v in d.items()} for d in model.names(x)] == [
        {n: v.shape for n, v in d.items()} for d in values
    ]  # interchangeable parameters
    key = KEY if flavor == "linen" else key
    assert_trees_close(train_step(model, values, x, loss_of, key=key, mask=MASK), want, 1e-12)


def count_parameters(**options):
    """Count the parameters of a DenseNet for images of three channels."""
    config = DenseNetConfig(**options)
    features, classes = config.num_init_features, config.num_classes
    count = 27 * features if config.small_inputs else 147 * features + 2 * features
    width, channels = config.bn_size * config.growth_rate, 0
    for num_layers, (before, after) in zip(config.block_config, block_widths(config), strict=True):
        for channels in before + config.growth_rate * np.arange(num_layers):
            count += 2 * channels + channels * width + 2 * width + 9 * width * config.growth_rate
        channels = before + num_layers * config.growth_rate
        count += 2 * channels + channels * (classes if after == channels else after)
    return count + classes


@pytest.mark.usefixtures("x64")
def test_published_parameter_counts():
    for name, count in {
        "densenet40_12": 176_122,
        "densenet100_12": 769_162,
        "densenet121": 7_978_856,
        "densenet161": 28_681_000,
        "densenet169": 14_149_480,
        "densenet201": 20_013_928,
    }.items():
        assert count_parameters(**getattr(models, name)(dict)) == count, name
    params, _ = FLAVORS["nnx"]().names(None)
    assert count_parameters(**OPTIONS) == sum(v.size for v in params.values())


def test_options_override_those_of_a_published_network():
    model = models.densenet121(linen_models.DenseNet, num_classes=7, efficient=False)
    assert model.num_classes == 7 and model.growth_rate == 32 and not model.efficient
    small = models.densenet_cifar(22, 8, linen_models.DenseNet, num_classes=100)
    assert small.block_config == (3, 3, 3) and small.num_init_features == 16
    for make in (models.densenet40_12, models.densenet100_12):
        wide = make(linen_models.DenseNet, growth_rate=24)
        assert wide.growth_rate == 24 and wide.small_inputs and wide.num_classes == 10


SMALL: dict[str, Any] = dict(
    growth_rate=2, block_config=(1, 1), num_init_features=4, num_classes=3, small_inputs=True
)
X = np.random.default_rng(0).normal(size=(16, 4, 4, 3)).astype(np.float32)


def make(**options):
    return models.DenseNet(**SMALL | options, rngs=nnx.Rngs(0))


def run(model, x, **options):
    """Return the logits and the new running statistics of one training call."""
    graphdef, state = nnx.split(model)

    def call(state, x):
        copy = nnx.merge(graphdef, state, copy=True)
        return copy(x, **options), nnx.state(copy, nnx.BatchStat)

    return jax.jit(call)(state, x)


def test_models_compare_by_identity():
    model, other = nnx.eval_shape(make), nnx.eval_shape(make)
    assert model == model and model != other and len({model, other}) == 2
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert nnx.graphdef(model) != nnx.graphdef(nnx.eval_shape(lambda: make(epsilon=1e-3)))


def test_initial_values():
    """Kernels have He's standard deviation, in a compiled initialization too."""
    model = nnx.jit(lambda: make(growth_rate=32, block_config=(1,)))()
    kernel = model.blocks[0].layers[0].conv2.kernel[...]  # [3, 3, 128, 32]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 32)), rtol=0.02)
    np.testing.assert_allclose(kernel.mean(), 0, atol=1e-3)
    np.testing.assert_array_equal(model.classifier.bias[...], 0)
    np.testing.assert_array_equal(model.final_norm.scale[...], 1)


def test_bfloat16_keeps_float32_state():
    model, reference = (make(block_config=(1,), dtype=dtype) for dtype in (jnp.bfloat16, None))
    logits, stats = run(model, X)
    want, want_stats = run(reference, X)
    assert logits.dtype == jnp.float32
    assert all(v.dtype == jnp.float32 for v in jax.tree.leaves((stats, nnx.state(model))))
    np.testing.assert_allclose(logits, want, atol=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), stats, want_stats)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s, copy=True)(x))(state, X)
    assert "bf16[16,4,4,6]" in str(jaxpr)  # the features of the first block
    # `momentum` is applied once per step; efficient_densenet_pytorch applies it twice.
    x = reference.stem_conv(jnp.asarray(X))
    norm1 = want_stats["blocks"][0]["layers"][0]["norm1"]
    np.testing.assert_allclose(norm1["mean"][...], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(norm1["var"][...], 0.9 + 0.1 * x.var((0, 1, 2)), rtol=1e-6)


def test_dropout_requires_a_key_in_training():
    model = nnx.eval_shape(lambda: make(drop_rate=0.5))
    with pytest.raises(TypeError, match="`rngs` must be a single PRNG key"):
        model(X)
    model.eval()
    assert nnx.eval_shape(lambda m, x: m(x), model, X).shape == (16, 3)


@vary("efficient", [False, True])
def test_dropout_keys(efficient):
    """A key is used as it is; an Rngs and its stream draw one from `dropout`."""
    graphdef, state = nnx.split(make(drop_rate=0.5, efficient=efficient, block_config=(1,)))

    @jax.jit
    def call(key):
        def logits(rngs):
            return nnx.merge(graphdef, state, copy=True)(X, rngs=rngs)

        rngs = [nnx.Rngs(dropout=key) for _ in range(3)]
        return logits(key), logits(rngs[0].dropout()), logits(rngs[1]), logits(rngs[2].dropout)

    raw, drawn, of_rngs, of_stream = call(jax.random.key(3))
    np.testing.assert_array_equal(of_rngs, drawn)
    np.testing.assert_array_equal(of_stream, drawn)
    assert np.abs(raw - drawn).max() > 1e-3


def test_frozen_norms_stay_frozen():
    """A block with a norm in evaluation mode falls back to the plain layers."""
    networks = [make(efficient=efficient) for efficient in (True, False)]
    for model in networks:
        model.blocks[0].layers[0].norm1.use_running_average = True
        model.transitions[0].norm.use_running_average = True
    (logits, stats), (want, want_stats) = (run(model, X) for model in networks)
    chex.assert_trees_all_close((logits, stats), (want, want_stats), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats["blocks"][0]["layers"][0]["norm1"]["mean"][...], 0)
    assert (stats["blocks"][0]["layers"][0]["norm2"]["mean"][...] != 0).all()


@pytest.mark.exhaustive
def test_memory_is_linear_in_depth():
    """Twice the layers keep about twice the bytes, and far fewer than plain autodiff's square."""

    def kept_bytes(layers, **form):
        options = dict(block_config=(layers,), growth_rate=4, num_init_features=8)
        model = nnx.eval_shape(lambda: make(**options, **form))
        graphdef, params, stats = nnx.split(model, nnx.Param, ...)

        def call(params, stats, x):
            return nnx.merge(graphdef, params, stats, copy=True)(x)

        report = residual_bytes(
            call, params, stats, jax.ShapeDtypeStruct((8, 16, 16, 3), "float32")
        )
        return report.bytes - report.argument_bytes

    small_plain, plain = (kept_bytes(layers, efficient=False) for layers in (4, 8))
    assert plain / small_plain > 2.3
    for save, share in (("conv", 0.35), ("features", 0.15)):
        small, large = (kept_bytes(layers, save=save) for layers in (4, 8))
        assert large / small < 2.1
        assert large < share * plain


def test_rejects_bad_options():
    for network in (make, functools.partial(linen_models.DenseNet, **SMALL)):
        with pytest.raises(ValueError, match=r"`drop_rate` \(=1.0\)"):
            network(drop_rate=1.0)
    for options, match in (
        (dict(compression=0.1), r"`compression` \(=0.1\)"),
        (dict(block_config=()), r"`block_config` \(=\(\)\)"),
    ):
        with pytest.raises(ValueError, match=match):
            DenseNetConfig(**SMALL | options)
    with pytest.raises(ValueError, match=r"`depth` \(=39\).*6n \+ 4"):
        models.densenet_cifar(39)


@pytest.mark.parametrize(("small", "size"), [(True, 2), (False, 5)])
def test_smallest_images(small, size):
    model = nnx.eval_shape(lambda: make(small_inputs=small))
    images = lambda size: jnp.zeros((2, 8, size, 3))  # noqa: E731
    assert nnx.eval_shape(lambda m: m(images(size)), model).shape == (2, 3)
    with pytest.raises(ValueError, match=rf"must be \[N, H, W, 3\].* at least {size}"):
        nnx.eval_shape(lambda m: m(images(size - 1)), model)
