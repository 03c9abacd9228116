"""Both flavours and all forms of DenseNet are one function: one battery for all, in float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

from effjax import models
from effjax.models import linen as linen_models
from tests.contexts import assert_trees_close
from tests.tiers import exhaustive

OPTIONS: dict[str, Any] = dict(
    growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=3, drop_rate=0.2,
    unbiased_running_var=True,
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(efficient=False),
    "conv": dict(efficient=True, save="conv"),
    "features": dict(efficient=True, save="features", num_chunks=3),
}
COUNTS = {
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "densenet40_12": 176_122,
    "densenet100_12": 769_162,
}


def nnx_name(path):
    """blocks[0].layers[1].norm1.scale of nnx is blocks_0/layers_1/norm1/scale of linen."""
    return "/".join(map(str, path)).replace("blocks/", "blocks_").replace(
        "layers/", "layers_"
    ).replace("transitions/", "transitions_")  # fmt: skip


def draw(variables):
    """Values for {name: array}, positive ones for scales and variances; no compilation."""
    rng = np.random.default_rng(0)
    positive = {"scale", "var"}
    return {
        name: rng.normal(0, 0.3, v.shape) ** 2 + 1
        if name.split("/")[-1] in positive
        else rng.normal(0, 0.3, v.shape)
        for name, v in sorted(variables.items())
    }


class NnxForm:
    def __init__(self, **options):
        make = functools.partial(models.DenseNet, **OPTIONS, **options, param_dtype=jnp.float64)
        self.model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        self.graphdef, params, stats = nnx.split(self.model, nnx.Param, nnx.BatchStat)
        self.paths = [dict(nnx.to_flat_state(state)) for state in (params, stats)]

    def names(self):
        return [{nnx_name(p): v for p, v in paths.items()} for paths in self.paths]

    def __call__(self, params, stats, x, key, mask, train=True):
        states = [
            nnx.from_flat_state({p: v.replace(values[nnx_name(p)]) for p, v in paths.items()})
            for paths, values in zip(self.paths, (params, stats), strict=True)
        ]
        model = nnx.merge(self.graphdef, *states)
        model.train() if train else model.eval()
        logits = model(x, rngs=key, mask=mask)
        new = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
        return logits, {nnx_name(p): v[...] for p, v in new}


class LinenForm:
    def __init__(self, **options):
        self.model = linen_models.DenseNet(**OPTIONS, **options, param_dtype=jnp.float64)

    def names(self):
        size = 8 if self.model.small_inputs else 16
        variables = jax.eval_shape(
            self.model.init, jax.random.key(0), jnp.zeros((1, size, size, 3))
        )
        flatten = functools.partial(traverse_util.flatten_dict, sep="/")
        return [flatten(variables[kind]) for kind in ("params", "batch_stats")]

    def __call__(self, params, stats, x, key, mask, train=True):
        unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
        variables = dict(params=unflatten(params), batch_stats=unflatten(stats))
        rngs = {} if key is None else {"dropout": key}
        logits, new = self.model.apply(
            variables, x, train, mask, mutable=["batch_stats"], rngs=rngs
        )
        return logits, traverse_util.flatten_dict(new["batch_stats"], sep="/")


def same_dropout(key):
    """What linen's make_rng makes of a key at the top of a model."""
    return linen_models.DenseNet(**OPTIONS).bind({}, rngs={"dropout": key}).make_rng("dropout")


def train_step(form, values, x, key, mask, weights):
    def loss(params, x):
        logits, stats = form(params, values[1], x, key, mask)
        return (logits * weights).sum(), (logits, stats)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (logits, stats)), (dparams, dx) = run(values[0], x)
    return dict(logits=logits, stats=stats, dparams=dparams, dx=dx)


@functools.cache
def reference(small):
    """Values, a batch, linen's dropout key for it, and what plain nnx computes of them."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 8, 8, 3) if small else (3, 16, 16, 3))
    mask = np.array([True, True, True, False]) if small else None
    key, weights = jax.random.key(7), rng.normal(size=(len(x), 3))
    plain = NnxForm(**FORMS["plain"], small_inputs=small)
    values = [draw(names) for names in plain.names()]
    batch = (x, same_dropout(key), mask, weights)
    return values, batch, key, train_step(plain, values, *batch)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.covering
@pytest.mark.parametrize(
    "flavour, form, small",
    [
        (NnxForm, "conv", True),
        (NnxForm, "features", True),
        (LinenForm, "plain", True),
        (LinenForm, "conv", True),
        (LinenForm, "features", True),
        (NnxForm, "conv", False),
        (LinenForm, "conv", False),
    ],
)
def test_all_forms_are_one_function(flavour, form, small):
    """Outputs, all gradients and running statistics, with dropout and a mask."""
    values, batch, linen_key, want = reference(small)
    model = flavour(**FORMS[form], small_inputs=small)
    assert [{n: v.shape for n, v in d.items()} for d in model.names()] == [
        {n: v.shape for n, v in d.items()} for d in values
    ]  # interchangeable parameters
    if flavour is LinenForm:
        batch = (batch[0], linen_key, *batch[2:])
    assert_trees_close(train_step(model, values, *batch), want, 1e-12)


@pytest.mark.parametrize("small", [True, False])
def test_evaluation_uses_running_stats(small):
    """Each image by itself, without dropout, without a change; the same in both flavours."""
    values, (x, _, _, _), _, _ = reference(small)
    runs = []
    for flavour in (NnxForm, LinenForm):
        model = flavour(small_inputs=small)
        run = jax.jit(functools.partial(model, key=None, mask=None, train=False))
        logits, stats = run(values[0], values[1], x)
        jax.tree.map(np.testing.assert_array_equal, stats, values[1])
        if flavour is NnxForm:
            alone = run(values[0], values[1], np.concatenate([x[:1], 5 * x[1:]]))[0]
            np.testing.assert_allclose(alone[0], logits[0], rtol=1e-12)
        runs.append(logits)
    assert_trees_close(runs[0], runs[1], 1e-12)


def test_features():
    """Before the transitions, the last ones as the head reads them; the same in both flavors."""
    values, (x, _, _, _), _, _ = reference(small=False)
    form = NnxForm(small_inputs=False)
    states = [
        nnx.from_flat_state({p: v.replace(named[nnx_name(p)]) for p, v in paths.items()})
        for paths, named in zip(form.paths, values, strict=True)
    ]
    model = nnx.merge(form.graphdef, *states)
    model.eval()
    found = jax.jit(lambda x: model.features(x))(x)
    assert [f.shape for f in found] == [(3, 4, 4, 16), (3, 2, 2, 16)]
    assert model.feature_channels == (16, 16) and found[-1].min() == 0
    assert_trees_close(model.classifier(found[-1].mean((1, 2))), model(x), 1e-12)
    network = LinenForm(small_inputs=False).model
    unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
    variables = dict(params=unflatten(values[0]), batch_stats=unflatten(values[1]))
    of_linen = jax.jit(functools.partial(network.apply, method="features"))(variables, x)
    assert_trees_close(of_linen, found, 1e-12)
    assert network.feature_channels == model.feature_channels


PLAIN = "densenet121", "densenet40_12"


@pytest.mark.parametrize("name", [name if name in PLAIN else exhaustive(name) for name in COUNTS])
def test_published_parameter_counts(name):
    model = nnx.eval_shape(lambda: getattr(models, name)(rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(math.prod(v.shape) for v in leaves) == COUNTS[name]


@pytest.mark.parametrize("name", ["densenet121", "densenet40_12"])
def test_linen_by_name(name):
    model = getattr(models, name)(linen_models.DenseNet)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    leaves = jax.tree.leaves(variables["params"])
    assert sum(math.prod(v.shape) for v in leaves) == COUNTS[name]


def test_options_of_a_name_can_be_overridden():
    model = models.densenet121(linen_models.DenseNet, num_classes=7, efficient=False)
    assert model.num_classes == 7 and model.growth_rate == 32 and not model.efficient
    small = models.densenet_cifar(22, 8, linen_models.DenseNet, num_classes=100)
    assert small.block_config == (3, 3, 3) and small.num_init_features == 16


@pytest.mark.parametrize("depth", [4, 39, 41])
def test_depth_of_a_cifar_densenet(depth):
    with pytest.raises(ValueError, match=rf"`depth` \(={depth}\).*6n \+ 4"):
        models.densenet_cifar(depth)
