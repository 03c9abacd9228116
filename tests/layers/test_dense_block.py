"""DenseBlock in both flavors against the definition, in float64."""

import functools
import inspect
import re
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx

import effjax.linen
import effjax.nnx
from effjax import DenseLayerParams
from effjax.memory import residual_bytes
from tests import oracles
from tests.contexts import CONTEXTS, assert_trees_close, scan_of_checkpoint, single_device
from tests.models.flavors import Linen, Nnx, draw
from tests.tiers import vary


class LinenBlock(Linen):
    mode = staticmethod(lambda train: {"use_running_average": not train})
    init_options = MappingProxyType({"use_running_average": True})


OPTIONS: dict[str, Any] = dict(
    num_layers=2, growth_rate=2, bn_size=2, momentum=0.7, unbiased_running_var=True
)  # fmt: skip
FLAVORS: dict[str, Any] = {
    "nnx": functools.partial(Nnx, effjax.nnx.DenseBlock, in_features=3),
    "linen": functools.partial(LinenBlock, effjax.linen.DenseBlock),
}
FORMS = {
    "plain": dict(efficient=False),
    "conv": dict(save="conv"),
    "features": dict(save="features", chunk_size=3),
}
KEY = jax.random.key(7)
LAYER = ("norm1.scale", "norm1.bias", "conv1.kernel", "norm2.scale", "norm2.bias", "conv2.kernel")


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    mask = rng.random((16, 5, 4, 1)) < 0.7
    mask[:2] = False  # nothing on the first of eight devices
    return {"x": rng.normal(1, 2, (16, 5, 4, 3)), "w": rng.normal(size=(16, 5, 4, 7)), "mask": mask}


@functools.cache
def values():
    """Return parameters and running statistics by name."""
    return [draw(names) for names in FLAVORS["nnx"](**OPTIONS).names(batch()["x"])]


def block(flavor, rate, **options):
    """Return the block as an operator of its parameters, with its new statistics."""

    def op(params, batch, axis_name):
        model = FLAVORS[flavor](**OPTIONS | options, drop_rate=rate, axis_name=axis_name)
        model.names(batch["x"])
        dropout = {"rngs" if flavor == "nnx" else "rng": KEY} if rate else {}
        return model(params, values()[1], batch["x"], mask=batch["mask"], **dropout)

    return op


@functools.cache
def expected(rate):
    """Return the results of the definition: every statistic is updated once, by the batch's."""

    def op(params, batch, axis_name):
        layers = [DenseLayerParams(*(params[f"layers.{i}.{n}"] for n in LAYER)) for i in (0, 1)]
        y, statistics = oracles.dense_block(
            batch["x"], layers, batch["mask"], dropout_rate=rate, key=KEY
        )
        new = {}
        for i, pair in enumerate(statistics):
            for norm, (mean, var, count) in zip(("norm1", "norm2"), pair, strict=True):
                for name, value in (("mean", mean), ("var", var * count / (count - 1))):
                    path = f"layers.{i}.{norm}.{name}"
                    new[path] = 0.7 * values()[1][path] + 0.3 * value
        return y, new

    return single_device(op, values()[0], batch())


@pytest.mark.usefixtures("x64")
@vary(
    ("flavor", "run", "form", "rate"),
    [
        ("nnx", CONTEXTS["shard_map_of_grad"], "conv", 0.0),
        ("linen", CONTEXTS["pmap"], "conv", 0.0),
        ("linen", CONTEXTS["jit_explicit"], "conv", 0.0),
        ("nnx", scan_of_checkpoint, "conv", 0.0),  # runs forward twice, updates statistics once
        ("linen", single_device, "features", 0.3),
        ("nnx", single_device, "conv", 0.3),
        ("nnx", single_device, "plain", 0.3),
        ("linen", single_device, "plain", 0.3),
    ],
)
def test_matches_definition(flavor, run, form, rate):
    """Compare the output, all gradients and the running statistics, under a mask."""
    got = run(block(flavor, rate, **FORMS[form]), values()[0], batch())
    assert_trees_close(got, expected(rate), 1e-12)


@pytest.mark.usefixtures("x64")
@vary("flavor", FLAVORS)
def test_evaluation_uses_running_stats(flavor):
    """It needs no axis and no dropout key, and changes no statistics."""
    (params, stats), x = values(), batch()["x"]
    model = FLAVORS[flavor](**OPTIONS, drop_rate=0.5, axis_name="absent")
    model.names(x)
    y, new = jax.jit(functools.partial(model, train=False))(params, stats, x)
    jax.tree.map(np.testing.assert_array_equal, new, stats)
    want, of = x, params | stats
    for layer in ("layers.0", "layers.1"):
        z = want
        for k in (1, 2):
            scale, bias, mean, var = (
                of[f"{layer}.norm{k}.{name}"] for name in ("scale", "bias", "mean", "var")
            )
            z = np.maximum((z - mean) / np.sqrt(var + 1e-5) * scale + bias, 0)
            z = oracles.conv(z, of[f"{layer}.conv{k}.kernel"])
        want = np.concatenate([want, z], -1)
    assert_trees_close(y, want, 1e-12)


def make_nnx(**options):
    return effjax.nnx.DenseBlock(3, **OPTIONS | options, rngs=nnx.Rngs(0))


X = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)


def test_both_flavors_have_the_same_arguments():
    def defaults(cls):
        parameters = inspect.signature(cls.__init__).parameters
        own = {"self", "in_features", "rngs", "parent", "name"}
        return {name: p.default for name, p in parameters.items() if name not in own}

    of_nnx, of_linen = defaults(effjax.nnx.DenseBlock), defaults(effjax.linen.DenseBlock)
    # Flax's BatchNorm has this difference too.
    assert of_nnx | {"use_running_average": None} == of_linen
    assert effjax.nnx.BatchNorm(3, rngs=nnx.Rngs(0)).momentum == of_nnx["momentum"]


def test_nnx_modes():
    """`train`, `eval` and the arguments of a call set the mode and dropout."""
    model = make_nnx(num_layers=1, drop_rate=0.5)
    assert model.out_features == 5
    nnx.jit(lambda model: model(X, deterministic=True))(model)
    assert (model.layers[0].norm1.mean[...] != 0).all()
    for options in {}, dict(use_running_average=False, deterministic=False):
        with pytest.raises(TypeError, match="`rngs` must be a single PRNG key"):
            model(X, **options)
        model.eval()
    view = nnx.view(model, deterministic=False)
    assert model.deterministic and not view.deterministic
    run = nnx.jit(lambda model, view: (model(X), view(X, rngs=nnx.Rngs(dropout=0))))
    assert not np.array_equal(*run(model, view))


def test_linen_modes():
    model = effjax.linen.DenseBlock(**OPTIONS, drop_rate=0.5, axis_name="absent")
    variables = jax.eval_shape(
        functools.partial(model.init, use_running_average=False), jax.random.key(0), X
    )
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    apply = model.clone(axis_name=None).apply
    with pytest.raises(errors.InvalidRngError, match="dropout"):
        train = functools.partial(apply, use_running_average=False, mutable="batch_stats")
        jax.eval_shape(train, variables, X)
    with pytest.raises(ValueError, match="use_running_average"):
        jax.eval_shape(apply, variables, X)
    field = model.clone(use_running_average=True)  # evaluation needs neither a key nor the axis
    assert jax.eval_shape(field.apply, variables, X).shape == (2, 4, 4, 7)


@pytest.mark.usefixtures("x64")
@vary("flavor", FLAVORS)
def test_half_precision_and_kept_bytes(flavor):
    """Outputs have `dtype`, statistics are float32, and the recomputing forms keep less."""
    x = jax.ShapeDtypeStruct((64, 4, 4, 3), jnp.bfloat16)

    def kept(**form):
        model = FLAVORS[flavor](**OPTIONS | dict(num_layers=4), dtype=jnp.bfloat16, **form)
        variables = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, jnp.float32), model.names(x)
        )
        y, stats = jax.eval_shape(model, *variables, x)
        assert y.dtype == jnp.bfloat16 and y.shape == (64, 4, 4, 11)
        assert {s.dtype for s in stats.values()} == {jnp.dtype("float32")}
        report = residual_bytes(lambda *args: model(*args)[0], *variables, x)
        return report.bytes - report.argument_bytes

    plain, conv, features = (kept(**form) for form in FORMS.values())
    assert conv < 0.5 * plain and features < 0.6 * conv


def test_nnx_convert_batch_norm_sets_the_axis_of_the_block(mesh8):
    """Converted, the block needs the axis, and reduces over it once per norm."""
    model = nnx.eval_shape(lambda: effjax.nnx.convert_batch_norm(make_nnx(), "data"))
    graphdef, state = nnx.split(model)

    def run(state, x):
        return nnx.merge(graphdef, state, copy=True)(x)

    specs: dict[str, Any] = dict(in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    mapped = jax.shard_map(run, mesh=mesh8, **specs)
    program = str(jax.make_jaxpr(mapped)(state, batch()["x"]))
    assert len(re.findall(r"= psum\w*\[", program)) == 2 * OPTIONS["num_layers"]
    with pytest.raises(ValueError, match=r"`axis_name` \(='data'\) is not mapped"):
        jax.eval_shape(run, state, X)


def test_linen_convert_batch_norm_refuses_a_network_with_a_block():
    # The operator of the block does not call its norms, so that they would not be converted.
    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = effjax.linen.DenseBlock(**OPTIONS, axis_name="data")(x, True)
            return linen.BatchNorm(use_running_average=True)(x)

    def init(**settings):
        converted = effjax.linen.convert_batch_norm(Network(), **settings)
        return jax.eval_shape(converted.init, jax.random.key(0), X)

    with pytest.raises(ValueError, match="must not have an `axis_name`"):
        init(axis_name="other")
    assert init(axis_name="data").keys() == {"params", "batch_stats"}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_rejects_bad_arguments(flavor):
    make = make_nnx if flavor == "nnx" else lambda **o: effjax.linen.DenseBlock(**OPTIONS | o)
    for name, value in ("num_layers", 0), ("growth_rate", 0), ("drop_rate", 1.0), ("save", "all"):
        with pytest.raises(ValueError, match=f"`{name}`"):
            make(**{name: value})


def test_rejects_bad_inputs():
    with pytest.raises(ValueError, match=r"`x` of shape \(2, 4, 4, 2\)"):
        make_nnx()(X[..., :2])
    for efficient in (True, False):
        with pytest.raises(ValueError, match="`mask`"):
            make_nnx(efficient=efficient)(X, mask=np.ones(X.shape, bool))
