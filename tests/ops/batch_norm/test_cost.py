"""Collectives and residuals."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import sync_batch_norm
from effjax.memory import plan
from effjax.ops.batch_norm.complex import complex_batch_norm
from tests.contexts import DEVICES, mesh_of
from tests.ops.batch_norm.cases import C, make_batch
from tests.programs import collective_sizes, needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")
DATA = P("data")


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


def make_programs(shape, dtype, mask=False, sharding=None, **options):
    """Return a forward pass, its gradient, and arguments of which x and mask are sharded."""
    params = [jax.ShapeDtypeStruct(shape[-1:], jnp.float32)] * 2
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    masks = [jax.ShapeDtypeStruct((*shape[:2], 1, 1), bool, sharding=sharding)] if mask else []

    def forward(x, scale, bias, *mask):
        extra = {"mask": mask[0]} if mask else {}
        return sync_batch_norm(x, scale, bias, activation="relu", **extra, **options)[0]

    def loss(*args):
        return jnp.sum(jnp.sin(forward(*args).astype(jnp.float32)))

    return forward, jax.grad(loss, argnums=(0, 1, 2)), (x, *params, *masks)


def map_shards(function, mesh, args, out_specs=DATA, check_vma=True):
    """Return `function` in shard_map; its second and third argument are replicated."""
    specs = (DATA, P(), P(), DATA)[: len(args)]
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma
    )


def sizes(function, args):
    """Return the sizes of the all-reduces of a program, which has no other collectives."""
    found = collective_sizes(jax.jit(function).lower(*args).compile(), jnp.float32)
    assert {kind for kind, _ in found} == {"all-reduce"}
    return [size for _, size in found]


@pytest.mark.parametrize(("stats", "mask"), [("gather", False), ("two_psum", True)])
@vary("check_vma", [True, False])
def test_all_reduces_in_shard_map(stats, mask, check_vma, mesh8):
    """One or two forward, one of 2C numbers backward, none for replicated parameters."""
    options = {"axis_name": "data", "stats": stats}
    forward, backward, args = make_programs((32, 3, 3, C), jnp.float32, mask, **options)
    want = [DEVICES * 2 * C] if stats == "gather" else [C, C + mask]
    assert sizes(map_shards(forward, mesh8, args, check_vma=check_vma), args) == sorted(want)
    replicated = P() if check_vma else DATA
    specs = DATA, replicated, replicated
    mapped = map_shards(backward, mesh8, args, specs, check_vma)
    assert sizes(mapped, args) == sorted([*want, 2 * C])


@pytest.mark.parametrize("mask", [False, True])
def test_all_reduces_of_complex_input(mask, mesh8):
    batch = make_batch()

    def run(x, counted):
        return complex_batch_norm(x, axis_name="data", mask=counted if mask else None)[0]

    mapped = jax.shard_map(run, mesh=mesh8, in_specs=DATA, out_specs=DATA)
    assert len(sizes(mapped, (batch["x"] + 1j, batch["mask"]))) == 2 + mask


@pytest.mark.parametrize(
    ("kind", "mask"), [(AxisType.Auto, True), (AxisType.Explicit, False)], ids=str
)
def test_all_reduces_under_jit(kind, mask):
    sharding = NamedSharding(mesh_of((DEVICES,), ("data",), kind), DATA)
    forward, gradient, args = make_programs((32, 8, 8, 64), jnp.float32, mask, sharding)
    first = DEVICES * (3 if mask else 2) * 64
    assert sizes(forward, args) == [first]
    assert sizes(gradient, args) == [2 * 64, first]


@pytest.mark.parametrize(
    ("how", "stats", "features", "count"),
    [
        ("shard_map", "auto", 4096, 1),
        ("shard_map", "auto", 4097, 2),
        ("jit", "auto", 4097, 2),
        ("jit", "gather", 4097, 1),
        ("jit", "two_psum", 4097, 2),
    ],
)
def test_all_reduces_of_many_features(how, stats, features, count, mesh8):
    sharding, axis = (NamedSharding(mesh8, DATA), None) if how == "jit" else (None, "data")
    options = {"axis_name": axis, "stats": stats}
    forward, _, args = make_programs((32, features), jnp.float32, sharding=sharding, **options)
    forward = forward if how == "jit" else map_shards(forward, mesh8, args)
    assert len(sizes(forward, args)) == count


def check_plan_of_gradient(target, kind, mask, dtype, temporaries, how="jit"):
    """Check the collectives, and the temporaries as a multiple of a device's part of x."""
    mesh = AbstractMesh((4,), ("data",), (kind,))
    options = {"axis_name": "data"} if how == "shard_map" else {}
    sharding = NamedSharding(mesh, DATA)
    _, gradient, args = make_programs((64, 28, 28, 64), dtype, mask, sharding, **options)
    if how == "shard_map":
        gradient = map_shards(gradient, mesh, args, (DATA, P(), P()))
    p = plan(gradient, *args, target=target)
    got = sorted((c.kind, c.bytes, c.count) for c in p.collectives)
    first = 4 * 4 * (3 if mask else 2) * 64
    assert got == [("all-reduce", 4 * 2 * 64, 1), ("all-reduce", first, 1)]
    size = math.prod(args[0].shape) * args[0].dtype.itemsize / 4
    assert p.device.temporaries <= temporaries * size


@needs_tpu_compiler
@vary(
    "kind, mask, dtype",
    [(AxisType.Auto, True, "bfloat16"), (AxisType.Explicit, False, "float32")],
    ids=str,
)
def test_all_reduces_on_tpu(kind, mask, dtype):
    check_plan_of_gradient("v5e", kind, mask, dtype, 0.2)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_all_reduces_in_shard_map_on_tpu():
    check_plan_of_gradient("v5e", AxisType.Auto, False, "float32", 0.2, "shard_map")


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_all_reduces_on_gpu():
    check_plan_of_gradient("h100", AxisType.Auto, True, "bfloat16", 4.1)
