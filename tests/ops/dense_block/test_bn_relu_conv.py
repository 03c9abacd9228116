"""bn_relu_conv: numerics, residuals and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from effjax import bn_relu_conv
from tests.contexts import assert_trees_close, single_device
from tests.ops.dense_block.cases import CONVS, make_conv
from tests.programs import collective_sizes

pytestmark = pytest.mark.usefixtures("x64")


def test_half_precision_gradient_sums_to_zero():
    """The gradient of x has mean 0 even where the incoming gradient is constant over an image."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 8, 8, 16)), jnp.bfloat16)
    scale, bias = jnp.ones(16), jnp.full(16, 5.0)
    kernel = jnp.asarray(rng.normal(size=(1, 1, 16, 16)) / 4, jnp.bfloat16)
    weights = jnp.asarray(1 + 0.02 * rng.normal(size=(8, 1, 1, 16)), jnp.bfloat16)

    def loss(x):
        y, statistics = bn_relu_conv(x, scale, bias, kernel)
        assert y.dtype == jnp.bfloat16 and statistics.mean.dtype == jnp.float32
        return jnp.sum((y * weights).astype(jnp.float32))

    dx = jax.jit(jax.grad(loss))(x).astype(jnp.float32)
    assert jnp.abs(dx.sum((0, 1, 2))).max() <= 0.005 * jnp.abs(dx).sum((0, 1, 2)).max()


@pytest.mark.parametrize("conv", CONVS)
def test_convolution_options(conv):
    op, definition, params, batch = make_conv(conv, masked=True)
    want = single_device(definition, params, batch)
    assert_trees_close(single_device(op, params, batch), want, 1e-12)


@pytest.mark.parametrize("conv", ["pointwise", "strided"])
def test_residuals(conv):
    op, _, params, batch = make_conv(conv)
    shapes = lambda x: jax.tree.leaves(jax.vjp(lambda x: op(params, {"x": x}, None)[0], x)[1])  # noqa: E731
    kept = [a.shape for a in jax.eval_shape(shapes, batch["x"]) if a.shape[:1] == (16,)]
    assert kept == [(16, 5, 4, 1), (16, 5, 4, 3), (16, 5, 4, 2)]


def test_all_reduces(mesh8):
    op, _, params, batch = make_conv("pointwise")

    def step(params, x):
        return jax.grad(lambda x: jnp.sum(op(params, {"x": x}, "data")[0]))(x)

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh8, check_vma=False, **specs))
    found = collective_sizes(mapped.lower(params, batch["x"]).compile(), batch["x"].dtype)
    assert found == [("all-reduce", 12), ("all-reduce", 96)]


def test_empty_batch():
    op, _, params, batch = make_conv("pointwise")
    dx = jax.jit(jax.grad(lambda x: jnp.sum(op(params, {"x": x}, None)[0])))(batch["x"][:0])
    assert dx.shape == (0, 5, 4, 6)
