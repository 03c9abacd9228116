import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from effjax.linen import BatchNorm, convert_batch_norm
from effjax.models.linen import DenseNet

X = np.random.default_rng(0).normal(3, 2, (16, 4)).astype(np.float32)
KEY = jax.random.key(0)


class BatchNormAct(nn.BatchNorm):
    @nn.compact
    def __call__(self, x, use_running_average=None, *, mask=None):  # type: ignore[override]
        return nn.relu(super().__call__(x, use_running_average, mask=mask))


class Block(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x):
        return x + self.norm(momentum=0.7)(nn.Dense(4)(x))


class Model(nn.Module):
    """Layers from setup, from a partial in a field, in a list, and in a submodule."""

    norm: Any = functools.partial(nn.BatchNorm, use_running_average=False)

    def setup(self):
        self.first = self.norm(use_scale=False)
        self.list = [self.norm(), nn.LayerNorm()]
        self.block = Block(self.norm)
        self.own = BatchNormAct(use_running_average=False)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.list:
            x = layer(x)
        return self.own(self.block(x))


def run(model, variables, x=X):
    return model.apply(variables, x, mutable=["batch_stats"])


def close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


def test_matches_unconverted_model():
    model = Model()
    converted = convert_batch_norm(model)
    assert converted.model is model
    variables = model.init(KEY, X)
    close(converted.init(KEY, X), variables)  # of the same structure
    close(run(converted, variables), run(model, variables))


def test_replaces_flax_layers_only(mesh8):
    variables, model = Model().init(KEY, X), convert_batch_norm(Model(), "data")
    mapped = jax.shard_map(
        lambda x: run(model, variables, x)[0], mesh=mesh8, in_specs=P("data"), out_specs=P("data")
    )
    collectives = re.findall(r"= (?:psum|all_gather)\w*\[", str(jax.make_jaxpr(mapped)(X)))
    assert len(collectives) == 3  # one for each layer, but not for BatchNormAct


def test_statistics_and_gradients_over_devices(mesh8):
    flat = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(3)])
    variables = flat.init(KEY, X)
    synced = convert_batch_norm(flat, "data")

    def loss(params, stats, x, model):
        y, new = run(model, {"params": params, "batch_stats": stats}, x)
        return jnp.square(jnp.sin(y)).mean(), new

    def step(params, stats, x):
        local = lambda p: jax.lax.pmean(loss(p, stats, x, synced)[0], "data")  # noqa: E731
        return jax.grad(local)(params), loss(params, stats, x, synced)[1]

    mapped = jax.shard_map(step, mesh=mesh8, in_specs=(P(), P(), P("data")), out_specs=P())
    stats = variables["batch_stats"]
    grads, new = jax.jit(mapped)(variables["params"], stats, X)
    (_, expected), whole = jax.jit(
        functools.partial(jax.value_and_grad(loss, has_aux=True), model=flat)
    )(variables["params"], stats, X)
    close(grads, whole)
    close(new, expected)


def test_settings_of_effjax_layers():

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            own = BatchNorm(use_running_average=False, axis_name="data")
            return convert_batch_norm(nn.Sequential([own, nn.Dense(2)]), axis_name=None)(x)

    variables = Outer().init(KEY, X)
    y, _ = run(Outer(), variables)  # no axis is mapped
    assert y.shape == (16, 2)
    alone = convert_batch_norm(nn.BatchNorm(use_running_average=False), unbiased_running_var=True)
    (_, new), n = run(alone, alone.init(KEY, X)), len(X)
    np.testing.assert_allclose(
        new["batch_stats"]["var"], 0.99 + 0.01 * X.var(0) * n / (n - 1), rtol=1e-5
    )


def test_rejects_a_model_with_an_axis_of_its_own():
    with pytest.raises(ValueError, match="must not have an `axis_name`"):
        convert_batch_norm(DenseNet())
