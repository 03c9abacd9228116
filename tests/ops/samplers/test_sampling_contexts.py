"""Sampling operators over devices: collectives, partitioning and examples of vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import collectives
from tests.contexts import CONTEXTS, assert_trees_close, mesh_of
from tests.ops.battery import only_own_rules, own_rules_or_xla
from tests.ops.samplers.deform_attention.cases import ATTENTION, DCN
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import OPERATOR as ROI
from tests.ops.subjects import SampledSubject
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64_everywhere")

OPERATORS = {"conv": CONV, "attention": ATTENTION, "dcn": DCN, "roi": ROI}
# The operators share these rules.
vary_operator = vary("name", ["conv", "attention", "roi"])


def setup(name, implementation, sliced=False):
    """Return an operator for tests.contexts, its parameters and its batch."""
    subject = SampledSubject(OPERATORS[name], implementation, sliced=sliced)
    return subject.op, subject.params, subject.batch


def gradients(op):
    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1), allow_int=True)


def collectives_of(fun, params, batch):
    compiled = jax.jit(fun).lower(params, batch).compile()
    return [(c.kind, c.bytes, c.count) for c in collectives(compiled.as_text())]


@pytest.mark.parametrize("name", ["conv", "attention", "roi"])
@own_rules_or_xla
@vary("kind", ["auto", "explicit_4x2"])
def test_collectives(name, implementation, kind):
    """A batch-sharded operator all-reduces the gradients of parameters once, and nothing else."""
    # XLA reduces in every slice of Auto axes.
    sliced = not (name == "conv" and implementation == "xla" and kind == "auto")
    op, params, batch = setup(name, implementation, sliced=sliced)
    del params["gain"]
    mesh = {
        "auto": mesh_of((8,), ("i",)),
        "explicit_4x2": mesh_of((4, 2), ("i", "j"), AxisType.Explicit),
    }[kind]
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names)))

    def unit(params, batch, axis_name):
        return op({**params, "gain": 1.0}, batch, axis_name)

    assert collectives_of(lambda p, b: unit(p, b, None)[0], params, batch) == []
    size = sum(p.nbytes for p in jax.tree.leaves(params))
    want = [("all-reduce", size, 1)] if size else []
    assert collectives_of(gradients(unit), params, batch) == want


@only_own_rules
@vary_operator
def test_batch_that_does_not_divide(name, implementation):
    """XLA pads the last shard with values that must not be visible."""
    op, params, batch = setup(name, implementation)
    batch = jax.tree.map(lambda a: a[:10], batch)
    sharding = NamedSharding(mesh_of((8,), ("i",)), P("i"))

    def loss(params, x, constrain):
        # Neither images nor cotangents are zero in the padding.
        return jnp.sum(jnp.cos(op(params, batch | {"x": constrain(x) + 1}, None)[0]))

    got, want = (
        jax.jit(functools.partial(jax.grad(loss, (0, 1)), constrain=how))(params, batch["x"])
        for how in (lambda a: lax.with_sharding_constraint(a, sharding), lambda a: a)
    )
    assert_trees_close(got, want, 1e-12)


@own_rules_or_xla
def test_arrays_on_a_mesh_beside_others(implementation):
    op, params, batch = setup("conv", implementation)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    mixed = batch | {"x": jax.device_put(batch["x"], NamedSharding(mesh, P("i")))}
    with jax.set_mesh(mesh):
        got = op(params, mixed, None)[0]
    assert_trees_close(got, op(params, batch, None)[0], 1e-12)


@only_own_rules
@vary_operator
def test_x64_context_over_devices(name, implementation):
    """XLA partitions in threads that do not see `jax.enable_x64`."""
    op, params, batch = setup(name, implementation)
    # These shapes have not been traced in float64 before.
    batch = jax.tree.map(lambda a: a[:8], batch)
    jax.config.update("jax_enable_x64", False)
    with jax.enable_x64(True):
        got = CONTEXTS["jit_auto"](op, params, batch)
        want = CONTEXTS["shard_map_of_grad"](op, params, batch)
        assert_trees_close(got, want, 1e-12)


@only_own_rules
@vary_operator
def test_shard_map_over_one_of_two_axes(name, implementation):
    op, params, batch = setup(name, implementation)
    mesh = mesh_of((4, 2), ("i", "j"))
    sharded = jax.device_put(batch, NamedSharding(mesh, P(("i", "j"))))
    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i")), "axis_names": {"i"}}
    run = jax.jit(jax.shard_map(lambda p, b: gradients(op)(p, b), mesh=mesh, **specs))
    assert_trees_close(run(params, sharded), jax.jit(gradients(op))(params, batch), 1e-12)


@own_rules_or_xla
@vary_operator
def test_result_has_the_sharding_of_the_images(name, implementation):
    """Without `jax.set_mesh`, the mesh is known from the types alone."""
    op, params, batch = setup(name, implementation)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("i")))
    y = jax.eval_shape(lambda p, b: op(p, b, None)[0], params, batch)
    assert y.sharding.spec[0] == "i"


@only_own_rules
@pytest.mark.parametrize("name", OPERATORS)
def test_vmap(name, implementation):
    check_vmap(OPERATORS[name], next(iter(OPERATORS[name].mapped)), implementation)


@pytest.mark.exhaustive
@only_own_rules
@pytest.mark.parametrize(
    ("name", "mapped"),
    [(name, mapped) for name, o in OPERATORS.items() for mapped in [*o.mapped][1:]],
)
def test_vmap_of_other_arguments(name, mapped, implementation):
    check_vmap(OPERATORS[name], mapped, implementation)


def check_vmap(operator, mapped, implementation):
    """Check that examples give the same as alone, and that no loop over examples is added."""
    case = "all" if operator is CONV else operator.context_case
    c = operator.make(case, **operator.context_options)
    factor, axes = np.array([1.0, 0.5, 1.25]), operator.mapped[mapped]
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip(c.args, axes, strict=True)
    ]
    one = c.compile(implementation)
    run = jax.jit(jax.vmap(one, (list(axes), None))).lower(args, c.dy).compile()
    alone = one.lower(c.args, c.dy).compile()
    assert run.as_text().count(" while(") == alone.as_text().count(" while(")
    got = run(args, c.dy)
    for i in range(3):
        example = [a if x is None else a[i] for a, x in zip(args, axes, strict=True)]
        assert_trees_close([g[i] for g in got], alone(example, c.dy), 1e-12)


@only_own_rules
@vary_operator
def test_nested_vmap_and_no_examples(name, implementation):
    op, params, batch = setup(name, implementation)
    batch = jax.tree.map(lambda a: a[:4], batch)
    split = jax.tree.map(lambda a: a.reshape(2, 2, 1, *a.shape[1:]), batch)
    run = jax.jit(lambda p, b: gradients(op)(p, b)[1]["x"])
    inner = jax.vmap(run, (None, 0))
    got = jax.jit(jax.vmap(inner, (None, 0)))(params, split)
    assert_trees_close(got.reshape(batch["x"].shape), run(params, batch), 1e-12)
    none = jax.tree.map(lambda a: a[:, :0], split)
    assert jax.vmap(inner, (None, 0))(params, none).shape == (2, 0, 1, *batch["x"].shape[1:])


@only_own_rules
@vary_operator
def test_vmap_of_operands_sharded_differently(name, implementation):
    """The examples of one operand and the images of another are sharded over one mesh axis."""
    op, params, batch = setup(name, implementation)
    batch = jax.tree.map(lambda a: a.reshape(8, 2, *a.shape[1:]), batch)
    mesh = mesh_of((2,), ("i",))
    sharded = jax.device_put(batch, NamedSharding(mesh, P("i")))
    sharded["args"][1] = jax.device_put(batch["args"][1], NamedSharding(mesh, P(None, "i")))
    run = jax.jit(jax.vmap(lambda b: op(params, b, None)[0]))
    assert_trees_close(run(sharded), run(batch), 1e-12)


@only_own_rules
@vary_operator
@pytest.mark.parametrize(
    ("shape", "spec"), [((16, 1), P("i")), ((2, 8), P(None, "i"))], ids=["examples", "images"]
)
def test_per_example_gradients_gather_nothing(name, implementation, shape, spec):
    op, params, batch = setup(name, implementation)
    mesh = mesh_of((8,), ("i",))
    split = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), batch)
    split = jax.device_put(split, NamedSharding(mesh, spec))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    per_example = jax.vmap(gradients(op), (None, 0))
    assert {kind for kind, _, _ in collectives_of(per_example, params, split)} <= {"all-reduce"}
