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


def test_vmap_axis_inside_mesh_axis():
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.arange(48.0).reshape(3, 4, 4) ** 2
    norm = jax.vmap(lambda x: sync_batch_norm(x, axis_name=("j", "i"))[0], axis_name="j")
    rows = {"in_specs": P(None, "i"), "out_specs": P(None, "i")}
    # JAX does not support this with check_vma=True.
    got = jax.jit(jax.shard_map(norm, mesh=mesh, **rows, check_vma=False))(x)
    want = sync_batch_norm(x.reshape(12, 4))[0].reshape(x.shape)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_x_varies_over_one_of_two_axes():
    mesh, x = mesh_of((4, 2), ("i", "j")), make_batch()["x"]

    def local(x):
        return lax.pmean(jnp.mean(sync_batch_norm(x, axis_name=("i", "j"))[0] ** 3), ("i",))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P())
    want = jax.jit(jax.grad(lambda x: jnp.mean(oracles.batch_norm(x)[0] ** 3)))(x)
    assert_trees_close(jax.jit(jax.grad(mapped))(x), want, 1e-12)


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
