"""BatchNorm in nnx's transformations; tests/layers has what both flavors share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn import dtypes

from effjax.nnx import BatchNorm

X = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)


def make(cls: Any = BatchNorm, **options):
    return cls(5, rngs=nnx.Rngs(0), **options)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)


def test_states_load_into_flax_and_back():
    options: Any = dict(scale_init=nnx.initializers.normal(), scale_metadata=dict(note="kept"))
    ours, flax_norm = make(**options), make(nnx.BatchNorm, **options)
    ours(X)
    nnx.update(flax_norm, nnx.state(ours))
    nnx.update(ours, nnx.state(flax_norm))
    for a, b in zip(nnx.state(ours).values(), nnx.state(flax_norm).values(), strict=True):
        assert type(a) is type(b) and a.get_metadata() == b.get_metadata()
    ours.eval()
    flax_norm.eval()
    assert_close(ours(X), flax_norm(X))


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


def test_custom_promotion():
    def to_float32(values, *, dtype=None):
        return dtypes.promote_dtype(values, dtype=jnp.float32)

    assert make(promote_dtype=to_float32)(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.float32


class Net(nnx.Module):
    def __init__(self, norm: Any = BatchNorm):
        self.norm = make(norm)
        self.linear = nnx.Linear(5, 5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(self.norm(x))


def loss(model, x):
    return jnp.square(model(x) - x).mean()


def test_under_jit_grad_split_merge_and_remat():
    """Running statistics are updated in every transformation; only Params have gradients."""
    plain, remat, merged = (Net() for _ in range(3))
    grads = nnx.jit(nnx.grad(loss))(plain, X)
    assert set(grads["norm"]) == {"scale", "bias"}
    assert (plain.norm.mean[...] != 0).all()
    again = nnx.jit(nnx.grad(lambda model, x: nnx.remat(loss)(model, x)))(remat, X)
    jax.tree.map(assert_close, again, grads)

    graphdef, state = nnx.split(merged)

    @jax.jit
    def pure(state, x):
        model = nnx.merge(graphdef, state)
        model(x)
        return nnx.state(model)

    nnx.update(merged, pure(state, X))
    for model in remat, merged:
        assert_close(model.norm.mean[...], plain.norm.mean[...])


def test_under_vmap_and_scan():
    """An ensemble of layers, and a stack of layers."""
    create = nnx.vmap(lambda rngs: BatchNorm(5, rngs=rngs))
    layers = create(nnx.Rngs(0).split(2))
    y = nnx.jit(nnx.vmap(lambda layer, x: layer(x)))(layers, np.stack([X, 2 * X]))
    np.testing.assert_allclose(y[0], y[1], atol=1e-5)
    np.testing.assert_allclose(layers.mean[1], 2 * layers.mean[0], rtol=1e-5)

    layers = create(nnx.Rngs(0).split(2))
    scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    y = nnx.jit(scan)(X, layers)
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


def test_tabulate_matches_flax():
    ours, flax = (nnx.tabulate(Net(norm), X) for norm in (BatchNorm, nnx.BatchNorm))
    assert ours == flax


def test_lists_of_axes_are_hashable():
    norm = make(axis_name=["i", "j"], axis=[-1], axis_index_groups=None)
    hash(nnx.graphdef(norm))
