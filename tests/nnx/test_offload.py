import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.nnx
from effjax.models import TransformerLM, scan_layers
from effjax.nnx import OffloadModel

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(8, 6, 6, 2)).astype(np.float32)
KEY = jax.random.key(5)
FAST: Any = {"xla_backend_optimization_level": 0}


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.3, dtype=jnp.float32):
        self.norm = nnx.LayerNorm(6, rngs=rngs, param_dtype=dtype)
        self.up = nnx.Linear(6, 12, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(12, 6, rngs=rngs, param_dtype=dtype)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Normed(nnx.Module):
    """Dropout and batch norm, as a layer of a stack."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


class Noise(nnx.Module):
    """Takes the call's randomness and a flag."""

    def __call__(self, x, rngs=None, scale=1.0):
        return x if rngs is None else x + scale * jax.random.normal(rngs.noise(), x.shape)


def made_once(make):
    """New modules in each call, with the same Variables."""

    @functools.cache
    def made(*args):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(*args)))
        state = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(*args))), compiler_options=FAST)
        return graphdef, state()

    def modules(*args):
        found = nnx.merge(*made(*args))
        return list(found) if isinstance(found, nnx.List) else found

    return modules


@made_once
def mlp(dtype=jnp.float32):
    rngs = nnx.Rngs(0)
    return nnx.List([Block(rngs, dtype=dtype) for _ in range(3)])


@made_once
def cnn(norm=nnx.BatchNorm, momentum: Any = 0.9):
    rngs = nnx.Rngs(0)
    options: dict[str, Any] = {"momentum": momentum, "rngs": rngs}
    layers = [
        nnx.Conv(2, 5, (3, 3), rngs=rngs),
        norm(5, **options),
        nnx.relu,
        nnx.Sequential(nnx.Conv(5, 3, (3, 3), strides=2, rngs=rngs), norm(3, **options)),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(27, 4, rngs=rngs),
    ]
    return nnx.List(layers)


@made_once
def normed():
    return nnx.List([Normed(nnx.Rngs(i)) for i in range(4)])


@made_once
def transformer():
    return TransformerLM(num_layers=4, width=8, num_heads=2, dropout_rate=0.2, rngs=nnx.Rngs(0))


def loss_of(model, x):
    y = model(x)
    return jnp.sin(y.astype(jnp.float32)).sum(), y


def compiled(loss, options=FAST):
    """``run(model, x) -> (output, gradients of Params and of x, what else the model then is)``"""

    @functools.partial(jax.jit, static_argnums=0, compiler_options=options)
    def step(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        (_, y), (grads, dx) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return y, nnx.to_pure_dict(grads), dx, others_of(model)

    def run(model, x):
        results = step(*nnx.split(model), x)
        nnx.update(model, results[-1])
        return results

    return run


train = compiled(loss_of)


def others_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


@functools.cache
def unwrapped(make, x_name):
    return train(nnx.Sequential(*make()), {"X": X, "IMAGES": IMAGES}[x_name])


@pytest.mark.parametrize("options", [{}, {"num_slices": 2, "checkpoint_activation": False}])
def test_blocks_with_dropout_as_unwrapped(options):
    model = OffloadModel(mlp(), **options).to_host()
    results = train(model, X)
    assert_same(results, unwrapped(mlp, "X"))
    assert kinds(results[1]) == {"pinned_host"}
    assert kinds(results[2]) == {"device"}
    assert kinds(nnx.state(model, nnx.Param)) == {"pinned_host"}
    assert [int(layer.dropout.rngs.count[...]) for layer in model.layers] == [1] * 3


@pytest.mark.parametrize("num_slices", [None, 3])
def test_cnn_with_batch_norm_as_unwrapped(num_slices):
    model = OffloadModel(cnn(), num_slices=num_slices).to_host()
    assert_same(train(model, IMAGES), unwrapped(cnn, "IMAGES"))
    assert np.any(model.layers[1].mean[...] != 0)


def test_effjax_batch_norm_as_unwrapped():
    layers = functools.partial(cnn, effjax.nnx.BatchNorm, None)
    model = OffloadModel(layers()).to_host()
    assert_same(train(model, IMAGES), train(nnx.Sequential(*layers()), IMAGES))
    np.testing.assert_array_equal(model.layers[1].num_batches[...], 1)


@pytest.mark.parametrize(("num_microbatches", "num_slices"), [(2, None), (3, 1)])
def test_microbatches_draw_their_own_dropout(num_microbatches, num_slices):
    """Microbatch m is the unwrapped model whose streams have the keys fold_in(key, m)."""
    options: dict[str, Any] = dict(num_slices=num_slices, num_microbatches=num_microbatches)
    got = train(OffloadModel(mlp(), **options).to_host(), X)

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def reference(params, x):
        graphdef, _, *others = nnx.split(nnx.Sequential(*mlp()), nnx.Param, nnx.RngKey, ...)
        keys, rest = map(nnx.to_pure_dict, others)
        parts = []
        for m, part in enumerate(jnp.split(x, num_microbatches)):
            fold = functools.partial(jax.random.fold_in, data=m)
            parts.append(nnx.merge(graphdef, params, jax.tree.map(fold, keys), rest)(part))
        y = jnp.concatenate(parts)
        return jnp.sin(y).sum(), y

    params = nnx.state(nnx.Sequential(*mlp()), nnx.Param)
    (_, y), (grads, dx) = reference(params, X)
    assert_same(got[:3], (y, nnx.to_pure_dict(grads), dx))
    assert_same(got[3], unwrapped(mlp, "X")[3])  # the streams have advanced once


def test_running_statistics_are_updated_once_by_the_mean_of_microbatches():
    layers = cnn(effjax.nnx.BatchNorm, None)
    train(OffloadModel(layers, num_microbatches=4).to_host(), IMAGES)
    flaxs = cnn()
    train(OffloadModel(flaxs, num_microbatches=4).to_host(), IMAGES)
    maps = cnn()[0](IMAGES).reshape(4, -1, 5)
    mean, var = maps.mean((0, 1)), maps.var(1).mean(0)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    close(layers[1].mean[...], mean)
    close(layers[1].var[...], var)
    np.testing.assert_array_equal(layers[1].num_batches[...], 1)
    close(flaxs[1].mean[...], 0.1 * mean)
    close(flaxs[1].var[...], 0.9 + 0.1 * var)


def test_train_and_eval():
    model, plain = OffloadModel(cnn()).to_host(), nnx.Sequential(*cnn())
    model.eval()
    plain.eval()
    before = others_of(model)
    run = jax.jit(lambda x: model(x))  # changes nothing, so that the model may be closed over
    want = run(IMAGES)
    np.testing.assert_array_equal(jax.jit(lambda x: plain(x))(IMAGES), want)
    np.testing.assert_allclose(model(IMAGES), want, atol=1e-6)  # without jit
    model.train()
    viewed = nnx.view(model, deterministic=True, use_running_average=True)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(viewed, IMAGES), want, atol=1e-6)
    flags = dict(use_running_average=True, deterministic=True)
    flat = OffloadModel([*cnn()[:2], nnx.relu, nnx.Dropout(0.5, rngs=nnx.Rngs(3))]).to_host()
    y = nnx.jit(lambda m, x: m(x, **flags))(flat, IMAGES)
    want = nnx.relu(plain.layers[1](plain.layers[0](IMAGES)))
    np.testing.assert_allclose(y, want, atol=1e-6)
    assert_same(others_of(model), before)


def test_checkpoints_load_both_ways():
    plain, model = nnx.Sequential(*mlp()), OffloadModel(mlp())
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    state = nnx.state(plain)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    nnx.update(model, state)
    model.to_host()
    assert_same(train(model, X), unwrapped(mlp, "X"))
    back = nnx.Sequential(*mlp())
    nnx.update(back, jax.tree.map(jnp.zeros_like, nnx.state(back, nnx.Param)))
    nnx.update(back, effjax.to_device(nnx.state(model)))
    assert kinds(nnx.state(back)) == {"device"}
    assert_same(nnx.to_pure_dict(nnx.state(back, nnx.Param)),
                nnx.to_pure_dict(nnx.state(plain, nnx.Param)))  # fmt: skip
    wrapped = OffloadModel(nnx.Sequential(*mlp()))
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(state)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_stack_of_blocks_with_keys(num_microbatches):
    """`TransformerLM.blocks`: equal to a loop with fold_in(fold_in(key, layer), microbatch)."""
    lm = transformer()
    x = jax.random.normal(KEY, (4, 5, 8))
    layer, params = lm.layer, nnx.to_pure_dict(nnx.state(lm.blocks, nnx.Param))

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def reference(params, x):
        def one(x, m):
            def body(x, at):
                w, i = at
                return layer(w, x, jax.random.fold_in(jax.random.fold_in(KEY, i), m)), None

            return jax.lax.scan(body, x, (params, jnp.arange(4)))[0]

        if num_microbatches == 1:
            y = scan_layers(layer, params, x, KEY)
        else:
            y = jnp.concatenate([one(part, m) for m, part in enumerate(jnp.split(x, 2))])
        return jnp.sin(y).sum(), y

    want = reference(params, x)
    model = OffloadModel(lm.blocks, num_microbatches=num_microbatches, num_slices=2).to_host()

    def loss(model, x):
        y = model(x, rngs=KEY)
        return jnp.sin(y).sum(), y

    y, grads, dx, _ = compiled(loss)(model, x)
    grads = grads["layers"]
    assert_same((y, grads, dx), (want[0][1], *want[1]))
    assert kinds(grads) == {"pinned_host"}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_stack_with_batch_norm_and_streams(num_microbatches):
    """What a list of the same layers does: the stack has each one's Variables."""
    layers = normed()
    graphdef = nnx.graphdef(layers[0])
    states = [nnx.state(layer) for layer in layers]
    stack = nnx.merge(graphdef, jax.tree.map(lambda *a: jnp.stack(a), *states))
    options: dict[str, Any] = dict(num_microbatches=num_microbatches)
    y, grads, dx, others = train(OffloadModel(stack, **options, num_slices=2).to_host(), X)
    listed = OffloadModel(layers, **options).to_host()
    want = train(listed, X)
    np.testing.assert_allclose(y, want[0], atol=1e-6)
    np.testing.assert_allclose(dx, want[2], atol=1e-5)

    def at(tree, i):
        return jax.tree.map(lambda a: effjax.to_device(a)[i], tree["layers"])

    for i in range(4):
        got, expected = at(grads, i), effjax.to_device(want[1]["layers"][i])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)
        got, expected = at(others, i), want[3]["layers"][i]
        np.testing.assert_allclose(got["norm"]["var"], expected["norm"]["var"], rtol=1e-5)
        assert_same(got["dropout"], expected["dropout"])
        assert int(got["dropout"]["rngs"]["count"]) == 1
    assert np.all(np.any(np.asarray(others["layers"]["norm"]["mean"]) != 0, axis=-1))


@pytest.mark.parametrize("rngs", [nnx.Rngs(dropout=KEY), nnx.Rngs(dropout=KEY).dropout, KEY])
def test_randomness_of_the_call(rngs):
    model = OffloadModel([Noise(), lambda x: 2 * x, Noise()], num_microbatches=2)
    k = KEY if rngs is KEY else jax.random.fold_in(KEY, 0)
    y = model(X, rngs=rngs, scale=0.5)

    def noise(i, m):
        key = jax.random.fold_in(jax.random.fold_in(k, i), m)
        return 0.5 * jax.random.normal(nnx.Rngs(key).noise(), (6, 6))

    want = [2 * (X[6 * m :][:6] + noise(0, m)) + noise(2, m) for m in range(2)]
    np.testing.assert_allclose(y, np.concatenate(want), atol=1e-6)
    np.testing.assert_array_equal(model(X), 2 * X)


def test_tuples_dicts_and_shared_params():
    linear = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    layers = [
        lambda a, b: (a, a * b),
        lambda a, b: {"x": a + b},
        lambda x: x,
        linear,
        jnp.sin,
        linear,
    ]

    def loss(model, a, b):
        return model(a, b).sum()

    grad = nnx.jit(nnx.grad(loss))
    want = nnx.to_pure_dict(grad(nnx.Sequential(*layers), X, 2 * X))
    model = OffloadModel(layers).to_host()
    got = nnx.to_pure_dict(grad(model, X, 2 * X))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_bfloat16():
    make = functools.partial(mlp, jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    # Between two slices x is rounded to bfloat16, which XLA may leave out inside a fusion.
    exact = compiled(loss_of, FAST | {"xla_allow_excess_precision": False})
    y, grads, dx, _ = exact(OffloadModel(make(), num_slices=2).to_host(), x)
    assert_same((y, grads, dx), exact(nnx.Sequential(*make()), x)[:3])
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    # Parameters of float32 that are cast on the device.
    model = OffloadModel(mlp(), compute_dtype=jnp.bfloat16).to_host()
    y, grads, dx, _ = train(model, x)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_functional_use_and_a_mesh(mesh8):
    """jax.jit and jax.grad of the state, over eight devices."""
    model = OffloadModel(mlp())
    model.eval()
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
    plain = nnx.Sequential(*mlp())
    plain.eval()
    want = nnx.grad(lambda m: jnp.sin(m(X[:8])).sum())(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
    nnx.update(model, effjax.to_device(params))
    model.to_host()  # stays on all devices
    assert {a.sharding for a in jax.tree.leaves(nnx.state(model, nnx.Param))} == {sharding}


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


def test_parameters_that_are_not_on_the_host():
    model = OffloadModel(mlp())
    with pytest.raises(ValueError, match=r"layers\[0\].*and 15 more are not. Call its to_host\(\)"):
        model(X)
    with pytest.raises(ValueError, match="to_host"):
        nnx.jit(loss_of)(model, X)
    with pytest.raises(ValueError, match="to_host"):
        OffloadModel(transformer().blocks)(X)


@pytest.mark.parametrize(
    ("error", "match", "run"),
    [
        (ValueError, "must not be empty", lambda: OffloadModel([])),
        (TypeError, "modules and functions, not 3", lambda: OffloadModel([nnx.relu, 3])),  # type: ignore[list-item]
        (ValueError, r"`num_microbatches` \(=0\)",
         lambda: OffloadModel(mlp(), num_microbatches=0)),
        (ValueError, r"`num_slices` \(=5\)",
         lambda: OffloadModel(mlp(), num_slices=5).to_host()(X)),
        (ValueError, r"`num_microbatches` \(=5\) must divide the batch",
         lambda: OffloadModel(mlp(), num_microbatches=5).to_host()(X)),
        (TypeError, "no layer of OffloadModel takes `train`",
         lambda: OffloadModel(mlp()).to_host()(X, train=True)),
        (TypeError, "`scale` must be no array",
         lambda: OffloadModel([Noise()])(X, scale=jnp.ones(()))),
        (TypeError, "`rngs` must be an nnx.Rngs", lambda: OffloadModel([Noise()])(X, rngs=3)),
        (TypeError, "needs an input", lambda: OffloadModel([Noise()])()),
        (ValueError, "a Counting changes calls", lambda: OffloadModel([Counting()])(X)),
        (ValueError, "same leading axis", lambda: OffloadModel(Scaled()).to_host()(X)),
        (ValueError, "share the BatchStat",
         lambda: OffloadModel([nnx.BatchNorm(6, rngs=nnx.Rngs(0))] * 2).to_host()(X)),
        (ValueError, "share the RngCount",
         lambda: OffloadModel([nnx.Dropout(0.5, rngs=nnx.Rngs(0))] * 2)(X)),
    ],
)  # fmt: skip
def test_errors(error, match, run):
    with pytest.raises(error, match=match):
        run()
