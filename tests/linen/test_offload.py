import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

import effjax
import effjax.linen
from effjax.linen import OffloadModel

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(8, 6, 6, 2)).astype(np.float32)
KEY = jax.random.key(5)
FAST: Any = {"xla_backend_optimization_level": 0}


class Block(nn.Module):
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, deterministic=False):
        h = nn.LayerNorm(param_dtype=self.param_dtype)(x)
        h = nn.gelu(nn.Dense(12, param_dtype=self.param_dtype)(h))
        h = nn.Dense(6, param_dtype=self.param_dtype)(h)
        return x + nn.Dropout(0.3, deterministic=deterministic)(h)


class Normed(nn.Module):
    """Dropout and batch norm, as a layer of a stack."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(6)(x))
        return x + nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


def mlp(dtype=jnp.float32):
    return [Block(dtype) for _ in range(3)]


class Flatten(nn.Module):
    def __call__(self, x):
        return x.reshape(x.shape[0], -1)


def cnn(norm=nn.BatchNorm, momentum: Any = 0.9):
    options: dict[str, Any] = dict(use_running_average=False, momentum=momentum)
    return [
        nn.Conv(5, (3, 3)),
        norm(**options),
        nn.relu,
        nn.Sequential([nn.Conv(3, (3, 3), strides=2), norm(**options)]),
        Flatten(),
        nn.Dropout(0.3, deterministic=False),
        nn.Dense(4),
    ]


@functools.cache
def variables_of(make):
    """Those of the unwrapped model."""
    module = nn.Sequential(make())
    x = IMAGES if make is not mlp and make is not bfloat16 else X
    return jax.jit(module.init, compiler_options=FAST)({"params": KEY, "dropout": KEY}, x)


def bfloat16():
    return mlp(jnp.bfloat16)


def on_host(variables):
    return {**variables, "params": effjax.to_host(variables["params"])}


def train(module, variables, x, options=FAST, **kwargs):
    """Output, gradients of the parameters and of x, new running statistics."""

    @functools.partial(jax.jit, compiler_options=options)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(params, x):
        y, new = module.apply(
            {**variables, "params": params}, x, rngs={"dropout": KEY}, mutable=["batch_stats"],
            **kwargs,
        )  # fmt: skip
        return jnp.sin(y.astype(jnp.float32)).sum(), (y, new)

    (_, (y, new)), (grads, dx) = run(variables["params"], x)
    return y, grads, dx, new


@functools.cache
def unwrapped(make):
    return train(nn.Sequential(make()), variables_of(make), IMAGES if make is cnn else X)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


@pytest.mark.parametrize("make", [mlp, cnn])
def test_same_variables_from_the_same_key(make):
    x = IMAGES if make is cnn else X
    init = jax.jit(OffloadModel(make()).init, compiler_options=FAST)
    assert_same(init({"params": KEY, "dropout": KEY}, x), variables_of(make))


@pytest.mark.parametrize("options", [{}, {"num_slices": 2, "checkpoint_activation": False}])
def test_blocks_with_dropout_as_unwrapped(options):
    results = train(OffloadModel(mlp(), **options), on_host(variables_of(mlp)), X)
    assert_same(results, unwrapped(mlp))
    assert kinds(results[1]) == {"pinned_host"}
    assert kinds(results[2]) == {"device"}


@pytest.mark.parametrize("num_slices", [None, 3])
def test_cnn_with_batch_norm_as_unwrapped(num_slices):
    results = train(OffloadModel(cnn(), num_slices=num_slices), on_host(variables_of(cnn)), IMAGES)
    assert_same(results, unwrapped(cnn))
    assert np.any(results[3]["batch_stats"]["layers_1"]["mean"] != 0)
    assert kinds(results[3]) == {"device"}


@pytest.mark.parametrize(("num_microbatches", "num_slices"), [(3, 2)])
def test_microbatches_draw_their_own_dropout(num_microbatches, num_slices):
    """Microbatch m is the unwrapped model with the key fold_in(key, m)."""
    model = OffloadModel(mlp(), num_slices, num_microbatches=num_microbatches)
    variables = variables_of(mlp)
    got = train(model, on_host(variables), X)

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def reference(params, x):
        parts = [
            nn.Sequential(mlp()).apply(
                {"params": params}, part, rngs={"dropout": jax.random.fold_in(KEY, m)}
            )
            for m, part in enumerate(jnp.split(x, num_microbatches))
        ]
        y: Any = jnp.concatenate(parts)  # type: ignore[arg-type]
        return jnp.sin(y).sum(), y

    (_, y), (grads, dx) = reference(variables["params"], X)
    assert_same(got[:3], (y, grads, dx))


def flax_norm():
    return cnn()


def effjax_norm():
    return cnn(effjax.linen.BatchNorm, None)


@pytest.mark.parametrize("make", [flax_norm, effjax_norm])
def test_running_statistics_are_updated_once_by_the_mean_of_microbatches(make):
    variables = variables_of(make)
    *_, new = train(OffloadModel(make(), num_microbatches=4), on_host(variables), IMAGES)
    stats = new["batch_stats"]["layers_1"]
    maps = nn.Conv(5, (3, 3)).apply({"params": variables["params"]["layers_0"]}, IMAGES)
    maps = np.asarray(maps).reshape(4, -1, 5)
    mean, var = maps.mean((0, 1)), maps.var(1).mean(0)
    if make is flax_norm:
        mean, var = 0.1 * mean, 0.9 + 0.1 * var
    else:
        np.testing.assert_array_equal(stats["num_batches"], 1)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-4, atol=1e-6)


def test_effjax_batch_norm_as_unwrapped():
    variables = variables_of(effjax_norm)
    got = train(OffloadModel(effjax_norm()), on_host(variables), IMAGES)
    assert_same(got, train(nn.Sequential(effjax_norm()), variables, IMAGES))


def test_train_and_eval():
    """Flags of the call go to the layers that take them."""
    layers = [nn.Dense(6), nn.BatchNorm(), nn.relu, Block(), nn.Dropout(0.5)]
    model = OffloadModel(layers)
    on: Any = dict(use_running_average=False, deterministic=False)
    off: Any = dict(use_running_average=True, deterministic=True)
    variables: Any = jax.jit(functools.partial(model.init, **off), compiler_options=FAST)(KEY, X)
    with pytest.raises(ValueError, match=r'effjax.to_host\(variables\["params"\]\)'):
        model.apply(variables, X, **off)
    host = on_host(variables)
    rngs = {"dropout": KEY}
    y, new = model.apply(host, X, rngs=rngs, mutable=["batch_stats"], **on)
    assert np.any(new["batch_stats"]["layers_1"]["mean"] != 0)
    host = {**host, **new}
    y = jax.jit(lambda v: model.apply(v, X, **off))(host)
    x: Any = X
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            own = {k: effjax.to_device(v[f"layers_{i}"]) for k, v in host.items()
                   if f"layers_{i}" in v}  # fmt: skip
            flag = [{}, {"use_running_average": True}, {}, *[{"deterministic": True}] * 2][i]
            x = layer.apply(own, x, **flag)
        else:
            x = layer(x)
    np.testing.assert_allclose(y, x, atol=1e-6)
    with pytest.raises(Exception, match="batch_stats"):
        model.apply(host, X, rngs=rngs, **on)  # not mutable


def test_checkpoints_load_both_ways():
    variables = variables_of(cnn)
    model = OffloadModel(cnn())
    other = jax.tree.map(jnp.zeros_like, variables)
    loaded: Any = serialization.from_bytes(other, serialization.to_bytes(variables))
    got = train(model, on_host(loaded), IMAGES)
    assert_same(got, unwrapped(cnn))
    assert_same(serialization.from_bytes(other, serialization.to_bytes(on_host(loaded))), variables)
    wrapped = OffloadModel(nn.Sequential(mlp()))
    assert_same(train(wrapped, on_host(variables_of(mlp)), X), unwrapped(mlp))


class Scanned(nn.Module):
    """The unwrapped stack."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            lambda layer, x, _: (layer(x), None), {"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True}, length=4,
        )  # fmt: skip
        return layers(Normed(name="layers"), x, None)[0]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_stack(num_microbatches):
    """The variables of nn.scan; a loop with fold_in(fold_in(key, layer), microbatch)."""
    rngs = {"params": KEY, "dropout": KEY}
    variables = jax.jit(Scanned().init, compiler_options=FAST)(rngs, X)
    model = OffloadModel(Normed(), num_layers=4, num_slices=2, num_microbatches=num_microbatches)
    assert_same(jax.jit(model.init, compiler_options=FAST)(rngs, X), variables)
    got = train(model, on_host(variables), X)
    assert kinds(got[1]) == {"pinned_host"}

    class Layer(nn.Module):
        """What folds the name of the stack into the key."""

        @nn.compact
        def __call__(self, x):
            return Normed(name="layers")(x)

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def reference(params, x):
        parts, stats = [], []
        for m, part in enumerate(jnp.split(x, num_microbatches)):

            def body(x, at):
                own, i = at
                key = jax.random.fold_in(jax.random.fold_in(KEY, i), m)  # noqa: B023
                return Layer().apply(own, x, rngs={"dropout": key}, mutable=["batch_stats"])

            at = {**variables, "params": params}, jnp.arange(4)
            part, new = jax.lax.scan(body, part, at)
            parts.append(part)
            stats.append(new)
        y = jnp.concatenate(parts)
        return jnp.sin(y).sum(), (y, jax.tree.map(lambda *a: sum(a) / len(a), *stats))

    (_, (y, new)), (grads, dx) = reference(variables["params"], X)
    assert_same(got[:3], (y, grads, dx))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[3], new)
    if num_microbatches == 1:
        assert_same(got[3], new)
        y: Any = model.apply(on_host(variables), X, train=False)
        assert np.isfinite(y).all()


def test_inside_another_module():
    """Names and keys of the module around it."""

    class Outer(nn.Module):
        wrap: Any

        def setup(self):
            self.first = nn.Dense(6)
            self.body = self.wrap(mlp())
            self.last = nn.Dense(2)

        def __call__(self, x):
            return self.last(self.body(self.first(x)))

    rngs = {"params": KEY, "dropout": KEY}
    variables = jax.jit(Outer(nn.Sequential).init, compiler_options=FAST)(rngs, X)
    assert_same(jax.jit(Outer(OffloadModel).init, compiler_options=FAST)(rngs, X), variables)
    params = {
        name: p if name in ("first", "last") else effjax.to_host(p)
        for name, p in variables["params"].items()
    }
    got = train(Outer(OffloadModel), {"params": params}, X)
    assert_same(got, train(Outer(nn.Sequential), variables, X))


def test_a_module_that_is_in_the_list_twice():
    dense, drop = nn.Dense(6), nn.Dropout(0.5, deterministic=False)
    model, plain = (cls([dense, drop, dense, drop]) for cls in (OffloadModel, nn.Sequential))
    x = jnp.ones_like(X)
    variables = plain.init({"params": KEY, "dropout": KEY}, x)
    assert_same(model.init({"params": KEY, "dropout": KEY}, x), variables)
    eye = jax.tree.map(lambda a: jnp.eye(6) if a.ndim == 2 else a, variables)
    y = model.apply(on_host(eye), x, rngs={"dropout": KEY})
    assert len(np.unique(np.asarray(y))) == 2  # 0 and 4
    assert 0.1 < np.mean(np.asarray(y) == 4) < 0.4  # two masks


def test_tuples_and_dicts():
    layers = [lambda a, b: (a, a * b), lambda a, b: {"inputs": a + b}, nn.Dense(3)]
    model, plain = OffloadModel(layers), nn.Sequential(layers)
    variables = plain.init(KEY, X, X)
    want: Any = plain.apply(variables, X, X)
    y: Any = model.apply(on_host(variables), X, X)
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_bfloat16():
    variables, x = variables_of(bfloat16), jnp.asarray(X, jnp.bfloat16)
    # Between two slices x is rounded to bfloat16, which XLA may leave out inside a fusion.
    exact = functools.partial(train, x=x, options=FAST | {"xla_allow_excess_precision": False})
    got = exact(OffloadModel(bfloat16()), on_host(variables))
    assert_same(got, exact(nn.Sequential(bfloat16()), variables))
    assert {a.dtype for a in jax.tree.leaves(got[1])} == {jnp.dtype("bfloat16")}
    # Parameters of float32 that are cast on the device.
    model = OffloadModel(mlp(), compute_dtype=jnp.bfloat16)
    y, grads, dx, _ = train(model, on_host(variables_of(mlp)), x)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def apply(module, x=X, make=mlp, **kwargs):
    return module.apply(on_host(variables_of(make)), x, rngs={"dropout": KEY}, **kwargs)


@pytest.mark.parametrize(
    ("error", "match", "run"),
    [
        (ValueError, "at least one", lambda: OffloadModel([]).init(KEY, X)),
        (ValueError, "modules and functions", lambda: OffloadModel([3]).init(KEY, X)),  # type: ignore[list-item]
        (ValueError, r"`num_layers` \(=None\)", lambda: OffloadModel(Block()).init(KEY, X)),
        (ValueError, r"`num_layers` \(=3\)", lambda: OffloadModel([], num_layers=3).init(KEY, X)),
        (ValueError, r"`num_microbatches` \(=0\)",
         lambda: apply(OffloadModel(mlp(), num_microbatches=0))),
        (ValueError, r"`num_microbatches` \(=5\) must divide the batch",
         lambda: apply(OffloadModel(mlp(), num_microbatches=5))),
        (ValueError, r"`num_slices` \(=4\)", lambda: apply(OffloadModel(mlp(), num_slices=4))),
        (TypeError, "no layer of OffloadModel takes `train`",
         lambda: apply(OffloadModel(mlp()), train=True)),
        (TypeError, "needs an input", lambda: OffloadModel(mlp()).init(KEY)),
    ],
)  # fmt: skip
def test_errors(error, match, run):
    with pytest.raises(error, match=match):
        run()


def test_shared_running_statistics_are_refused():
    norm = nn.BatchNorm(use_running_average=False)
    model = OffloadModel([norm, norm])
    variables = model.init(KEY, X)
    with pytest.raises(ValueError, match="layer 1 is in the list twice, a BatchNorm"):
        model.apply(on_host(variables), X, mutable=["batch_stats"])
