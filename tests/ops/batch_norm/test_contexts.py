"""Transformations that are specific to batch norm, or to its named axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from effjax import batch_norm_inference, sync_batch_norm
from tests import oracles
from tests.contexts import assert_trees_close, mesh_of
from tests.ops.batch_norm.cases import PARAMS, C, make_batch

pytestmark = pytest.mark.usefixtures("x64")


def test_rules_run_where_two_vmap_axes_are_out_of_scope():
    # Parameters and mask are constants.
    x, mask = make_batch()["x"], make_batch()["mask"][8:9]

    def total(norm, x):
        return jnp.sum(jnp.sin(norm(x, **PARAMS, mask=mask, axis_name=("i", "j"))[0]))

    def loss(x):
        inner = jax.vmap(functools.partial(total, sync_batch_norm), axis_name="j")
        return jax.vmap(inner, axis_name="i")(x.reshape(4, 2, 4, *x.shape[1:])).sum()

    norm = functools.partial(oracles.batch_norm, mask=jnp.broadcast_to(mask, (32, 3, 1, 1)))
    want = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(norm(x, **PARAMS)[0]))))(x)
    assert_trees_close(jax.jit(jax.grad(jax.jit(loss)))(x), want, 1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
def test_vmap_axis_inside_mesh_axis(check_vma):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.arange(48.0).reshape(3, 4, 4) ** 2
    norm = jax.vmap(lambda x: sync_batch_norm(x, axis_name=("j", "i"))[0], axis_name="j")
    rows = {"in_specs": P(None, "i"), "out_specs": P(None, "i")}
    run = jax.jit(jax.shard_map(norm, mesh=mesh, **rows, check_vma=check_vma))
    if check_vma:  # not supported by JAX
        with pytest.raises(ValueError, match="psum can only accept axis_name"):
            run(x)
        return
    want = sync_batch_norm(x.reshape(12, 4))[0].reshape(x.shape)
    np.testing.assert_allclose(run(x), want, atol=1e-12)


def test_x_varies_over_one_of_two_axes():
    mesh, x = mesh_of((4, 2), ("i", "j")), make_batch()["x"]

    def local(x):
        return lax.pmean(jnp.mean(sync_batch_norm(x, axis_name=("i", "j"))[0] ** 3), ("i",))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P())
    want = jax.jit(jax.grad(lambda x: jnp.mean(oracles.batch_norm(x)[0] ** 3)))(x)
    assert_trees_close(jax.jit(jax.grad(mapped))(x), want, 1e-12)


def test_explicit_mesh_with_sharded_features():
    mesh = mesh_of((4, 2), ("i", "j"), AxisType.Explicit)
    x = np.random.default_rng(0).normal(size=(8, 3, 3, 6))
    scale, bias = np.linspace(1, 2, 6), np.linspace(0, 1, 6)
    loss = lambda norm, *args: jnp.sum(norm(*args)[0] ** 3)  # noqa: E731
    gradient = functools.partial(jax.grad, argnums=(0, 1, 2))
    want = jax.jit(gradient(functools.partial(loss, oracles.batch_norm)))(x, scale, bias)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("i", None, None, "j")))
    replicated = jax.device_put((scale, bias), jax.NamedSharding(mesh, P()))
    got = jax.jit(gradient(functools.partial(loss, sync_batch_norm)))(sharded, *replicated)
    assert_trees_close(got, want, 1e-12)


def test_second_order():
    x, w = make_batch()["x"], make_batch()["w"]

    def curvature(norm, x):
        inner = jax.grad(lambda x: jnp.sum(jnp.sin(norm(x)[0]) * w))
        return jnp.sum(jnp.square(inner(x)))

    want = jax.jit(jax.grad(functools.partial(curvature, oracles.batch_norm)))(x)
    got = jax.jit(jax.grad(functools.partial(curvature, sync_batch_norm)))(x)
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_inference_gradients():
    rng = np.random.default_rng(0)
    x, mean, scale, bias = rng.normal(size=(4, C)), *rng.normal(size=(3, C))
    args = mean, rng.random(C) + 1, scale, bias
    op = functools.partial(batch_norm_inference, activation="relu", residual=x)
    check_grads(jax.jit(op), (x, *args), order=1, modes=["fwd", "rev"], eps=1e-6)
    assert batch_norm_inference(jnp.asarray(x, jnp.bfloat16), *args).dtype == jnp.bfloat16


def test_numpy_mask_mapped_by_vmap_inside_jit():
    x = jax.random.normal(jax.random.key(0), (2, 2, 4, 4, 3))
    mask = np.arange(16).reshape(2, 2, 4, 1, 1) % 3 > 0
    mapped = jax.vmap(lambda *args: sync_batch_norm(args[0], mask=args[1])[0])
    got = jax.jit(lambda x: mapped(x, mask))(x)
    np.testing.assert_allclose(got, jax.jit(mapped)(x, mask), atol=1e-5)
