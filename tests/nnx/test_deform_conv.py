import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx

X = jax.random.normal(jax.random.key(0), (2, 6, 7, 4))
OPTIONS = dict(
    strides=(2, 1), kernel_dilation=(1, 2), feature_group_count=2, offset_groups=2,
)  # fmt: skip
PACKS = [effjax.nnx.DeformConvPack, effjax.nnx.ModulatedDeformConvPack]


def pack(cls, **options):
    return cls(4, 6, (3, 2), **OPTIONS | options, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("cls", PACKS)
@pytest.mark.parametrize("padding", ["SAME", "VALID", 2, ((1, 0), (2, 3))])
def test_starts_as_a_convolution(cls, padding):
    """Offsets are zero and masks one half, whatever the geometry."""
    layer = pack(cls, padding=padding)
    plain = nnx.Conv(
        4, 6, (3, 2), (2, 1), kernel_dilation=(1, 2), feature_group_count=2,
        padding=padding if padding != 2 else (2, 2), rngs=nnx.Rngs(1),
    )  # fmt: skip
    plain.kernel[...] = layer.kernel[...]
    weight = 0.5 if layer.modulated else 1.0
    np.testing.assert_allclose(layer(X), weight * plain(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", PACKS)
def test_offsets_learn(cls):
    layer = pack(cls)
    grads = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(X))))(layer)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    assert layer.offset_conv.kernel.shape == (3, 2, 4, 2 * 6 * (3 if layer.modulated else 2))


def test_given_offsets_and_masks():
    layer = effjax.nnx.ModulatedDeformConv(4, 6, 3, rngs=nnx.Rngs(0))
    offset = jax.random.normal(jax.random.key(1), (2, 6, 7, 18))
    mask = jax.random.uniform(jax.random.key(2), (2, 6, 7, 9))
    want = effjax.deform_conv2d(X, offset, layer.kernel[...], mask, layer.bias[...], padding="SAME")
    np.testing.assert_array_equal(layer(X, offset, mask), want)
    first = effjax.nnx.DeformConv(4, 6, 3, use_bias=False, rngs=nnx.Rngs(0))
    want = effjax.deform_conv2d(X, offset, first.kernel[...], padding="SAME")
    np.testing.assert_array_equal(first(X, offset), want)


def test_half_precision_keeps_float32_offsets():
    layer = pack(effjax.nnx.ModulatedDeformConvPack, dtype=jnp.bfloat16)
    offset, mask = layer.offset_and_mask(X)
    assert offset.dtype == mask.dtype == jnp.float32
    assert layer(X).dtype == jnp.bfloat16 and layer.kernel.dtype == jnp.float32


def test_dfconv2d():
    for modulated in (False, True):
        layer = effjax.nnx.DFConv2d(4, 6, modulated=modulated, kernel_dilation=2, rngs=nnx.Rngs(0))
        assert layer(X).shape == (2, 6, 7, 6)
        assert layer.conv.bias is None and layer.conv.modulated is modulated
    assert effjax.nnx.DFConv2d(4, 6, 3, 2, rngs=nnx.Rngs(0))(X).shape == (2, 3, 4, 6)


@pytest.mark.parametrize("modulated", [False, True])
def test_linen_is_the_same(modulated):
    layer = pack(PACKS[modulated])
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    params = jax.tree.map(lambda p: p + 0.1, params)
    nnx.update(layer, params)
    cls = effjax.linen.ModulatedDeformConvPack if modulated else effjax.linen.DeformConvPack
    other = cls(6, (3, 2), **OPTIONS)
    assert jax.tree.map(jnp.shape, other.init(jax.random.key(0), X)) == {
        "params": jax.tree.map(jnp.shape, params)
    }
    np.testing.assert_allclose(other.apply({"params": params}, X), layer(X), rtol=1e-5, atol=1e-6)


def test_linen_of_given_offsets_and_dfconv2d():
    offset = jax.random.normal(jax.random.key(1), (2, 6, 7, 18))
    mask = jax.random.uniform(jax.random.key(2), (2, 6, 7, 9))
    layer = effjax.linen.ModulatedDeformConv(6, 3)
    y, variables = layer.init_with_output(jax.random.key(0), X, offset, mask)
    want = effjax.deform_conv2d(
        X, offset, variables["params"]["kernel"], mask, variables["params"]["bias"], padding="SAME"
    )
    np.testing.assert_array_equal(y, want)
    first = effjax.linen.DeformConv(6, 3)
    assert first.init_with_output(jax.random.key(0), X, offset)[0].shape == (2, 6, 7, 6)
    layer = effjax.linen.DFConv2d(6, options={"offset_groups": 2})
    y, variables = layer.init_with_output(jax.random.key(0), X)
    assert y.shape == (2, 6, 7, 6)
    assert sorted(variables["params"]["conv"]) == ["kernel", "offset_conv"]


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"`in_features` \(=4\) must be a multiple of `feature_group_count` \(=3\)",
         {"feature_group_count": 3}),
        (r"`offset_groups` \(=0\)", {"offset_groups": 0}),
        (r"`kernel_dilation` \(=0\)", {"kernel_dilation": 0}),
    ],
)  # fmt: skip
def test_bad_options(match, options):
    with pytest.raises(ValueError, match=match):
        pack(effjax.nnx.DeformConvPack, **options)(X)
