"""Collectives and residuals."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from effjax import sync_batch_norm
from effjax.memory import collectives
from effjax.ops.batch_norm.complex import complex_batch_norm
from tests.contexts import DEVICES, mesh_of
from tests.ops.batch_norm.cases import PARAMS, C, make_batch
from tests.programs import collective_sizes
from tests.tiers import product_cases

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(("relu", "residual"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_residuals(relu, residual):
    x = jnp.ones((64, 32), jnp.bfloat16)
    params = jnp.ones(32), jnp.zeros(32)
    activation = "relu" if relu else None

    def op(x, scale, bias, residual):
        return sync_batch_norm(x, scale, bias, activation=activation, residual=residual)[0]

    def residuals(*args):
        leaves = jax.tree.leaves(jax.vjp(op, *args)[1])
        return list({id(v): v for v in leaves}.values())

    leaves = jax.eval_shape(residuals, x, *params, x + 1 if residual else None)
    large = [v for v in leaves if v.size >= x.size]
    assert [v.dtype for v in large] == [x.dtype] * (2 if relu and residual else 1)
    assert sum(v.size for v in leaves if v.size < x.size) <= 4 * 32 + 2


@pytest.mark.parametrize(
    ("stats", "check_vma", "mask"),
    product_cases(
        ["gather", "two_psum"],
        [False, True],
        [False, True],
        plain=[("gather", True, False), ("two_psum", True, True)],
    ),
)
def test_all_reduces(stats, check_vma, mask):
    """One or two forward, one of 2C numbers backward, none for replicated parameters."""
    mesh = mesh_of((DEVICES,), ("i",))
    batch = {k: make_batch()[k] for k in ("x", "mask")}

    def forward(batch, params):
        extra = {"mask": batch["mask"]} if mask else {}
        return sync_batch_norm(batch["x"], **params, **extra, axis_name="i", stats=stats)[0]

    def backward(batch, params):
        loss = lambda x, p: jnp.sum(jnp.sin(forward({**batch, "x": x}, p)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(batch["x"], params)

    def counted(fn, out_specs):
        specs = {"in_specs": (P("i"), P()), "out_specs": out_specs}
        mapped = jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)
        return collective_sizes(jax.jit(mapped).lower(batch, PARAMS).compile(), batch["x"].dtype)

    first = DEVICES * (2 * C + mask) if stats == "gather" else C + mask
    want = [first] if stats == "gather" else [first, C]
    got = counted(forward, P("i"))
    assert got == sorted(("all-reduce", n) for n in want)
    got = counted(backward, (P("i"), P() if check_vma else P("i")))
    assert got == sorted(("all-reduce", n) for n in [*want, 2 * C])


@pytest.mark.parametrize("mask", [False, True])
def test_all_reduces_of_complex_input(mask):
    batch, mesh = make_batch(), mesh_of((DEVICES,), ("i",))

    def run(x, counted):
        return complex_batch_norm(x, axis_name="i", mask=counted if mask else None)[0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    program = jax.jit(mapped).lower(batch["x"] + 1j, batch["mask"]).compile()
    assert len(collective_sizes(program, jnp.dtype(float))) == 2 + mask


def test_auto_uses_two_all_reduces_for_many_features():
    def message(features):
        mesh = mesh_of((DEVICES,), ("i",))
        fn = lambda x: sync_batch_norm(x, axis_name="i")[0]  # noqa: E731
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        x = jax.ShapeDtypeStruct((DEVICES, features), jnp.float32)
        return len(re.findall("all_reduce", jax.jit(mapped).lower(x).as_text()))

    assert message(4096) == 1
    assert message(4097) == 2


def test_jit_of_sharded_batch_does_not_gather(mesh8):
    x = jax.ShapeDtypeStruct(
        (32, 8, 8, 64), jnp.float32, sharding=jax.NamedSharding(mesh8, P("data"))
    )
    step = jax.grad(lambda x: jnp.sum(jnp.sin(sync_batch_norm(x)[0])))
    kinds = {c.kind for c in collectives(jax.jit(step).lower(x).compile().as_text())}
    assert kinds == {"all-reduce"}
