"""What DenseNet and ResNet have in common, in both flavors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx, serialization

import effjax
from effjax import models
from effjax.convert.networks import NETWORKS
from effjax.models import linen as linen_models
from tests.contexts import assert_trees_close
from tests.models.flavors import FLAVORS, draw, make_form
from tests.tiers import vary

OPTIONS: dict[str, Any] = {
    "DenseNet": dict(block_config=(2, 1), growth_rate=2, num_init_features=4, num_classes=3),
    "ResNet": dict(stage_sizes=(1, 2), width=2, num_classes=3),
}
# Norms of stem, layers, transition and head, or of stem and blocks with their shortcuts.
NUM_NORMS = {"DenseNet": 1 + 3 * 2 + 1 + 1, "ResNet": 1 + 4 + 4 + 3}
X = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
networks = pytest.mark.parametrize("name", OPTIONS)


def make_nnx(name, **options):
    """Return a network whose arrays are shapes."""
    network = getattr(models, name)
    return nnx.eval_shape(lambda: network(**OPTIONS[name] | options, rngs=nnx.Rngs(0)))


def make_linen(name, **options):
    return getattr(linen_models, name)(**OPTIONS[name] | options)


@networks
def test_evaluation_uses_running_stats(name, x64):
    """Images are independent, nothing changes, and both flavors agree, also in `features`."""
    x = X[:, :8, :8].astype(np.float64)
    options = OPTIONS[name] | dict(small_inputs=True)
    scaled = np.concatenate([x[:1], 5 * x[1:]])
    runs, values = [], None
    for flavor in FLAVORS:
        model = make_form(flavor, name, **options)
        names = model.names(x)
        values = values or [draw(arrays) for arrays in names]
        run = functools.partial(model, train=False)

        @jax.jit
        def evaluate(params, stats, x, run=run):
            return run(params, stats, x), run(params, stats, x, method="features")[0]

        (logits, stats), features = evaluate(*values, x)
        jax.tree.map(np.testing.assert_array_equal, stats, values[1])
        np.testing.assert_allclose(evaluate(*values, scaled)[0][0][0], logits[0], rtol=1e-12)
        assert model.model.feature_channels == tuple(f.shape[-1] for f in features)
        runs.append((logits, features))
    assert_trees_close(runs[0], runs[1], 1e-12)
    logits, features = runs[0]
    assert features[-1].min() == 0  # after ReLU
    head = values[0]["classifier.kernel"], values[0]["classifier.bias"]
    assert_trees_close(features[-1].mean((1, 2)) @ head[0] + head[1], logits, 1e-12)


@networks
def test_every_norm_is_synchronized(name):
    options = dict(axis_name="data", axis_index_groups=4)
    nodes = [node for _, node in nnx.iter_modules(make_nnx(name, **options))]
    norms = [node for node in nodes if isinstance(node, nnx.BatchNorm)]
    assert len(norms) == NUM_NORMS[name]
    for norm in norms:
        assert type(norm) is effjax.nnx.BatchNorm
        assert norm.axis_name == "data" and norm.axis_index_groups == 4


@vary("name", ["ResNet", "DenseNet"])
def test_linen_variables(name):
    """They are the same in every form, and initialization does not change running statistics."""
    shapes = jax.eval_shape(make_linen(name, efficient=False).init, jax.random.key(0), X)
    model = make_linen(name, axis_name="absent")  # initialization needs no axis
    variables = jax.jit(functools.partial(model.init, train=True))(jax.random.PRNGKey(0), X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)
    for path, value in jax.tree_util.tree_leaves_with_path(variables["batch_stats"]):
        np.testing.assert_array_equal(value, float(path[-1].key == "var"))
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    assert jax.eval_shape(make_linen(name).apply, restored, X).shape == (4, 3)
    train = functools.partial(make_linen(name).apply, train=True)
    _, new = jax.eval_shape(functools.partial(train, mutable=["batch_stats"]), shapes, X)
    assert new == {"batch_stats": shapes["batch_stats"]}
    with pytest.raises(errors.ModifyScopeVariableError, match="batch_stats"):
        jax.eval_shape(train, shapes, X)


def test_linen_variables_must_match():
    model = make_linen("ResNet")
    shapes = jax.eval_shape(model.init, jax.random.key(0), X[..., :2])
    jax.eval_shape(model.apply, shapes, X[..., :2])  # the number of channels is that of the images
    params = shapes["params"]
    for wrong, match in (
        ({"params": params}, r"batch_stats/\S+ has shape None.* needs \(2,\)"),
        (shapes | {"params": params | {"fc": params["classifier"]}}, r"fc/bias .* needs None"),
        (shapes | {"params": params | {"classifier": params["stem_conv"]}}, "params/classifier/"),
    ):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(model.apply, wrong, X[..., :2])
    with pytest.raises(ValueError, match=r"stem_conv/kernel has shape \(7, 7, 2, 2\)"):
        jax.eval_shape(model.apply, shapes, X)


def test_linen_network_in_a_module():
    """A network is a submodule like others, also of a recomputed or frozen module."""

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            options = OPTIONS["ResNet"] | dict(num_classes=None, frozen_norm=True)
            backbone = linen.remat(linen_models.ResNet, static_argnums=(2,))(**options)
            return linen.Dense(3)(backbone(x, train))

    model = Classifier()
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    assert "stem_conv" in shapes["params"]["CheckpointResNet_0"]
    loss = lambda v, x: model.apply(v, x, train=True).sum()  # noqa: E731  # no statistics change
    assert jax.eval_shape(jax.grad(loss), shapes, X) == shapes


@pytest.mark.parametrize("name", NETWORKS)
def test_published_networks(name):
    """They are those that `effjax convert` reads, and options override theirs."""
    make, _ = NETWORKS[name]
    assert getattr(models, name)(make.func) == make()
    assert getattr(models, name)(make.func, num_classes=7) == make(num_classes=7)


@vary(
    ("name", "count"),
    [
        ("densenet40_12", 176_122),
        ("densenet100_12", 769_162),
        ("densenet121", 7_978_856),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("wide_resnet50_2", 68_883_240),
        ("resnext50_32x4d", 25_028_904),
    ],
)
def test_published_parameter_counts(name, count):
    """test_torch.py has the names and shapes of those of torchvision."""
    model = nnx.eval_shape(lambda: getattr(models, name)(rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


@networks
def test_rejects_bad_images(name):
    model = make_nnx(name)
    for x in (X[..., :1], X[:, :0], X[0]):
        with pytest.raises(ValueError, match=r"must be \[N, H, W, 3\]"):
            model(jnp.asarray(x))
