"""Under jit over meshes, shard_map, pmap, vmap, scan and remat; and what the programs exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import ms_deform_attn
from effjax.memory import collectives
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    gradients_with_parameters_of_each_device,
    mesh_of,
)
from tests.ops.deform_attention import oracle
from tests.ops.deform_attention.implementations import (
    Case,
    all_implementations,
    all_rules,
    around,
)

pytestmark = pytest.mark.usefixtures("x64_everywhere")
SLICES = 3000  # bytes of workspace: less than all queries


@functools.cache
def case():
    return Case("levels", batch=16)


@functools.cache
def gain():
    return np.random.default_rng(5).normal(size=case().dy.shape[-1])


def setup(attn):
    """As tests.contexts wants it: a factor of the result is the parameter, all else the batch."""
    c = case()
    value, locations, weights = c.args

    def op(params, batch, axis_name):
        return params * c.run(attn)(batch["x"], batch["locations"], batch["weights"]), ()

    return op, gain(), {"x": value, "locations": locations, "weights": weights, "w": c.dy}


@functools.cache
def want():
    """By the definition; the loss is that of tests.contexts."""
    c = case()
    attended, w = c.want()[0], c.dy
    y = gain() * attended
    loss = np.mean(np.sin(y) * w + 0.3 * y * y)
    dy = (np.cos(y) * w + 0.6 * y) / y.size
    value, *others = c.args
    _, (dvalue, _, _) = oracle.attention(value, c.shapes, *others, gain() * dy)
    return loss, (), (dy * attended).sum((0, 1)), dvalue


# What is for each implementation; the other transformations are for any, once each.
EACH = ("jit_explicit",)


@all_implementations
@pytest.mark.parametrize(
    "context",
    [pytest.param(c, marks=() if c in EACH else pytest.mark.covering) for c in CONTEXTS],
)
def test_equals_the_definition(attn, context):
    op, params, batch = setup(functools.partial(attn, workspace_bytes=SLICES))
    assert_trees_close(CONTEXTS[context](op, params, batch), want(), 1e-12)


@pytest.mark.covering
@all_rules
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_parameters_may_differ_by_device(attn, how):
    run = functools.partial(gradients_with_parameters_of_each_device, how=how)
    op, params, batch = setup(attn)
    xla, _, _ = setup(functools.partial(ms_deform_attn, implementation="xla"))
    got = run(lambda *a: op(*a)[0], params, batch)
    assert_trees_close(got, run(lambda *a: xla(*a)[0], params, batch, how="vmap"), 1e-12)


def gradients(op):
    """Of all arrays."""

    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1))


def exchanged(fun, params, batch):
    found = collectives(jax.jit(fun).lower(params, batch).compile().as_text())
    return [(c.kind, c.bytes, c.count) for c in found]


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("kind", ["auto", "explicit", "auto_4x2", "explicit_4x2"])
def test_a_sharded_batch_exchanges_nothing_of_its_own(attn, kind):
    """But for the gradient of the parameter: no gather, and no all-reduce in a slice."""
    op, params, batch = setup(functools.partial(attn, workspace_bytes=SLICES))
    axes = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[kind.removesuffix("_4x2")]
    names = ("i", "j") if "4x2" in kind else ("i",)
    mesh = mesh_of((4, 2) if "4x2" in kind else (8,), names, axes)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(names)))
    assert exchanged(lambda p, b: op(p, b, None)[0], params, batch) == []
    found = exchanged(gradients(op), params, batch)
    assert found == [("all-reduce", params.nbytes, 1)]


@around
def test_a_batch_that_does_not_divide(attn):
    """XLA fills the last shard up; neither there nor in the gradients may that be seen."""
    op, params, batch = setup(attn)
    batch = jax.tree.map(lambda a: a[:10], batch)
    constrain = functools.partial(
        lax.with_sharding_constraint, shardings=NamedSharding(mesh_of((8,), ("i",)), P("i"))
    )

    def loss(params, batch, constrain):
        x = constrain(batch["x"]) + 1
        return jnp.sum(jnp.cos(op(params, batch | {"x": x}, None)[0]))

    got, want = (
        jax.jit(functools.partial(jax.grad(loss, (0, 1)), constrain=how))(params, batch)
        for how in (constrain, lambda a: a)
    )
    assert_trees_close(got, want, 1e-12)


@around
def test_explicit_mesh_of_the_arguments(attn):
    """No `jax.set_mesh`: the mesh is known from the types alone."""
    op, params, batch = setup(attn)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    on_mesh = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((params, P()), (batch, P("i")))
    ]
    assert jax.typeof(op(*on_mesh, None)[0]).sharding.spec == P("i", None, None)
    got = jax.jit(gradients(op))(*on_mesh)
    assert_trees_close(got, jax.jit(gradients(op))(params, batch), 1e-12)


@around
def test_part_of_the_mesh_in_shard_map(attn):
    """One axis of the batch is mapped, another is left to jit."""
    op, params, batch = setup(attn)
    mesh = mesh_of((4, 2), ("i", "j"))
    batch = jax.device_put(batch, NamedSharding(mesh, P(("i", "j"))))
    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i")), "axis_names": {"i"}}
    run = jax.jit(jax.shard_map(lambda p, b: gradients(op)(p, b), mesh=mesh, **specs))
    assert_trees_close(run(params, batch), jax.jit(gradients(op))(params, batch), 1e-12)


MAPPED = {"all": (0, 0, 0), "value": (0, None, None), "queries": (None, 0, 0)}


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(attn, mapped):
    """Without a loop over the examples, each as if it were alone; forward and backward."""
    c, axes = Case("levels"), MAPPED[mapped]
    factor = np.array([1.0, 0.5, -0.2])
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip(c.args, axes, strict=True)
    ]

    def both(*args):
        y, backward = jax.vjp(c.run(attn), *args)
        return y, *backward(jnp.asarray(c.dy))

    run = jax.jit(jax.vmap(both, axes)).lower(*args).compile()
    got, one = run(*args), jax.jit(both)
    loops = one.lower(*c.args).compile().as_text().count(" while(")
    assert run.as_text().count(" while(") == loops
    for i in range(3):
        alone = one(*(a if x is None else a[i] for a, x in zip(args, axes, strict=True)))
        assert_trees_close([g[i] for g in got], list(alone), 1e-12)


@all_rules
def test_vmap_of_vmap_and_of_nothing(attn):
    c = Case("levels", batch=4)
    split = [a.reshape(2, 2, 1, *a.shape[1:]) for a in c.args]
    run = jax.vmap(jax.vmap(c.run(attn)))
    assert_trees_close(run(*split).reshape(c.dy.shape), c.want()[0], 1e-12)
    assert run(*(a[:, :0] for a in split)).shape == (2, 0, 1, *c.dy.shape[1:])


@around
def test_scan_and_remat(attn):
    """A stack of layers, each recomputed for the backward pass."""
    c = Case("levels")
    value, locations, weights = c.args
    layers = [np.stack([a, 0.5 * a]) for a in (locations, weights)]

    def layer(value, at):
        return jnp.tanh(value + jnp.mean(c.run(attn)(value, *at))), None

    def scanned(value, *layers):
        return jnp.sum(lax.scan(jax.checkpoint(layer), value, layers)[0] ** 2)

    def unrolled(value, *layers):
        for at in zip(*layers, strict=True):
            value, _ = layer(value, at)
        return jnp.sum(value**2)

    got, want = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(value, *layers) for f in (scanned, unrolled)
    )
    assert_trees_close(got, want, 1e-12)
