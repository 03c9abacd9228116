"""OffloadModel features specific to linen; tests/layers has the shared ones."""

import functools
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

import effjax
from effjax.linen import OffloadModel
from tests.layers.offload_linen import (
    FAST,
    IMAGES,
    KEY,
    Block,
    Normed,
    X,
    assert_same,
    cnn,
    joined,
    mlp,
    on_host,
    train,
    variables_of,
)
from tests.ops.offload.stacks import POLICIES, assert_close, kinds
from tests.tiers import vary


@vary("make", [cnn, mlp])
def test_same_variables_from_the_same_key(make):
    """Checkpoints load with and without OffloadModel, also from host memory."""
    init = jax.jit(OffloadModel(make()).init, compiler_options=FAST)
    want = variables_of(make)
    assert_same(init({"params": KEY, "dropout": KEY}, IMAGES if make is cnn else X), want)
    saved = serialization.to_bytes(on_host(want))
    assert_same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, want), saved), want)


def test_call_flags_reach_the_layers():
    layers = [nn.Dense(6), nn.BatchNorm(), nn.relu, Block(), nn.Dropout(0.5)]
    model = OffloadModel(layers)
    on: Any = dict(use_running_average=False, deterministic=False)
    off: Any = dict(use_running_average=True, deterministic=True)
    variables: Any = jax.jit(functools.partial(model.init, **off), compiler_options=FAST)(KEY, X)
    host, rngs = on_host(variables), {"dropout": KEY}

    @jax.jit
    def run(host):
        _, new = model.apply(host, X, rngs=rngs, mutable=["batch_stats"], **on)
        return new, model.apply(host, X, **off)

    @jax.jit
    def evaluate(variables):
        own = [{k: v.get(f"layers_{i}", {}) for k, v in variables.items()} for i in range(5)]
        x = layers[1].apply(own[1], layers[0].apply(own[0], X), use_running_average=True)
        return layers[3].apply(own[3], nn.relu(x), deterministic=True)

    new, y = run(host)
    assert np.any(new["batch_stats"]["layers_1"]["mean"] != 0)
    np.testing.assert_allclose(y, evaluate(variables), atol=1e-6)
    with pytest.raises(Exception, match="batch_stats"):
        model.apply(host, X, rngs=rngs, **on)  # not mutable
    with pytest.raises(ValueError, match=r'effjax.to_host\(variables\["params"\]\)'):
        model.apply(variables, X, **off)


class Scanned(nn.Module):
    """The stack without OffloadModel."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            lambda layer, x, _: (layer(x), None), {"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True}, length=4,
        )  # fmt: skip
        return layers(Normed(name="layers"), x, None)[0]


@vary(("num_microbatches", "policy"), [(2, "everything"), (1, "recomputed")])
def test_stack_matches_loop(num_microbatches, policy):
    """Variables match nn.scan; dropout keys are fold_in(fold_in(key, layer), microbatch)."""
    rngs = {"params": KEY, "dropout": KEY}
    variables = jax.jit(Scanned().init, compiler_options=FAST)(rngs, X)
    options: Any = {"num_slices": 2, "num_microbatches": num_microbatches}
    model = OffloadModel(Normed(), num_layers=4, **options, policy=POLICIES[policy])
    assert_same(jax.jit(model.init, compiler_options=FAST)(rngs, X), variables)
    got = train(model, on_host(variables), X)
    assert kinds(got[1]) == {"pinned_host"}

    class Layer(nn.Module):
        """A layer with the name of the stack, which linen folds into the key."""

        @nn.compact
        def __call__(self, x):
            return Normed(name="layers")(x)

    def loop(m):
        def apply(variables, x, rngs, mutable):
            def body(x, at):
                own, i = at
                key = jax.random.fold_in(jax.random.fold_in(rngs["dropout"], i), m)
                return Layer().apply(own, x, rngs={"dropout": key}, mutable=mutable)

            return jax.lax.scan(body, x, (variables, jnp.arange(4)))

        return types.SimpleNamespace(apply=apply)

    inputs = np.split(X, num_microbatches)
    want, stats = joined([train(loop(m), variables, x) for m, x in enumerate(inputs)])
    assert_same(got[:3], want)
    assert_close(got[3], stats, rtol=1e-6, atol=0)
    if num_microbatches == 1:
        assert_same(got[3], stats)
        y: Any = model.apply(on_host(variables), X, train=False)
        assert np.isfinite(y).all()


@pytest.mark.exhaustive
def test_inside_another_module():
    """Names and keys follow the outer module."""

    class Outer(nn.Module):
        wrap: Any

        def setup(self):
            self.first = nn.Dense(6)
            self.body = self.wrap(mlp())

        def __call__(self, x):
            return self.body(self.first(x))

    rngs = {"params": KEY, "dropout": KEY}
    plain, model = Outer(nn.Sequential), Outer(OffloadModel)
    variables = jax.jit(plain.init, compiler_options=FAST)(rngs, X)
    assert_same(jax.jit(model.init, compiler_options=FAST)(rngs, X), variables)
    first, body = (variables["params"][name] for name in ("first", "body"))
    got = train(model, {"params": {"first": first, "body": effjax.to_host(body)}}, X)
    assert_same(got, train(plain, variables, X))


def test_gradients_of_repeated_module_are_summed():
    dense = nn.Dense(6)
    plain = nn.Sequential([dense, nn.tanh, dense])
    variables = jax.jit(plain.init)(KEY, X)
    got, want = train(OffloadModel(plain), on_host(variables), X), train(plain, variables, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    assert kinds(got[1]) == {"pinned_host"}


def test_stack_with_sharing_within_a_layer():
    dense = nn.Dense(6)
    layer = nn.Sequential([dense, nn.tanh, dense])
    model = OffloadModel(layer, num_layers=3)
    variables = jax.jit(model.init)(KEY, X)

    def one_by_one(params):
        x = X
        for i in range(3):
            x = layer.apply({"params": jax.tree.map(lambda a, i=i: a[i], params["layers"])}, x)
        return x

    def gradient(apply):
        return jax.jit(jax.grad(lambda params: jnp.sin(apply(params)).sum()))

    got = gradient(lambda params: model.apply({"params": params}, X))(on_host(variables)["params"])
    want = gradient(one_by_one)(variables["params"])
    chex.assert_trees_all_close(effjax.to_device(got), want, rtol=1e-5, atol=1e-6)


def test_repeated_module_has_two_dropout_masks():
    dense, drop = nn.Dense(6), nn.Dropout(0.5, deterministic=False)
    model, plain = (cls([dense, drop, dense, drop]) for cls in (OffloadModel, nn.Sequential))
    x, rngs = jnp.ones_like(X), {"params": KEY, "dropout": KEY}
    variables, same = jax.jit(lambda: (plain.init(rngs, x), model.init(rngs, x)))()
    assert_same(same, variables)
    eye = jax.tree.map(lambda a: jnp.eye(6) if a.ndim == 2 else a, variables)
    y = np.asarray(model.apply(on_host(eye), x, rngs={"dropout": KEY}))
    assert len(np.unique(y)) == 2  # 0 and 4
    assert 0.1 < np.mean(y == 4) < 0.4  # two masks


class Part(nn.Module):
    """A module with a shared layer."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(6)(self.inner(x))


class Around(nn.Module):
    def setup(self):
        self.dense = nn.Dense(6)
        self.body = OffloadModel([nn.Dense(6), Part(self.dense)])

    def __call__(self, x):
        return self.body(self.dense(x))


def test_rejects_module_shared_by_two_layers():
    dense, norm = nn.Dense(6), nn.BatchNorm(use_running_average=False)
    with pytest.raises(ValueError, match=r"a Part, shares the Dense of layers_0.* effjax\.nnx"):
        OffloadModel([dense, Part(dense)]).init(KEY, X)
    with pytest.raises(ValueError, match="a Part, shares the Dense of dense"):
        Around().init(KEY, X)
    model = OffloadModel([norm, norm])
    variables = jax.jit(model.init)(KEY, X)
    with pytest.raises(ValueError, match="Layer 1 occurs twice, a BatchNorm"):  # its statistics
        model.apply(on_host(variables), X, mutable=["batch_stats"])


def test_rejects_a_single_layer_without_their_number():
    with pytest.raises(ValueError, match=r"`num_layers` \(=None\)"):
        OffloadModel(Block()).init(KEY, X)


@vary("num_layers", [3, None])
def test_tabulate(num_layers):
    layers: Any = nn.Dense(6) if num_layers else [nn.Dense(6), nn.Dense(6)]
    model = OffloadModel(layers, num_layers=num_layers)
    options: dict[str, Any] = dict(console_kwargs={"width": 200, "force_terminal": False})
    table = model.tabulate(KEY, X, **options)
    assert ("float32[3,6,6]" if num_layers else "layers_1") in table
    assert "_list_layers" not in table and "_initialize" not in table
    with pytest.raises(ValueError, match="use the model without OffloadModel"):
        model.tabulate(KEY, X, compute_flops=True, **options)
