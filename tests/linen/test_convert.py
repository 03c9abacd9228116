import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from effjax.linen import BatchNorm, convert_batch_norm
from effjax.models.linen import DenseNet
from tests.contexts import CONTEXTS, single_device
from tests.tiers import vary

X = np.random.default_rng(0).normal(3, 2, (16, 4)).astype(np.float32)
KEY = jax.random.key(0)


class BatchNormAct(nn.BatchNorm):
    @nn.compact
    def __call__(self, x, use_running_average=None, *, mask=None):  # type: ignore[override]
        return nn.relu(super().__call__(x, use_running_average, mask=mask))


class Block(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(self.norm, use_running_average=not train)
        return x + norm(momentum=0.7, name="norm")(nn.Dense(4)(x))


class Model(nn.Module):
    """Layers from setup, in a list, and from a partial in a submodule as in Flax's examples."""

    norm: Any = nn.BatchNorm

    def setup(self):
        self.first = self.norm(use_scale=False)
        self.list = [self.norm(), nn.LayerNorm()]
        self.block = Block(self.norm)
        self.own = BatchNormAct()

    def __call__(self, x, train=True):
        second, other = self.list
        x = other(second(self.first(x, not train), not train))
        return self.own(self.block(x, train), not train)


def run(model, variables, x=X):
    return model.apply(variables, x, mutable=["batch_stats"])


def close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


def test_matches_unconverted_model():
    model = Model()
    converted = convert_batch_norm(model)
    variables, same = jax.jit(lambda: (model.init(KEY, X), converted.init(KEY, X)))()
    close(same, variables)  # of the same structure
    for call in run, functools.partial(nn.Module.apply, x=X, train=False):
        close(*jax.jit(lambda v, call=call: (call(converted, v), call(model, v)))(variables))


def collectives(mesh, model, variables, method=None):
    """Return the axis of each collective of a model that runs where "data" is mapped."""

    def call(x):
        return model.apply(variables, x, method=method, mutable=["batch_stats"])[0]

    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    program = str(jax.make_jaxpr(mapped)(X))
    return re.findall(r"= (?:psum|all_gather)\w*\[[^]]*?axe?s\w*=\('(\w+)'", program)


def test_replaces_flax_layers_only(mesh8):
    variables, model = jax.jit(Model().init)(KEY, X), convert_batch_norm(Model(), "data")
    # One for each layer, but not for BatchNormAct.
    assert collectives(mesh8, model, variables) == ["data"] * 3


@vary("context", ["shard_map_of_grad", "pmap"])
def test_statistics_and_gradients_over_devices(context):
    flat = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(3)])
    variables = flat.init(KEY, X)

    def operator(model):
        return lambda params, batch, axis: run(model, {**variables, "params": params}, batch["x"])

    args = variables["params"], {"x": X, "w": np.sin(np.arange(48.0, dtype="f4")).reshape(16, 3)}
    got = CONTEXTS[context](operator(convert_batch_norm(flat, "i")), *args)
    close(got, single_device(operator(flat), *args))


def test_settings_of_effjax_layers():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            own = BatchNorm(use_running_average=False, axis_name="data")
            return convert_batch_norm(nn.Sequential([own, nn.Dense(2)]), axis_name=None)(x)

    y, _ = run(Outer(), Outer().init(KEY, X))  # no axis is mapped
    assert y.shape == (16, 2)
    alone = convert_batch_norm(nn.BatchNorm(use_running_average=False), unbiased_running_var=True)
    _, new = run(alone, alone.init(KEY, X))
    want = 0.99 + 0.01 * X.var(0, ddof=1)
    np.testing.assert_allclose(new["batch_stats"]["var"], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("error", "match", "model"),
    [
        (ValueError, "must not have an `axis_name`", DenseNet()),
        (TypeError, r"`model` must be a flax\.linen\.Module", None),
        (TypeError, r"with effjax\.nnx", nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    ],
)
def test_rejects(error, match, model):
    with pytest.raises(error, match=match):
        convert_batch_norm(model)


class Encoder(nn.Module):
    """Network with attributes and methods of its own."""

    features: int = 4
    dtype: Any = jnp.float32

    def setup(self):
        self.dense = nn.Dense(self.features, self.dtype)
        self.norm = nn.BatchNorm(use_running_average=False)

    @property
    def width(self):
        return 2 * self.features

    def encode(self, x):
        return self.norm(self.dense(x))

    def __call__(self, x):
        return self.encode(x)


def test_has_the_attributes_and_methods_of_the_model():
    model, converted = Encoder(), convert_batch_norm(Encoder(), "data")
    assert isinstance(converted, Encoder) and type(converted) is not Encoder
    assert (converted.width, converted.dtype) == (8, jnp.float32)
    assert repr(converted) == repr(model)
    assert converted.clone(features=2).width == 4
    same = convert_batch_norm(Encoder(), "data")
    assert converted == same and hash(converted) == hash(same)
    assert converted != convert_batch_norm(Encoder(), "model") and converted != model


@pytest.mark.parametrize("method", ["encode", Encoder.encode, lambda model, x: model.encode(x)])
def test_converts_whichever_method_is_called(mesh8, method):
    variables = Encoder().init(KEY, X)
    converted = convert_batch_norm(Encoder(), "data")
    assert collectives(mesh8, converted, variables, method) == ["data"]
    assert not collectives(mesh8, Encoder(), variables, method)
    bound = convert_batch_norm(Encoder(), stats="gather").bind(variables, mutable=["batch_stats"])
    close(bound.encode(X), run(Encoder(), variables)[0])


def test_converts_twice(mesh8):
    first = convert_batch_norm(Encoder(), "missing", stats="gather")
    second = convert_batch_norm(first, "data")
    variables = Encoder().init(KEY, X)
    close(second.init(KEY, X), variables)
    assert collectives(mesh8, second, variables) == ["data"]
    # The model, and its part, are converted.
    whole = convert_batch_norm(nn.Sequential([first, nn.Dense(2)]), "data")
    variables = nn.Sequential([Encoder(), nn.Dense(2)]).init(KEY, X)
    assert collectives(mesh8, whole, variables) == ["data"]


def test_converts_layers_that_are_compiled_already(mesh8):
    class Compiled(nn.Module):
        """Network with a layer that `nn.jit` compiles, and caches by its configuration."""

        @nn.compact
        def __call__(self, x):
            return nn.jit(Encoder)(name="encoder")(x)

    variables, converted = Compiled().init(KEY, X), convert_batch_norm(Compiled(), "data")
    for model, want in (Compiled(), []), (converted, ["data"]), (Compiled(), []):
        assert collectives(mesh8, model, variables) == want
