"""Sampling operators over devices, and examples of vmap."""

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
from tests.ops.samplers.deform_attention.cases import ATTENTION, DCN
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import OPERATOR as ROI
from tests.ops.subjects import SampledSubject
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64_everywhere")

OPERATORS = {"conv": CONV, "attention": ATTENTION, "dcn": DCN, "roi": ROI}
# The operators share these rules.
vary_subject = vary("subject", ["conv", "attention", "roi"], indirect=True)


@pytest.fixture
def subject(request):
    return SampledSubject(OPERATORS[request.param], sliced=False)


def gradients(op):
    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1), allow_int=True)


@vary_subject
def test_batch_that_does_not_divide(subject):
    """XLA pads the last shard with values that must not be visible."""
    op, params, batch = subject.op, subject.params, subject.batch
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


@pytest.mark.parametrize("subject", ["conv"], indirect=True)
def test_arrays_on_a_mesh_beside_others(subject):
    op, params, batch = subject.op, subject.params, subject.batch
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    mixed = batch | {"x": jax.device_put(batch["x"], NamedSharding(mesh, P("i")))}
    with jax.set_mesh(mesh):
        got = op(params, mixed, None)[0]
    assert_trees_close(got, op(params, batch, None)[0], 1e-12)


@vary_subject
def test_x64_context_over_devices(subject):
    """XLA partitions in threads that do not see `jax.enable_x64`."""
    op, params, batch = subject.op, subject.params, subject.batch
    # These shapes have not been traced in float64 before.
    batch = jax.tree.map(lambda a: a[:8], batch)
    jax.config.update("jax_enable_x64", False)
    with jax.enable_x64(True):
        got = CONTEXTS["jit_auto"](op, params, batch)
        want = CONTEXTS["shard_map_of_grad"](op, params, batch)
        assert_trees_close(got, want, 1e-12)


@vary_subject
def test_shard_map_over_one_of_two_axes(subject):
    op, params, batch = subject.op, subject.params, subject.batch
    mesh = mesh_of((4, 2), ("i", "j"))
    sharded = jax.device_put(batch, NamedSharding(mesh, P(("i", "j"))))
    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i")), "axis_names": {"i"}}
    run = jax.jit(jax.shard_map(lambda p, b: gradients(op)(p, b), mesh=mesh, **specs))
    assert_trees_close(run(params, sharded), jax.jit(gradients(op))(params, batch), 1e-12)


def check_vmap(operator, axes):
    """Check that examples give the same as alone, and that no loop over examples is added."""
    case = "all" if operator is CONV else operator.context_case
    c = operator.make(case, **operator.context_options)
    axes, factor = axes or [0] * len(c.args), np.array([1.0, 0.5, 1.25])
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip(c.args, axes, strict=True)
    ]
    one = c.compile(None)
    run = jax.jit(jax.vmap(one, (list(axes), None))).lower(args, c.dy).compile()
    alone = one.lower(c.args, c.dy).compile()
    assert run.as_text().count(" while(") == alone.as_text().count(" while(")
    got = run(args, c.dy)
    for i in range(3):
        example = [a if x is None else a[i] for a, x in zip(args, axes, strict=True)]
        assert_trees_close([g[i] for g in got], alone(example, c.dy), 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap(name):
    check_vmap(OPERATORS[name], None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name, o in OPERATORS.items() for axes in o.mapped]
)
def test_vmap_of_some_arguments(name, axes):
    check_vmap(OPERATORS[name], axes)


@vary_subject
def test_nested_vmap_and_no_examples(subject):
    op, params, batch = subject.op, subject.params, subject.batch
    batch = jax.tree.map(lambda a: a[:4], batch)
    split = jax.tree.map(lambda a: a.reshape(2, 2, 1, *a.shape[1:]), batch)
    run = jax.jit(lambda p, b: gradients(op)(p, b)[1]["x"])
    inner = jax.vmap(run, (None, 0))
    got = jax.jit(jax.vmap(inner, (None, 0)))(params, split)
    assert_trees_close(got.reshape(batch["x"].shape), run(params, batch), 1e-12)
    none = jax.tree.map(lambda a: a[:, :0], split)
    assert jax.vmap(inner, (None, 0))(params, none).shape == (2, 0, 1, *batch["x"].shape[1:])


@vary_subject
def test_vmap_of_operands_sharded_differently(subject):
    """The examples of one operand and the images of another are sharded over one mesh axis."""
    op, params, batch = subject.op, subject.params, subject.batch
    batch = jax.tree.map(lambda a: a.reshape(8, 2, *a.shape[1:]), batch)
    mesh = mesh_of((2,), ("i",))
    sharded = jax.device_put(batch, NamedSharding(mesh, P("i")))
    sharded["args"][1] = jax.device_put(batch["args"][1], NamedSharding(mesh, P(None, "i")))
    run = jax.jit(jax.vmap(lambda b: op(params, b, None)[0]))
    assert_trees_close(run(sharded), run(batch), 1e-12)


@vary_subject
@pytest.mark.parametrize(
    ("shape", "spec"), [((16, 1), P("i")), ((2, 8), P(None, "i"))], ids=["examples", "images"]
)
def test_per_example_gradients_gather_nothing(subject, shape, spec):
    op, params, batch = subject.op, subject.params, subject.batch
    mesh = mesh_of((8,), ("i",))
    split = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), batch)
    split = jax.device_put(split, NamedSharding(mesh, spec))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    per_example = jax.jit(jax.vmap(gradients(op), (None, 0)))
    program = per_example.lower(params, split).compile().as_text()
    assert {c.kind for c in collectives(program)} <= {"all-reduce"}
