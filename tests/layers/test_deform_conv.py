"""Deformable convolution layers of linen and nnx."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from tests.contexts import assert_trees_close
from tests.layers.functional import from_linen, from_nnx
from tests.tiers import vary

X = jax.random.normal(jax.random.key(0), (2, 6, 7, 4))
OFFSET = jax.random.normal(jax.random.key(1), (2, 6, 7, 18))
MASK = jax.random.uniform(jax.random.key(2), (2, 6, 7, 9))
OPTIONS: dict[str, Any] = dict(
    strides=(2, 1), kernel_dilation=(1, 2), feature_group_count=2, offset_groups=2,
)  # fmt: skip
PACK = dict(predict_offset=True)  # DeformConvPack; with MODULATED ModulatedDeformConvPack
MODULATED = dict(modulated=True)


def nnx_layer(*args, kernel_size: Any = 3, **options):
    return from_nnx(effjax.nnx.DeformConv(4, 6, kernel_size, **options, rngs=nnx.Rngs(1)))


def linen_layer(*args, kernel_size: Any = 3, **options):
    return from_linen(effjax.linen.DeformConv(6, kernel_size, **options), *args)


both = pytest.mark.parametrize("make", [nnx_layer, linen_layer])


@vary(
    ("make", "modulated", "padding"),
    [
        (linen_layer, True, ((1, 0), (2, 3))),
        (nnx_layer, False, "SAME"),
        (linen_layer, False, 2),
    ],
)
def test_starts_as_a_convolution(make, modulated, padding):
    """Initial offsets are zero and masks one half."""
    options = OPTIONS | dict(kernel_size=(3, 2))
    layer = make(X, **options, **PACK, modulated=modulated, padding=padding)
    plain = nnx.Conv(
        4, 6, (3, 2), (2, 1), kernel_dilation=(1, 2), feature_group_count=2,
        padding=padding if padding != 2 else (2, 2), rngs=nnx.Rngs(1),
    )  # fmt: skip
    plain.kernel[...] = layer.params["kernel"]
    got, want = jax.jit(lambda params: (layer.apply(params, X), plain(X)))(layer.params)
    want = 0.5 * want if modulated else want
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@both
def test_given_offsets_and_masks(make):
    layer = make(X, OFFSET, MASK, **MODULATED)
    kernel, bias = layer.params["kernel"], layer.params["bias"]
    want = effjax.deform_conv2d(X, OFFSET, kernel, MASK, bias, padding="SAME")
    np.testing.assert_array_equal(layer.apply(layer.params, X, OFFSET, MASK), want)
    first = make(X, OFFSET, use_bias=False)
    assert list(first.params) == ["kernel"]
    want = effjax.deform_conv2d(X, OFFSET, first.params["kernel"], padding="SAME")
    np.testing.assert_array_equal(first.apply(first.params, X, OFFSET), want)


@both
def test_half_precision(make):
    """Only the output has `dtype`, neither parameters nor predicted offsets."""
    options: Any = dict(**OPTIONS, **PACK, **MODULATED, dtype=jnp.bfloat16)
    layer = make(X, **options)
    y: Any = jax.eval_shape(layer.apply, layer.params, X)
    assert y.dtype == jnp.bfloat16 and layer.params["kernel"].dtype == jnp.float32
    model = effjax.nnx.DeformConv(4, 6, 3, **options, rngs=nnx.Rngs(1))
    offset, mask = jax.eval_shape(model.offset_and_mask, X)
    assert offset.dtype == mask.dtype == jnp.float32


@both
def test_rejects_offset_and_mask_that_do_not_fit_the_options(make):
    for layer, args, match in (
        (make(X, OFFSET), (), "`offset` and no `mask`"),
        (make(X, OFFSET), (OFFSET, MASK), "`offset` and no `mask`"),
        (make(X, **PACK), (OFFSET,), "neither `offset` nor `mask`"),
    ):
        with pytest.raises(ValueError, match=match):
            layer.apply(layer.params, X, *args)


def test_linen_equals_nnx():
    """They have the same parameters, outputs and gradients, which are nonzero."""
    options = dict(**OPTIONS, **PACK, **MODULATED, kernel_size=(3, 2))
    layers = [make(X, **options) for make in (nnx_layer, linen_layer)]
    params = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.1), layers[0].params)
    assert jax.tree.map(jnp.shape, layers[1].params) == jax.tree.map(jnp.shape, params)
    assert params["offset_conv"]["kernel"].shape == (3, 2, 4, 2 * 6 * 3)

    def gradient(layer):
        loss = lambda params: jnp.sum(jnp.sin(layer.apply(params, X)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    got, want = map(gradient, layers)
    assert_trees_close(got, want, 1e-5)
    assert all(np.any(g) for g in jax.tree.leaves(want))
