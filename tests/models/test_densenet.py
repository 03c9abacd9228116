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
from effjax.models import linen as linen_models
from tests.contexts import assert_trees_close
from tests.models.flavors import assert_same_shapes, draw, make_form, train_step
from tests.tiers import vary

OPTIONS: dict[str, Any] = dict(
    growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=3, drop_rate=0.2,
    unbiased_running_var=True,
)  # fmt: skip
FEATURES = dict(save="features", num_chunks=3)


@pytest.mark.usefixtures("x64")
@vary(
    ("flavor", "form"),
    [
        ("linen", FEATURES),
        ("nnx", dict(save="conv")),
        ("nnx", FEATURES),
        ("linen", dict(efficient=False)),
    ],
)
def test_forms_match_plain_nnx(flavor, form):
    """Compare outputs, all gradients and running statistics, with dropout and a mask."""
    x, mask = np.random.default_rng(1).normal(size=(4, 16, 16, 3)), np.arange(4) != 2
    plain = make_form("nnx", "DenseNet", **OPTIONS, efficient=False)
    values = [draw(names) for names in plain.names(x)]
    model = make_form(flavor, "DenseNet", **OPTIONS, **form)
    assert_same_shapes(model.names(x), values)
    step = functools.partial(train_step, values=values, x=x, mask=mask)
    key = jax.random.key(7)
    # What linen makes of it.
    drawn = linen_models.DenseNet(**OPTIONS).bind({}, rngs={"dropout": key}).make_rng("dropout")
    got = step(model, key=key if flavor == "linen" else drawn)
    assert_trees_close(got, step(plain, key=drawn), 1e-12)


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


@nnx.jit
def run(model):
    """Return the logits and the new running statistics of one training call."""
    model = nnx.clone(model)
    return model(X), nnx.state(model, nnx.BatchStat)


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
    logits, stats = run(model)
    want, want_stats = run(reference)
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
    (logits, stats), (want, want_stats) = (run(model) for model in networks)
    chex.assert_trees_all_close((logits, stats), (want, want_stats), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats["blocks"][0]["layers"][0]["norm1"]["mean"][...], 0)
    assert (stats["blocks"][0]["layers"][0]["norm2"]["mean"][...] != 0).all()


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (make, dict(drop_rate=1.0), "`drop_rate`"),
        (functools.partial(linen_models.DenseNet, **SMALL), dict(drop_rate=1.0), "`drop_rate`"),
        (make, dict(compression=0.1), "`compression`"),
        (make, dict(block_config=()), "`block_config`"),
        (models.densenet_cifar, dict(depth=39), "`depth`"),
    ],
)
def test_rejects_bad_options(make, options, match):
    with pytest.raises(ValueError, match=match):
        make(**options)


@pytest.mark.parametrize(("small", "size"), [(True, 2), (False, 5)])
def test_smallest_images(small, size):
    model = nnx.eval_shape(lambda: make(small_inputs=small))
    images = lambda size: jnp.zeros((2, 8, size, 3))  # noqa: E731
    assert nnx.eval_shape(lambda m: m(images(size)), model).shape == (2, 3)
    with pytest.raises(ValueError, match=rf"must be \[N, H, W, 3\].* at least {size}"):
        nnx.eval_shape(lambda m: m(images(size - 1)), model)
