"""Transformations that are specific to batch norm, its named axes, and groups of devices."""

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
from tests.contexts import DEVICES, assert_trees_close, mesh_of
from tests.ops.batch_norm.cases import PARAMS, C, make_batch
from tests.tiers import vary

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


GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]
ORDER = [device for group in GROUPS for device in group]


def reorder(a, order=ORDER):
    """Permute the parts of an array of all devices."""
    return np.concatenate([np.split(np.asarray(a), DEVICES)[i] for i in order])


def per_group(x, w):
    """Loss and gradients with statistics inside each group of devices, on one device."""

    def loss(x):
        parts = zip(jnp.split(x, 2), jnp.split(reorder(w), 2), strict=True)
        return jnp.mean(jnp.stack([jnp.mean(oracles.batch_norm(a)[0] ** 2 * b) for a, b in parts]))

    value, dx = jax.jit(jax.value_and_grad(loss))(reorder(x))
    return value, reorder(dx, np.argsort(ORDER))


def grouped(x, w, **options):
    loss = lambda x: jnp.mean(sync_batch_norm(x, axis_name="i", **options)[0] ** 2 * w)  # noqa: E731
    value, dx = jax.value_and_grad(loss)(x)
    return lax.pmean(value, "i")[None], dx / DEVICES


@pytest.mark.parametrize(("how", "stats"), [("pmap", "two_psum"), ("shard_map", "gather")])
def test_groups_of_devices(how, stats):
    batch = make_batch()
    run = functools.partial(grouped, axis_index_groups=GROUPS, stats=stats)
    if how == "pmap":
        split = [a.reshape(DEVICES, -1, *a.shape[1:]) for a in (batch["x"], batch["w"])]
        value, dx = jax.pmap(run, axis_name="i")(*split)
        dx = dx.reshape(batch["x"].shape)
    else:
        mesh = mesh_of((DEVICES,), ("i",))
        specs = {"in_specs": (P("i"), P("i")), "out_specs": (P("i"), P("i"))}
        mapped = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
        value, dx = jax.jit(mapped)(batch["x"], batch["w"])
    want = per_group(batch["x"], batch["w"])
    assert_trees_close((value.ravel()[0], dx), want, 1e-12)


@vary("size", [2, 1, 8])
def test_groups_by_size(size):
    """Neighboring devices form a group, as in apex."""
    x = make_batch()["x"].reshape(DEVICES, -1, C)
    run = lambda x: sync_batch_norm(x, axis_name="i", axis_index_groups=size)[1].mean  # noqa: E731
    want = np.repeat(x.reshape(DEVICES // size, -1, C).mean(1), size, 0)
    np.testing.assert_allclose(jax.pmap(run, "i")(x), want, atol=1e-12)


def test_rejects_group_size_that_does_not_divide():
    run = lambda x: sync_batch_norm(x, axis_name="i", axis_index_groups=3)[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"`axis_index_groups` \(=3\) must contain each of the 8"):
        jax.pmap(run, "i")(np.ones((DEVICES, 4, C)))


def test_groups_by_mesh_axis():
    batch = make_batch()
    mesh = mesh_of((2, 4), ("group", "i"))

    def local(x, w):
        return lax.pmean(jnp.mean(sync_batch_norm(x, axis_name="i")[0] ** 2 * w), ("group", "i"))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(("group", "i")), P(("group", "i"))), out_specs=P()
    )
    value, dx = jax.jit(jax.value_and_grad(mapped))(reorder(batch["x"]), reorder(batch["w"]))
    dx = reorder(dx, np.argsort(ORDER))
    assert_trees_close((value, dx), per_group(batch["x"], batch["w"]), 1e-12)


def test_error_for_groups_that_jax_does_not_support():
    norm = lambda x: sync_batch_norm(x, axis_name="i", axis_index_groups=GROUPS)[0]  # noqa: E731
    specs = {"mesh": mesh_of((DEVICES,), ("i",)), "in_specs": P("i"), "out_specs": P("i")}
    for run in (jax.shard_map(norm, **specs), jax.vmap(norm, axis_name="i")):
        with pytest.raises(ValueError, match=r"mesh of shape \(2, 4\) with axes \('group', 'i'\)"):
            jax.eval_shape(run, np.ones((DEVICES, 4, C)))
