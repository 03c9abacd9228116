"""OffloadModel features specific to nnx; tests/layers has the shared ones."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
from effjax.nnx import OffloadModel
from tests.layers.offload_linen import IMAGES, KEY, X, assert_same
from tests.layers.offload_nnx import (
    cnn,
    compiled,
    loss_of,
    mlp,
    normed,
    others_of,
    stacked,
    train,
    unwrapped,
)
from tests.ops.offload.stacks import POLICIES, assert_close, kinds
from tests.tiers import vary


def test_train_and_eval():
    """The modes of `eval`, of `nnx.view` and of the arguments of a call, also without jit."""
    model, plain = OffloadModel(cnn()).to_host(), nnx.Sequential(*cnn())
    model.eval()
    plain.eval()
    before = others_of(model)
    run = jax.jit(lambda x: model(x))  # no Variable changes, so the model may be closed over
    want = run(IMAGES)
    np.testing.assert_array_equal(jax.jit(lambda x: plain(x))(IMAGES), want)
    np.testing.assert_allclose(model(IMAGES), want, atol=1e-6)
    model.train()
    flags = dict(use_running_average=True, deterministic=True)
    viewed = nnx.view(model, **flags)
    flat = OffloadModel([*cnn()[:2], nnx.relu, nnx.Dropout(0.5, rngs=nnx.Rngs(3))]).to_host()

    @nnx.jit
    def evaluate(viewed, flat, plain):
        by_layers = nnx.relu(plain.layers[1](plain.layers[0](IMAGES)))
        return viewed(IMAGES), flat(IMAGES, **flags), by_layers

    by_view, by_flags, by_layers = evaluate(viewed, flat, plain)
    np.testing.assert_allclose(by_view, want, atol=1e-6)
    np.testing.assert_allclose(by_flags, by_layers, atol=1e-6)
    assert_same(others_of(model), before)


def test_checkpoints_are_interchangeable():
    plain, model = nnx.Sequential(*mlp()), OffloadModel(nnx.Sequential(*mlp()))
    state = nnx.state(plain)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    nnx.update(model, state)
    model.to_host()
    assert_same(train(model, X), unwrapped(mlp))
    back = nnx.Sequential(*mlp())
    nnx.update(back, effjax.to_device(nnx.state(model)))
    assert kinds(nnx.state(back)) == {"device"}
    params = [nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (back, plain)]
    assert_same(*params)


@vary(("num_microbatches", "policy"), [(2, "everything"), (1, "recomputed")])
def test_stack_matches_list_of_layers(num_microbatches, policy):
    """Each layer has its own parameters, batch statistics, dropout stream and key."""

    def loss(model, x):
        y = model(x, rngs=KEY)
        return jnp.sin(y).sum(), y

    def run(layers, **options):
        options |= dict(num_microbatches=num_microbatches, policy=POLICIES[policy])
        return compiled(loss)(OffloadModel(layers, **options).to_host(), X)

    y, grads, dx, others = run(stacked(normed()), num_slices=2)
    want = run(normed())
    assert kinds(grads) == {"pinned_host"}
    assert_same(y, want[0])
    np.testing.assert_allclose(dx, want[2], atol=1e-5)

    def at(tree, i):
        return jax.tree.map(lambda a: effjax.to_device(a)[i], tree["layers"])

    for i in range(4):
        assert_close(at(grads, i), effjax.to_device(want[1]["layers"][i]), 1e-7, atol=1e-5)
        got, expected = at(others, i), want[3]["layers"][i]
        assert_close(got["norm"], expected["norm"], 1e-5)
        assert_same(got["dropout"], expected["dropout"])
        assert int(got["dropout"]["rngs"]["count"]) == 1
    assert np.all(np.any(np.asarray(others["layers"]["norm"]["mean"]) != 0, axis=-1))


class Noise(nnx.Module):
    """A layer with the arguments `rngs` and `scale`."""

    def __call__(self, x, rngs=None, scale=1.0):
        return x if rngs is None else x + scale * jax.random.normal(rngs.noise(), x.shape)


@vary("rngs", [nnx.Rngs(dropout=KEY), nnx.Rngs(dropout=KEY).dropout, KEY])
def test_rngs_of_call(rngs):
    model = OffloadModel([Noise(), lambda x: 2 * x, Noise()], num_microbatches=2)
    k = KEY if rngs is KEY else jax.random.fold_in(KEY, 0)
    y = model(X, rngs=rngs, scale=0.5)

    def noise(i, m):
        key = jax.random.fold_in(jax.random.fold_in(k, i), m)
        return 0.5 * jax.random.normal(nnx.Rngs(key).noise(), (6, 6))

    want = [2 * (X[6 * m :][:6] + noise(0, m)) + noise(2, m) for m in range(2)]
    np.testing.assert_allclose(y, np.concatenate(want), atol=1e-6)
    np.testing.assert_array_equal(model(X), 2 * X)


class Part(nnx.Module):
    """A module with a shared layer."""

    def __init__(self, inner, seed):
        self.inner, self.own = inner, nnx.Linear(6, 6, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return jnp.sin(self.inner(x)) + self.own(x)


class Attend(nnx.Module):
    def __init__(self, embed):
        self.embed = embed

    def __call__(self, x):
        return self.embed.attend(x)


def shared_kernel():
    layers = [nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i in range(2)]
    layers[1].kernel = layers[0].kernel
    return [layers[0], jnp.tanh, layers[1]], X


def shared_embedding():
    embed = nnx.Embed(10, 6, rngs=nnx.Rngs(0))
    return [embed, Part(nnx.Linear(6, 6, rngs=nnx.Rngs(1)), 2), Attend(embed)], np.arange(10)


@vary(
    ("make", "options"),
    [
        (shared_embedding, {"num_slices": 2, "num_microbatches": 2}),
        (shared_kernel, {}),
    ],
)
def test_layers_that_share_parameters(make, options):
    """Sharing survives split and merge."""
    (layers, x), (others, _) = make(), make()
    run = nnx.jit(nnx.value_and_grad(lambda model: jnp.sin(model(x)).sum()))
    got, want = run(OffloadModel(layers, **options).to_host()), run(nnx.Sequential(*others))
    assert kinds(got[1]) == {"pinned_host"}
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


def test_parameters_used_outside_too_are_named():
    class Head(nnx.Module):
        def __init__(self, embed):
            self.embed = embed

        def __call__(self, x):
            return self.embed.attend(x)

    def call(model, tokens, load=lambda table: table):
        return model.body(load(model.embed.embedding[...])[tokens])

    rngs = nnx.Rngs(0)
    model = nnx.Dict(embed=nnx.Embed(4, 3, rngs=rngs))
    expected = model.embed.attend(model.embed(jnp.arange(2)))
    model.body = OffloadModel([Head(model.embed)]).to_host()
    with pytest.raises(ValueError, match="memory_space") as error:
        effjax.nnx.offload_jit(call, donate=False)(model, jnp.arange(2))
    notes = "".join(error.value.__notes__)
    assert "in host memory: embed.embedding. Load it there with effjax.to_device" in notes
    loaded = functools.partial(call, load=effjax.to_device)
    assert_close(effjax.nnx.offload_jit(loaded, donate=False)(model, jnp.arange(2)), expected)


def test_stack_with_sharing_within_a_layer_outside_jit():
    layers: Any = [Part(nnx.Linear(6, 6, rngs=nnx.Rngs(i)), i + 3) for i in range(3)]
    for layer in layers:
        layer.own = layer.inner
    grad = nnx.grad(lambda model: jnp.sin(model(X)).sum())
    got = nnx.to_pure_dict(grad(OffloadModel(stacked(layers)).to_host()))["layers"]
    want = nnx.to_pure_dict(nnx.jit(grad)(nnx.Sequential(*layers)))["layers"]
    want = jax.tree.map(lambda *a: jnp.stack(a), *(want[i] for i in range(3)))
    chex.assert_trees_all_close(effjax.to_device(got), want, rtol=1e-5, atol=1e-6)


def test_functional_api_over_mesh(mesh8):
    model, plain = OffloadModel(mlp()), nnx.Sequential(*mlp())
    model.eval()
    plain.eval()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    sharding = jax.NamedSharding(mesh8, jax.P(), memory_kind="pinned_host")
    params = jax.device_put(params, sharding)
    x = jax.device_put(X[:8], jax.NamedSharding(mesh8, jax.P("data")))
    rest = jax.device_put(rest, jax.NamedSharding(mesh8, jax.P()))

    @jax.jit
    @jax.grad
    def grad(params, rest, x):
        return jnp.sin(nnx.merge(graphdef, params, rest)(x)).sum()

    got = grad(params, rest, x)
    assert kinds(got) == {"pinned_host"}
    want = nnx.jit(nnx.grad(lambda m: jnp.sin(m(X[:8])).sum()))(plain)
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=1e-5)
    nnx.update(model, effjax.to_device(params))
    model.to_host()  # stays on all devices
    assert {a.sharding for a in jax.tree.leaves(nnx.state(model, nnx.Param))} == {sharding}


def test_tabulate():
    # Also before to_host: an error inside nnx.tabulate would leave the classes of Flax broken.
    layers = [nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.relu, nnx.BatchNorm(6, rngs=nnx.Rngs(0))]
    model = OffloadModel(layers, num_microbatches=2)
    options: dict[str, Any] = dict(console_kwargs={"width": 200, "force_terminal": False})
    for at in (model, nnx.clone(model).to_host()):
        table = nnx.tabulate(at, X, **options)
        assert "layers/0" in table and "layers/2" in table and "Total Parameters: 66" in table
    of_stack = OffloadModel(stacked(normed())).to_host()
    assert "layers/linear" in nnx.tabulate(of_stack, X, **options)
    with pytest.raises(ValueError, match="to_host"):  # as before nnx.tabulate
        model(X)


class Counting(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones((2, 3)))
        self.shift = nnx.Variable(jnp.ones(3))

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("error", "match", "run"),
    [
        (ValueError, r"layers\[0\].*Call its to_host\(\)", lambda: OffloadModel(mlp())(X)),
        (ValueError, "to_host", lambda: nnx.jit(loss_of)(OffloadModel(mlp()), X)),
        (ValueError, "to_host", lambda: OffloadModel(stacked(normed()))(X)),
        (ValueError, r"`layers` \(of length 0\)", lambda: OffloadModel([])(X)),
        (TypeError, "`rngs`", lambda: OffloadModel([Noise()])(X, rngs=3)),
        (ValueError, "A Counting changes calls", lambda: OffloadModel([Counting()])(X)),
        (ValueError, "same number of layers", lambda: OffloadModel(Scaled()).to_host()(X)),
        (ValueError, "share the BatchStat",
         lambda: OffloadModel([nnx.BatchNorm(6, rngs=nnx.Rngs(0))] * 2).to_host()(X)),
        (ValueError, "share the RngCount",
         lambda: OffloadModel([nnx.Dropout(0.5, rngs=nnx.Rngs(0))] * 2)(X)),
    ],
)  # fmt: skip
def test_rejects_invalid_arguments(error, match, run):
    with pytest.raises(error, match=match):
        run()
