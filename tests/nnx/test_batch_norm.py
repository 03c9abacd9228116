import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn import dtypes

from effjax import linen as effjax_linen
from effjax.nnx import BatchNorm
from tests.tiers import exhaustive

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
MASK = np.random.default_rng(1).random((6, 4, 1)) < 0.6
SAME: dict[str, Any] = dict(atol=2e-6, rtol=2e-6)


def make(cls: Any = BatchNorm, features=5, **options):
    return cls(features, rngs=nnx.Rngs(0), **options)


def test_signature_extends_that_of_flax():
    def arguments(cls):
        skip = ("scale_init", "bias_init")  # equal functions, but other objects
        params = inspect.signature(cls.__init__).parameters.values()
        return [(p.name, p.kind, None if p.name in skip else p.default) for p in params]

    assert arguments(BatchNorm)[: len(arguments(nnx.BatchNorm))] == arguments(nnx.BatchNorm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(axis=1, features=4, momentum=0.9, epsilon=1e-3),
        dict(use_scale=False, dtype=jnp.float32),
        dict(use_bias=False, use_scale=False, use_fast_variance=False),
        dict(scale_init=nnx.initializers.normal(), scale_metadata=dict(note="kept")),
    ],
)
def test_matches_flax(options):
    """Variables, outputs and running statistics match; states load both ways."""
    ours, flax_norm = make(**options), make(nnx.BatchNorm, **options)
    pure = nnx.to_pure_dict(nnx.state(ours))
    want = nnx.to_pure_dict(nnx.state(flax_norm))
    jax.tree.map(np.testing.assert_array_equal, pure, want)
    y = ours(X)
    np.testing.assert_allclose(y, flax_norm(X), **SAME)
    np.testing.assert_allclose(ours.mean[...], flax_norm.mean[...], **SAME)
    np.testing.assert_allclose(ours.var[...], flax_norm.var[...], **SAME)
    nnx.update(flax_norm, nnx.state(ours))
    nnx.update(ours, nnx.state(flax_norm))
    ours.eval()
    flax_norm.eval()
    np.testing.assert_allclose(ours(X), flax_norm(X), **SAME)
    for a, b in zip(nnx.state(ours).values(), nnx.state(flax_norm).values(), strict=True):
        assert type(a) is type(b) and a.get_metadata() == b.get_metadata()


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [("float16", True), *itertools.starmap(exhaustive, [("float16", False), ("float32", True)])],
)
def test_linen_and_nnx_compute_the_same_bits(dtype, masked, optimized):
    mask = np.array([True, False, True, True, False]) if masked else None
    module = effjax_linen.BatchNorm(use_running_average=False, dtype=dtype, param_dtype=jnp.float16)
    variables = module.init(jax.random.key(0), X)
    y, new = module.apply(variables, X, mask=mask, mutable=["batch_stats"])
    norm = make(dtype=dtype, param_dtype=jnp.float16)
    np.testing.assert_array_equal(norm(X, mask=mask), y)
    np.testing.assert_array_equal(norm.mean[...], new["batch_stats"]["mean"])
    np.testing.assert_array_equal(norm.var[...], new["batch_stats"]["var"])


def test_several_feature_axes():
    norm = make(features=20, axis=[-1, 1], momentum=0.5)
    module = effjax_linen.BatchNorm(use_running_average=False, axis=(1, 2), momentum=0.5)
    y, variables = module.init_with_output(jax.random.key(0), X)
    np.testing.assert_allclose(norm(X), y, **SAME)
    new: Any = module.apply(variables, X, mutable=["batch_stats"])[1]
    np.testing.assert_allclose(norm.mean[...], new["batch_stats"]["mean"].ravel(), rtol=1e-5)


def test_modes():
    """train(), eval(), set_attributes, view and the call's argument, as in Flax."""
    norm = make()
    start = norm.mean[...]
    norm.eval()
    norm(X)
    np.testing.assert_array_equal(norm.mean[...], start)
    norm(X, use_running_average=False)
    assert (norm.mean[...] != start).all()
    norm.train()
    assert norm.use_running_average is False
    view = nnx.view(norm, use_running_average=True)
    assert view.use_running_average is True and view.mean is norm.mean
    norm.set_attributes(nnx.BatchNorm, use_running_average=True)
    assert norm.use_running_average is True
    norm.use_running_average = None
    with pytest.raises(ValueError, match="use_running_average"):
        norm(X)


def test_evaluation_of_one_value():
    """A single image, without scale and bias (apex #913, #158)."""
    norm = make(use_scale=False, use_bias=False, axis_name="absent")
    norm.eval()
    np.testing.assert_allclose(norm(X[:1, 0]), X[:1, 0] / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_half_precision_keeps_its_dtype():
    x = jnp.asarray(X, jnp.bfloat16)
    norm = make()
    assert norm(x).dtype == jnp.bfloat16
    assert norm.mean.dtype == norm.var.dtype == jnp.float32

    def to_float32(values, *, dtype=None):
        return dtypes.promote_dtype(values, dtype=jnp.float32)

    assert make(promote_dtype=to_float32)(x).dtype == jnp.float32


def test_unbiased_running_var_residual_and_activation():
    norm = make(momentum=0.0, unbiased_running_var=True, activation="relu")
    residual = np.random.default_rng(3).normal(size=X.shape).astype(np.float32)
    y = norm(X, residual=residual)
    want = (X - X.mean((0, 1))) / np.sqrt(X.var((0, 1)) + 1e-5) + residual
    np.testing.assert_allclose(y, np.maximum(want, 0), atol=1e-5)
    np.testing.assert_allclose(norm.var[...], X.reshape(-1, 5).var(0, ddof=1), rtol=1e-5)


def test_empty_batch_preserves_running_stats():
    norm = make()
    y = norm(X, mask=np.zeros_like(MASK))
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(norm.mean[...], 0)
    np.testing.assert_array_equal(norm.var[...], 1)


def test_rejects_wrong_number_of_features():
    with pytest.raises(ValueError, match=r"\(6, 4, 5\) must have `num_features` \(=4\)"):
        make(features=4, use_scale=False, use_bias=False)(X)


class Net(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm = BatchNorm(5, rngs=rngs, **options)
        self.linear = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


def loss(model, x):
    return jnp.square(model(x) - x).mean()


def test_under_jit_grad_split_merge_and_remat():
    """Running statistics are updated in every transformation; only Params have gradients."""

    @nnx.jit
    def step(model, x):
        return nnx.grad(loss)(model, x)

    plain, remat, merged = (Net(nnx.Rngs(0), axis_index_groups=None) for _ in range(3))
    grads = step(plain, X)
    assert set(grads["norm"]) == {"scale", "bias"}
    assert (plain.norm.mean[...] != 0).all()

    @nnx.jit
    def remat_step(model, x):
        return nnx.grad(lambda m, x: nnx.remat(loss)(m, x))(model, x)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **SAME), remat_step(remat, X), grads)
    np.testing.assert_allclose(remat.norm.mean[...], plain.norm.mean[...], **SAME)

    graphdef, state = nnx.split(merged)

    @jax.jit
    def pure(state, x):
        model = nnx.merge(graphdef, state)
        model(x)
        return nnx.state(model)

    nnx.update(merged, pure(state, X))
    np.testing.assert_allclose(merged.norm.mean[...], plain.norm.mean[...], **SAME)


def test_under_vmap_and_scan():
    """An ensemble of layers, and a stack of layers."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return BatchNorm(5, rngs=rngs)

    layers = create(nnx.Rngs(0).split(2))
    y = nnx.vmap(lambda layer, x: layer(x))(layers, np.stack([X, 2 * X]))
    np.testing.assert_allclose(y[0], y[1], atol=1e-5)
    np.testing.assert_allclose(layers.mean[1], 2 * layers.mean[0], rtol=1e-5)

    layers = create(nnx.Rngs(0).split(2))
    y = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, layers)
    np.testing.assert_allclose(layers.mean[0], 0.01 * X.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(layers.mean[1], 0, atol=1e-6)
    np.testing.assert_allclose(y, make()(X), atol=1e-4)


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_mutable_variables(kind):
    """Variables backed by mutable arrays."""
    with nnx.var_defaults(**{kind: True}):
        norm = make()
    norm(X)
    np.testing.assert_allclose(norm.mean[...], 0.01 * X.mean((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map unchecked", "jit"])
def test_gradients_over_devices(how, mesh8):
    """Loss, gradients and statistics match those of one device with the whole batch."""
    x = np.random.default_rng(4).normal(2, 3, (16, 5)).astype(np.float32)
    reference = Net(nnx.Rngs(0))
    want_loss, want = nnx.value_and_grad(loss)(reference, x)
    axis = None if how == "jit" else "data"
    graphdef, params, stats = nnx.split(Net(nnx.Rngs(0), axis_name=axis), nnx.Param, ...)

    def step(params, stats, x, reduce=lambda value: value):
        def local_loss(params):
            model = nnx.merge(graphdef, params, stats, copy=True)
            return reduce(loss(model, x)), nnx.state(model, nnx.BatchStat)

        (value, new), grads = jax.value_and_grad(local_loss, has_aux=True)(params)
        return value, grads, new

    def pmean(value):
        return jax.lax.pmean(value, "data")

    def reduced(*args):
        value, grads, new = step(*args)
        return pmean(value), pmean(grads), new

    if how == "pmap":
        run = jax.pmap(reduced, axis_name="data", in_axes=(None, None, 0), out_axes=None)
        value, grads, new = run(params, stats, x.reshape(8, 2, 5))
    elif how == "jit":
        x = jax.device_put(x, jax.NamedSharding(mesh8, jax.P("data")))
        value, grads, new = jax.jit(step)(params, stats, x)
    else:
        checked = how == "shard_map"
        run = (lambda *args: step(*args, reduce=pmean)) if checked else reduced
        specs: dict[str, Any] = dict(in_specs=(jax.P(), jax.P(), jax.P("data")), out_specs=jax.P())
        run = jax.shard_map(run, mesh=mesh8, check_vma=checked, **specs)
        value, grads, new = jax.jit(run)(params, stats, x)
    np.testing.assert_allclose(value, want_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, want)
    np.testing.assert_allclose(new["norm"]["mean"][...], reference.norm.mean[...], rtol=1e-5)
    np.testing.assert_allclose(new["norm"]["var"][...], reference.norm.var[...], rtol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_tabulate_matches_flax(train):
    class Net(nnx.Module):
        def __init__(self, norm, rngs):
            self.linear = nnx.Linear(5, 5, rngs=rngs)
            self.norm = norm(5, use_running_average=not train, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    ours, flax = (nnx.tabulate(Net(cls, nnx.Rngs(0)), X) for cls in (BatchNorm, nnx.BatchNorm))
    assert ours == flax


def test_lists_of_axes_are_hashable():
    norm = make(axis_name=["i", "j"], axis=[-1], axis_index_groups=None)
    hash(nnx.graphdef(norm))
