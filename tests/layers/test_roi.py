"""Box pooling layers of linen and nnx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from tests.layers.functional import from_linen, from_nnx
from tests.tiers import vary

X = jax.random.normal(jax.random.key(0), (2, 6, 7, 4))
BOXES = jnp.array([[[1, 2, 9, 8], [0, 0, 13, 11.0]], [[3, 2, 8, 9], [np.nan] * 4]])
OPTIONS = dict(spatial_scale=0.5, sampling_ratio=2, gamma=0.2)


def nnx_layer(name, **options):
    if name != "DeformRoIPool":
        options |= dict(output_channels=4, deform_fc_channels=16, rngs=nnx.Rngs(1))
    return from_nnx(getattr(effjax.nnx, name)((2, 3), **options))


def linen_layer(name, **options):
    if name != "DeformRoIPool":
        options |= dict(deform_fc_channels=16)
    return from_linen(getattr(effjax.linen, name)((2, 3), **options), X, BOXES)


def predict(params, x):
    """Apply the fully connected layers to features [N, R, F]."""
    linear = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]  # noqa: E731
    hidden = nnx.relu(linear("offset_fc2", nnx.relu(linear("offset_fc1", x))))
    mask = 1.0
    if "mask_fc1" in params:
        mask = jax.nn.sigmoid(linear("mask_fc2", nnx.relu(linear("mask_fc1", x))))
        mask = mask.reshape(2, 2, 2, 3, 1)
    return jnp.moveaxis(linear("offset_fc3", hidden).reshape(2, 2, 2, 2, 3), 2, -1), mask


@vary(
    ("make", "name"),
    [(linen_layer, "ModulatedDeformRoIPoolPack"), (nnx_layer, "DeformRoIPoolPack")],
)
def test_packs(make, name):
    """They start as RoIAlign, with masks of one half, follow the formula and have gradients."""
    layer = make(name, **OPTIONS)
    pool = functools.partial(effjax.deform_roi_pool, output_size=(2, 3), **OPTIONS)
    aligned = effjax.roi_align(X, BOXES, output_size=(2, 3), spatial_scale=0.5, sampling_ratio=2)

    @jax.jit
    def by_formula(params):
        offset, mask = predict(params, jnp.moveaxis(pool(X, BOXES), -1, 2).reshape(2, 2, -1))
        return pool(X, BOXES, offset) * mask

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(params):
        y = layer.apply(params, X, BOXES)
        return jnp.sum(jnp.sin(y)), y

    start = 0.5 if "Modulated" in name else 1.0
    np.testing.assert_allclose(gradients(layer.params)[1], start * aligned, atol=1e-6)
    wave = lambda p: 0.1 * np.sin(np.arange(p.size, dtype=np.float32)).reshape(p.shape)  # noqa: E731
    params = jax.tree.map(lambda p: np.asarray(p) + wave(p), layer.params)
    grads, got = gradients(params)
    np.testing.assert_allclose(got, by_formula(params), atol=1e-5)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_given_offsets(make):
    layer = make("DeformRoIPool", **OPTIONS)
    offset = jnp.ones((2, 2, 2, 3, 2))
    for given in ((), (offset,)):
        want = effjax.deform_roi_pool(X, BOXES, *given, output_size=(2, 3), **OPTIONS)
        np.testing.assert_array_equal(layer.apply(layer.params, X, BOXES, *given), want)


def test_linen_and_nnx_have_the_same_parameters_in_half_precision():
    layers = [
        make("ModulatedDeformRoIPoolPack", dtype=jnp.bfloat16, **OPTIONS)
        for make in (nnx_layer, linen_layer)
    ]
    shapes = [jax.tree.map(jnp.shape, dict(layer.params)) for layer in layers]
    assert shapes[0] == shapes[1]
    for layer in layers:
        y = jax.eval_shape(layer.apply, layer.params, X.astype(jnp.bfloat16), BOXES)
        assert y.dtype == jnp.bfloat16
