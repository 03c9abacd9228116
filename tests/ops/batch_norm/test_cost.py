"""Collectives and residuals."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import sync_batch_norm
from effjax.memory import plan
from effjax.ops.batch_norm.complex import complex_batch_norm
from tests.contexts import DEVICES, mesh_of
from tests.ops.batch_norm.cases import PARAMS, C, make_batch
from tests.programs import collective_sizes, needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary

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


@pytest.mark.parametrize(("stats", "mask"), [("gather", False), ("two_psum", True)])
@vary("check_vma", [True, False])
def test_all_reduces(stats, mask, check_vma):
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


def programs_under_jit(mesh, shape, dtype, mask=False, **options):
    """Return a forward pass, its gradient, and arguments that are sharded over the mesh."""
    split = NamedSharding(mesh, P("data"))
    params = [jax.ShapeDtypeStruct(shape[-1:], jnp.float32)] * 2
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=split)
    masks = [jax.ShapeDtypeStruct((*shape[:2], 1, 1), bool, sharding=split)] if mask else []

    def forward(x, scale, bias, *mask):
        extra = {"mask": mask[0]} if mask else {}
        return sync_batch_norm(x, scale, bias, activation="relu", **extra, **options)[0]

    def loss(*args):
        return jnp.sum(jnp.sin(forward(*args).astype(jnp.float32)))

    return forward, jax.grad(loss, argnums=(0, 1, 2)), (x, *params, *masks)


@pytest.mark.parametrize(
    ("kind", "mask"), [(AxisType.Auto, True), (AxisType.Explicit, False)], ids=str
)
def test_all_reduces_under_jit(kind, mask):
    mesh = mesh_of((DEVICES,), ("data",), kind)
    forward, gradient, args = programs_under_jit(mesh, (32, 8, 8, 64), jnp.float32, mask)
    programs = (jax.jit(fn).lower(*args).compile() for fn in (forward, gradient))
    first = ("all-reduce", DEVICES * (3 if mask else 2) * 64)
    want = [[first], sorted([first, ("all-reduce", 2 * 64)])]
    assert [collective_sizes(program, jnp.float32) for program in programs] == want


@pytest.mark.parametrize(("stats", "count"), [("auto", 2), ("gather", 1), ("two_psum", 2)])
def test_all_reduces_of_many_features_under_jit(stats, count):
    mesh = mesh_of((DEVICES,), ("data",))
    forward, _, args = programs_under_jit(mesh, (32, 1, 1, 4097), jnp.float32, stats=stats)
    program = jax.jit(forward).lower(*args).compile()
    assert [kind for kind, _ in collective_sizes(program, jnp.float32)] == ["all-reduce"] * count


def check_plan_of_gradient(target, kind, mask, dtype, temporaries):
    """Check the collectives, and the temporaries as a multiple of a device's part of x."""
    mesh = AbstractMesh((4,), ("data",), (kind,))
    _, gradient, args = programs_under_jit(mesh, (64, 28, 28, 64), jnp.dtype(dtype), mask)
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


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_all_reduces_on_gpu():
    check_plan_of_gradient("h100", AxisType.Auto, True, "bfloat16", 4.1)


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_all_reduces_in_shard_map_on_tpu():
    mesh = AbstractMesh((4,), ("data",), (AxisType.Auto,))

    def forward(x):
        return sync_batch_norm(x, axis_name="data")[0]

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(forward(x))))(x)

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jax.ShapeDtypeStruct((64, 28, 28, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    sizes = sorted((c.kind, c.bytes, c.count) for c in plan(mapped, x, target="v5e").collectives)
    assert sizes == [("all-reduce", 4 * 2 * 64, 1), ("all-reduce", 4 * 4 * 2 * 64, 1)]
