"""MSDeformAttn and DCNv3 of linen and nnx, against their formulas and each other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effjax
import effjax.linen
import effjax.nnx
from effjax import convert
from tests.contexts import assert_trees_close
from tests.tiers import vary

SHAPES = (4, 5), (2, 3)
SIZES: Any = dict(features=12, num_levels=2, num_heads=3, num_points=2)


def inputs(boxes=False):
    rng = np.random.default_rng(0)
    reference = rng.uniform(size=(2, 7, 2, 4 if boxes else 2))
    arrays = rng.normal(size=(2, 7, 12)), reference, rng.normal(size=(2, 26, 12))
    query, reference, value = (jnp.asarray(a, jnp.float32) for a in arrays)
    return query, reference, value, SHAPES, jnp.asarray(rng.uniform(size=(2, 26)) < 0.2)


def perturbed(module):
    """Make every parameter nonzero."""
    rng = np.random.default_rng(1)
    more = lambda a: a + np.asarray(0.1 * rng.normal(size=a.shape), a.dtype)  # noqa: E731
    nnx.update(module, jax.tree.map(more, nnx.state(module, nnx.Param)))
    return module


@functools.cache
def attention():
    return perturbed(nnx.jit(lambda: effjax.nnx.MSDeformAttn(**SIZES, rngs=nnx.Rngs(0)))())


def by_formula(module, query, reference, value, shapes, padding):
    heads, levels, points = 3, 2, 2
    linear = lambda layer, x: x @ layer.kernel[...] + layer.bias[...]  # noqa: E731
    value = jnp.where(padding[..., None], 0, linear(module.value_proj, value))
    offsets = linear(module.sampling_offsets, query).reshape(2, 7, heads, levels, points, 2)
    weights = linear(module.attention_weights, query).reshape(2, 7, heads, levels * points)
    weights = jax.nn.softmax(weights).reshape(offsets.shape[:-1])
    own = reference[:, :, None, :, None]
    if reference.shape[-1] == 2:
        at = own + offsets / jnp.asarray([(w, h) for h, w in shapes])[:, None]
    else:
        at = own[..., :2] + offsets / points * own[..., 2:] * 0.5
    y = effjax.ms_deform_attn(value.reshape(2, 26, heads, 4), shapes, at, weights)
    return linear(module.output_proj, y)


@vary("boxes", [True, False])
def test_attention(boxes):
    """Both flavors follow the formula and ignore values in the padding."""
    query, reference, value, shapes, padding = inputs(boxes)
    args = query, reference, jnp.where(padding[..., None], jnp.nan, value), shapes, padding
    module = attention()
    y, want = nnx.jit(lambda module: (module(*args), by_formula(module, *args)))(module)
    assert_trees_close(y, want, 1e-5)
    layer = effjax.linen.MSDeformAttn(**SIZES)
    like = jax.eval_shape(lambda *a: layer.init(jax.random.key(0), *a, SHAPES), *args[:3])
    variables = convert.from_torch(convert.to_torch(module), like)
    assert_trees_close(jax.jit(lambda v: layer.apply(v, *args))(variables), y, 1e-6)


def test_attention_initialization():
    """Weights are equal; point p of a head lies p + 1 pixels away in the direction of the head."""
    sizes: Any = dict(features=8, num_levels=2, num_heads=4, num_points=3)
    module = effjax.nnx.MSDeformAttn(**sizes, rngs=nnx.Rngs(0))
    way = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])
    want = way[:, None, None] * np.arange(1, 4)[:, None] + np.zeros((4, 2, 3, 2))
    layer = effjax.linen.MSDeformAttn(**sizes)
    args = jnp.ones((1, 2, 8)), jnp.ones((1, 2, 2, 2)), jnp.ones((1, 5, 8)), ((2, 2), (1, 1))
    params = jax.jit(layer.init, static_argnums=4)(jax.random.key(0), *args)["params"]
    for bias in module.sampling_offsets.bias[...], params["sampling_offsets"]["bias"]:
        np.testing.assert_allclose(bias.reshape(want.shape), want, atol=1e-6)
    for name in ("sampling_offsets", "attention_weights"):
        assert not np.any(params[name]["kernel"])


def test_attention_gradients_in_bfloat16():
    args = inputs()
    options: Any = dict(**SIZES, dtype=jnp.bfloat16)
    module = nnx.eval_shape(lambda: effjax.nnx.MSDeformAttn(**options, rngs=nnx.Rngs(0)))
    nnx.update(module, nnx.state(attention(), nnx.Param))

    @nnx.jit
    @nnx.grad
    def gradients(module):
        y = module(*args)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32) ** 2)

    leaves = jax.tree.leaves(gradients(module))
    assert len(leaves) == 8 and all(a.dtype == jnp.float32 and np.any(a) for a in leaves)


def test_empty_batch_and_no_queries():
    query, reference, value, shapes, _ = inputs()
    images = jnp.zeros((0, 6, 5, 8))

    @jax.jit
    def run():
        no_queries = attention()(query[:, :0], reference[:, :0], value, shapes)
        no_images = attention()(query[:0], reference[:0], value[:0], shapes)
        return no_queries, no_images, effjax.nnx.DCNv3(8, rngs=nnx.Rngs(0))(images)

    assert [y.shape for y in run()] == [(2, 0, 12), (0, 7, 12), images.shape]


def test_dcnv3():
    options: Any = dict(
        dw_kernel_size=5, kernel_dilation=2, offset_groups=2, offset_scale=1.5,
        center_feature_scale=True, remove_center=True,
    )  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 5, 8)), jnp.float32)
    module = perturbed(nnx.jit(lambda: effjax.nnx.DCNv3(8, **options, rngs=nnx.Rngs(0)))())

    def loss(module):
        y = module(x)
        return jnp.sum(y**2), y

    gradients, y = nnx.jit(nnx.grad(loss, has_aux=True))(module)
    assert y.shape == x.shape and all(np.any(a) for a in jax.tree.leaves(gradients))
    layer = effjax.linen.DCNv3(8, **options)
    shapes = jax.eval_shape(lambda x: layer.init(jax.random.key(0), x), x)
    named = convert.to_torch(module, convert.DCNV3)
    assert {"dw_conv.0.weight", "dw_conv.1.1.weight", "mask.weight"} <= set(named)
    variables = convert.from_torch(named, shapes, convert.DCNV3)
    assert_trees_close(jax.jit(layer.apply)(variables, x), y, 1e-5)


@pytest.mark.exhaustive
def test_dcnv3_starts_as_a_mean():
    """Initial offsets are zero and weights equal."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 5, 4)), jnp.float32)
    module = effjax.nnx.DCNv3(4, rngs=nnx.Rngs(0))
    projected = np.pad(module.input_proj(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    mean = sum(projected[:, i : i + 5, j : j + 5] for i in range(3) for j in range(3)) / 9
    assert_trees_close(module(x), module.output_proj(mean), 1e-5)


@pytest.mark.parametrize("name", ["MSDeformAttn", "DCNv3"])
def test_precision(name):
    """Both flavors take all forms, and JAX reports a wrong one."""
    options, args = {"features": 12}, [jnp.ones((1, 5, 5, 12))]
    if name == "MSDeformAttn":
        options, args = SIZES, inputs()[:4]

    def run_nnx(precision):
        make = functools.partial(getattr(effjax.nnx, name), **options, precision=precision)
        return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))(*args))

    def run_linen(precision):
        module = getattr(effjax.linen, name)(**options, precision=precision)
        return jax.eval_shape(lambda: module.init(jax.random.key(0), *args))

    for run in run_nnx, run_linen:
        for precision in ("highest", jax.lax.Precision.HIGH, ("high", "default"), "F32_F32_F32"):
            run(precision)
        with pytest.raises(ValueError, match="but got hihg"):
            run("hihg")
