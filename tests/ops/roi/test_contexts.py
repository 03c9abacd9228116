"""Under jit over meshes, shard_map, pmap, vmap, scan and remat; and what the programs exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import collectives
from tests.contexts import CONTEXTS, assert_trees_close, mesh_of, single_device
from tests.ops.roi.implementations import Case, all_rules, own_rules

pytestmark = pytest.mark.usefixtures("x64_everywhere")
CASE = "moved_adaptive"  # a loop whose length depends on the boxes, and offsets


def setup(implementation, name=None):
    """As tests.contexts wants it: a factor of x is the parameter, all else is the batch."""
    c = case(name or case_of(implementation))
    run = c.run(implementation)

    def op(scale, batch, axis_name):
        given = [batch["x"] * scale, batch["offset"]] if "offset" in batch else [batch["x"] * scale]
        return run(*given, boxes=batch["boxes"]), ()

    batch = {"x": c.x, "boxes": c.boxes, "w": c.dy}
    return op, np.float64(1.5), batch | ({} if c.offset is None else {"offset": c.offset})


def case_of(implementation):
    """The one that makes "xla" what JAX itself differentiates; else that loop."""
    return "moved" if implementation == "xla" else CASE


@functools.cache
def case(name):
    return Case(name, batch=16, boxes=4, channels=3)


@functools.cache
def want(name):
    """By the definition; the loss is that of tests.contexts."""
    c, scale = case(name), 1.5
    y = c.definition(x=c.x * scale)
    loss = np.mean(np.sin(y) * c.dy + 0.3 * y * y)
    dy = (np.cos(y) * c.dy + 0.6 * y) / y.size
    _, (dx, _) = c.definition(dy, x=c.x * scale)
    return loss, (), np.sum(dx * c.x), dx * scale


# Each transformation once for each implementation; the other ways to write them once for any.
EACH = ("jit_auto", "jit_explicit", "pmap", "vmap_of_grad", "shard_map_of_grad")
EACH += ("shard_map_of_grad_unchecked",)


@own_rules
@pytest.mark.parametrize(
    "context",
    [pytest.param(c, marks=() if c in EACH else pytest.mark.covering) for c in CONTEXTS],
)
def test_equals_the_definition(implementation, context):
    got = CONTEXTS[context](*setup(implementation))
    assert_trees_close(got, want(case_of(implementation)), 1e-12)


@pytest.mark.parametrize("context", ["jit_auto", "shard_map_of_grad"])
def test_plain_xla_equals_the_definition(context):
    assert_trees_close(CONTEXTS[context](*setup("xla")), want("moved"), 1e-12)


def gradients(op):
    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1))


def exchanged(fun, params, batch):
    found = collectives(jax.jit(fun).lower(params, batch).compile().as_text())
    return [(c.kind, c.bytes, c.count) for c in found]


@pytest.mark.covering
@all_rules
@pytest.mark.parametrize("kind", ["auto", "explicit", "auto_4x2", "explicit_4x2"])
@pytest.mark.parametrize("name", ["moved", CASE])
def test_one_all_reduce_and_no_gather(implementation, kind, name):
    """Batch-sharded, forward and backward: that of the parameter, one number."""
    op, params, batch = setup(implementation, name)
    axes = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[kind.removesuffix("_4x2")]
    names = ("i", "j") if "4x2" in kind else ("i",)
    mesh = mesh_of((4, 2) if "4x2" in kind else (8,), names, axes)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(names)))
    assert exchanged(lambda p, b: op(p, b, None)[0], params, batch) == []
    assert exchanged(gradients(op), params, batch) == [("all-reduce", 8, 1)]


@own_rules
def test_a_batch_that_does_not_divide(implementation):
    """XLA fills the last shard up; neither there nor in the gradients may that be seen."""
    op, params, batch = setup(implementation)
    batch = jax.tree.map(lambda a: a[:10], batch)
    sharding = NamedSharding(mesh_of((8,), ("i",)), P("i"))

    def loss(params, batch, constrain):
        x = constrain(batch["x"]) + 1
        return jnp.sum(jnp.cos(op(params, batch | {"x": x}, None)[0]))

    ways = (lambda a: lax.with_sharding_constraint(a, sharding)), (lambda a: a)
    got, expected = (
        jax.jit(functools.partial(jax.grad(loss), constrain=how))(params, batch) for how in ways
    )
    assert_trees_close(got, expected, 1e-12)


MAPPED = {"images": (0, None, None), "boxes": (None, 0, None), "all": (0, 0, 0)}


@pytest.mark.covering
@all_rules
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(implementation, mapped):
    """Without a loop over the examples, each as if it were alone; forward and backward."""
    c = Case(CASE, boxes=5, channels=3)
    axes, factor = MAPPED[mapped], np.array([1.0, 0.5, 1.25])
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip((c.x, c.boxes, c.offset), axes, strict=True)
    ]

    def both(x, boxes, offset):
        run = lambda x, offset: c.run(implementation)(x, offset, boxes=boxes)  # noqa: E731
        y, backward = jax.vjp(run, x, offset)
        return y, *backward(jnp.asarray(c.dy))

    run = jax.jit(jax.vmap(both, axes)).lower(*args).compile()
    got, one = run(*args), jax.jit(both)
    loops = one.lower(c.x, c.boxes, c.offset).compile().as_text().count(" while(")
    assert run.as_text().count(" while(") == loops
    for i in range(3):
        alone = one(*(a if axis is None else a[i] for a, axis in zip(args, axes, strict=True)))
        assert_trees_close([g[i] for g in got], list(alone), 1e-12)


@own_rules
def test_vmap_of_vmap_and_of_nothing(implementation):
    c = Case("ratio", batch=4, boxes=3, channels=2)
    x_and_boxes = c.x, c.boxes
    split = [a.reshape(2, 2, 1, *a.shape[1:]) for a in x_and_boxes]

    @jax.jit
    def run(x, boxes):
        return jax.grad(lambda x: jnp.sum(c.run(implementation)(x, boxes=boxes) ** 2))(x)

    got = jax.jit(jax.vmap(jax.vmap(run)))(*split)
    for i, j in np.ndindex(2, 2):
        assert_trees_close(got[i, j], run(*(a[i, j] for a in split)), 1e-12)
    empty = jax.vmap(run)(*(np.zeros((0, *a.shape)) for a in x_and_boxes))
    assert empty.shape == (0, *c.x.shape)


@own_rules
def test_scan_and_remat(implementation):
    """Stages that take the boxes' features in turn, each recomputed for the backward pass."""
    c = Case("moved", boxes=4, channels=3)
    offsets = np.random.default_rng(0).normal(size=(3, *c.offset.shape)) / 3

    def stage(x, offset):
        y = c.run(implementation)(x, offset)
        return jnp.tanh(x + y.mean((1, 2, 3))[:, None, None]), None

    def scanned(x, offsets):
        return jnp.sum(lax.scan(jax.checkpoint(stage), x, offsets)[0] ** 2)

    def unrolled(x, offsets):
        for offset in offsets:
            x, _ = stage(x, offset)
        return jnp.sum(x**2)

    got, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1)))(c.x, offsets) for f in (scanned, unrolled)
    )
    assert_trees_close(got, expected, 1e-12)


@own_rules
def test_float64_for_a_while_over_several_devices(implementation):
    """XLA partitions in threads that a `with` does not reach."""
    op, params, batch = setup(implementation)
    batch = jax.tree.map(lambda a: a[:8], batch)  # shapes that were not traced in float64 before
    jax.config.update("jax_enable_x64", False)
    with jax.enable_x64(True):
        got = CONTEXTS["jit_auto"](op, params, batch)
        assert_trees_close(got, single_device(op, params, batch), 1e-12)
