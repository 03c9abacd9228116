"""Sampling operators under every transformation and over devices, and their collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import collectives
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    gradients_with_parameters_of_each_device,
    mesh_of,
)
from tests.ops.battery import IMPLEMENTATIONS, OWN_RULES, only_own_rules, own_rules
from tests.ops.deform_attention.cases import ATTENTION, DCN
from tests.ops.deform_conv.cases import OPERATOR as CONV
from tests.ops.roi.cases import OPERATOR as ROI
from tests.tiers import exhaustive

pytestmark = pytest.mark.usefixtures("x64_everywhere")

OPERATORS = {"conv": CONV, "attention": ATTENTION, "roi": ROI}
# Rules of all operators share their code: one operator in the plain tier.
conv_plainly = pytest.mark.parametrize("name", ["conv", exhaustive("attention"), exhaustive("roi")])
GAIN = 0.5 + np.arange(6) / 6


@functools.cache
def case_of(name, case):
    operator = OPERATORS[name]
    return operator.make(case, **{**operator.context_options, "batch": 16})


def setup(name, implementation, **options):
    """Return an operator for tests.contexts, its parameters and its batch.

    Parameters are the arguments without a batch axis and a factor of the result.
    """
    operator = OPERATORS[name]
    xla = implementation == "xla"
    c = case_of(name, operator.xla_context_case if xla else operator.context_case)
    f = c.bind(implementation, **options)

    def op(params, batch, axis_name):
        args = {0: batch["x"]} | batch["args"] | params["args"]
        return params["gain"] * f(*(args[i] for i in range(len(c.args)))), ()

    shared = {i: c.args[i] for i in c.shared}
    args = {i: a for i, a in enumerate(c.args) if i and i not in shared}
    params = {"args": shared, "gain": GAIN[: c.dy.shape[-1]]}
    return op, params, {"args": args, "x": c.args[0], "w": c.dy}


@functools.cache
def expected(name, xla):
    """Return loss, aux and gradients by the oracle."""
    operator = OPERATORS[name]
    c = case_of(name, operator.xla_context_case if xla else operator.context_case)
    gain = GAIN[: c.dy.shape[-1]]
    sampled = c.oracle(*c.args, c.dy)[0]
    y = gain * sampled
    loss = np.mean(np.sin(y) * c.dy + 0.3 * y * y)
    dy = (np.cos(y) * c.dy + 0.6 * y) / y.size
    _, gradients = c.oracle(*c.args, gain * dy)
    dgain = (dy * sampled).reshape(-1, gain.size).sum(0)
    dparams = {"args": {i: gradients[i] for i in c.shared}, "gain": dgain}
    return loss, (), dparams, gradients[0]


# Operators share their rules; "default" has those of "native", and those of "xla" are JAX's own.
OTHER_CONTEXTS = ("jit_auto", "jit_explicit", "pmap", "vmap_of_grad", "shard_map_of_grad")
OWN_CONTEXTS = (*OTHER_CONTEXTS, "grad_of_shard_map", "shard_map_of_grad_unchecked")


def contexts_of(name, implementation):
    if implementation == OWN_RULES:
        return CONTEXTS if name == "conv" else OWN_CONTEXTS
    return OTHER_CONTEXTS if implementation == "xla" else ("jit_explicit", "shard_map_of_grad")


def context_cases():
    """Plain: all contexts for convolution, and a few for each operator and implementation."""
    plain = {
        ("attention", OWN_RULES): ("jit_explicit", "shard_map_of_grad", "vmap_of_grad"),
        ("roi", OWN_RULES): ("jit_auto", "shard_map_of_grad_unchecked", "vmap_of_grad"),
        ("conv", "xla"): ("shard_map_of_grad",),
        ("conv", "default"): ("jit_explicit",),
    }
    plain["conv", OWN_RULES] = tuple(CONTEXTS)
    for name in OPERATORS:
        for implementation in IMPLEMENTATIONS:
            for context in contexts_of(name, implementation):
                values = name, implementation, context
                is_plain = context in plain.get((name, implementation), ())
                yield values if is_plain else exhaustive(*values)


@pytest.mark.parametrize(
    ("name", "implementation", "context"), list(context_cases()), indirect=["implementation"]
)
def test_matches_float64_oracle(name, implementation, context):
    op, params, batch = setup(name, implementation, **OPERATORS[name].options)
    want = expected(name, implementation == "xla")
    assert_trees_close(CONTEXTS[context](op, params, batch), want, 1e-12)


@only_own_rules
@conv_plainly
def test_different_parameters_per_device(name, implementation):
    op, params, batch = setup(name, implementation)
    got, want = (
        gradients_with_parameters_of_each_device(lambda *a: op(*a)[0], params, batch, how)
        for how in ("shard_map", "vmap")
    )
    assert_trees_close(got, want, 1e-12)


def gradients(op):
    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1), allow_int=True)


def collectives_of(fun, params, batch):
    compiled = jax.jit(fun).lower(params, batch).compile()
    return [(c.kind, c.bytes, c.count) for c in collectives(compiled.as_text())]


def collective_cases():
    plain = {
        ("conv", OWN_RULES, "auto"), ("conv", OWN_RULES, "explicit_4x2"), ("conv", "xla", "auto"),
        ("attention", OWN_RULES, "auto_4x2"), ("roi", OWN_RULES, "auto"),
    }  # fmt: skip
    kinds = {
        OWN_RULES: ("auto", "explicit", "auto_4x2", "explicit_4x2"),
        "xla": ("auto", "explicit"),
    }
    for name in OPERATORS:
        for implementation in kinds:
            for kind in kinds[implementation]:
                values = name, implementation, kind
                yield values if values in plain else exhaustive(*values)


@pytest.mark.parametrize(
    ("name", "implementation", "kind"), list(collective_cases()), indirect=["implementation"]
)
def test_collectives(name, implementation, kind):
    """A batch-sharded operator all-reduces the gradients of parameters once, and nothing else."""
    options = OPERATORS[name].options
    if name == "conv" and implementation == "xla" and "auto" in kind:
        options = {}  # XLA reduces in every slice of Auto axes
    op, params, batch = setup(name, implementation, **options)
    del params["gain"]
    factor = lambda params: {**params, "gain": 1.0}  # noqa: E731
    axes = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[kind.removesuffix("_4x2")]
    names = ("i", "j") if "4x2" in kind else ("i",)
    mesh = mesh_of((4, 2) if "4x2" in kind else (8,), names, axes)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(names)))
    unit = lambda params, batch, axis_name: op(factor(params), batch, axis_name)  # noqa: E731
    assert collectives_of(lambda p, b: unit(p, b, None)[0], params, batch) == []
    size = sum(p.nbytes for p in jax.tree.leaves(params))
    want = [("all-reduce", size, 1)] if size else []
    assert collectives_of(gradients(unit), params, batch) == want


@only_own_rules
@conv_plainly
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


@own_rules
def test_arrays_on_a_mesh_beside_others(implementation):
    op, params, batch = setup("conv", implementation)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    mixed = batch | {"x": jax.device_put(batch["x"], NamedSharding(mesh, P("i")))}
    with jax.set_mesh(mesh):
        got = op(params, mixed, None)[0]
    assert_trees_close(got, op(params, batch, None)[0], 1e-12)


@only_own_rules
@conv_plainly
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


@pytest.fixture(scope="module")
def unsharded_gradients():
    """Return a function that computes gradients on one device, once per operator."""

    @functools.cache
    def run(name, implementation):
        op, params, batch = setup(name, implementation)
        return jax.jit(gradients(op))(params, batch)

    return run


@only_own_rules
@conv_plainly
def test_shard_map_over_one_of_two_axes(name, implementation, unsharded_gradients):
    op, params, batch = setup(name, implementation)
    mesh = mesh_of((4, 2), ("i", "j"))
    batch = jax.device_put(batch, NamedSharding(mesh, P(("i", "j"))))
    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i")), "axis_names": {"i"}}
    run = jax.jit(jax.shard_map(lambda p, b: gradients(op)(p, b), mesh=mesh, **specs))
    assert_trees_close(run(params, batch), unsharded_gradients(name, implementation), 1e-12)


@own_rules
@conv_plainly
def test_explicit_mesh_of_the_arguments(name, implementation, unsharded_gradients):
    """Without `jax.set_mesh`, the mesh is known from the types alone."""
    op, params, batch = setup(name, implementation)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    placed = (
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((params, P()), (batch, P("i")))
    )
    params, batch = placed
    y = jax.eval_shape(lambda p, b: op(p, b, None)[0], params, batch)
    assert y.sharding.spec[0] == "i"
    got = jax.jit(gradients(op))(params, batch)
    assert_trees_close(got, unsharded_gradients(name, implementation), 1e-12)


def vmap_cases():
    plain = {("conv", "kernel"), ("attention", "queries"), ("roi", "boxes")}
    for name, operator in {**OPERATORS, "dcn": DCN}.items():
        for mapped in operator.mapped:
            for implementation in (OWN_RULES, "xla") if mapped == "all" else (OWN_RULES,):
                is_plain = implementation == OWN_RULES and (name, mapped) in plain
                values = name, mapped, implementation
                yield values if is_plain else exhaustive(*values)


@pytest.mark.parametrize(
    ("name", "mapped", "implementation"), list(vmap_cases()), indirect=["implementation"]
)
def test_vmap(name, mapped, implementation):
    """Examples give the same as alone, and no loop over examples is added."""
    operator = {**OPERATORS, "dcn": DCN}[name]
    case = "all" if operator is CONV else operator.context_case
    c = operator.make(case, **operator.context_options)
    factor, axes = np.array([1.0, 0.5, 1.25]), operator.mapped[mapped]
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip(c.args, axes, strict=True)
    ]
    one = c.compile(implementation)
    mapped_axes = list(axes)
    run = jax.jit(jax.vmap(one, (mapped_axes, None))).lower(args, c.dy).compile()
    alone = one.lower(c.args, c.dy).compile()
    assert run.as_text().count(" while(") == alone.as_text().count(" while(")
    got = run(args, c.dy)
    for i in range(3):
        example = [a if x is None else a[i] for a, x in zip(args, axes, strict=True)]
        assert_trees_close([g[i] for g in got], alone(example, c.dy), 1e-12)


@only_own_rules
@conv_plainly
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
@conv_plainly
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
@conv_plainly
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


@only_own_rules
@conv_plainly
def test_scan_and_remat(name, implementation):
    """A stack of layers, each recomputed in the backward pass."""
    c = OPERATORS[name].make_context(implementation)
    x, *layer = c.args
    layers = [np.stack([a, 0.9 * a]) for a in layer]
    f = c.bind(implementation)

    def body(x, layer):
        return jnp.tanh(x + jnp.mean(f(x, *layer))), None

    def scanned(x, layers):
        return jnp.sum(lax.scan(jax.checkpoint(body), x, layers)[0] ** 2)

    def unrolled(x, layers):
        for i in range(2):
            x, _ = body(x, [a[i] for a in layers])
        return jnp.sum(x**2)

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, layers) for f in (scanned, unrolled))
    assert_trees_close(got, want, 1e-12)
