"""Values, gradients and residuals of every sampling operator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from effjax.ops._common.platform import trace_for_platform
from effjax.ops.samplers.roi import reference as roi_reference
from tests.contexts import assert_trees_close
from tests.ops.battery import (
    every_implementation,
    only_own_rules,
    own_rules_or_xla,
)
from tests.ops.samplers.deform_attention.cases import ATTENTION, DCN
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import OPERATOR as ROI
from tests.tiers import vary

OPERATORS = {"conv": CONV, "attention": ATTENTION, "dcn": DCN, "roi": ROI}
all_operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
double = pytest.mark.usefixtures("x64")


CASES = [
    pytest.param(operator, case, id=f"{name}-{case}")
    for name, operator in OPERATORS.items()
    for case in operator.cases
]
SIZES = [
    pytest.param(operator, case, options, id=f"{name}-{case}-{options}")
    for name, operator in OPERATORS.items()
    for case, options in operator.sizes
]


@double
@own_rules_or_xla
@pytest.mark.parametrize(("operator", "case"), CASES)
def test_matches_float64_oracle(operator, case, implementation):
    c = operator.make(case)
    assert_trees_close(c.got(implementation), c.want(), 1e-13)


@all_operators
def test_oracle_gradients_match_differences(operator):
    c, rng = operator.derivatives(), np.random.default_rng(3)
    gradients, step = c.want()[1:], 1e-6
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)

        def loss(sign, i=i, direction=direction):
            args = list(c.args)
            args[i] = args[i] + sign * step * direction
            return np.sum(c.dy * c.oracle(*args, c.dy)[0])

        difference = (loss(1) - loss(-1)) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), difference, rtol=1e-6)


@double
@own_rules_or_xla
@pytest.mark.parametrize(("operator", "case", "options"), SIZES)
def test_empty_and_odd_sizes(operator, case, options, implementation):
    c = operator.make(case, **options)
    assert_trees_close(c.got(implementation), c.want(), 1e-12)


@double
@own_rules_or_xla
@vary("name, kilobytes", [("conv", 36), ("conv", 4), ("conv", 150), ("attention", 1)])
def test_slices(name, kilobytes, implementation):
    """Slices of one element, of all, and slices whose last one is smaller."""
    case = {"conv": "one_sided", "attention": "levels"}[name]
    c = OPERATORS[name].make(case, batch=3)
    got = c.got(implementation, workspace_bytes=1000 * kilobytes)
    assert_trees_close(got, c.want(), 1e-13)


@all_operators
@every_implementation
def test_float32_matches_float64_oracle(operator, implementation):
    more = {ROI: {"channels": 72}, DCN: {"depth": 72}}.get(operator, {})
    c = operator.make(operator.plain_case, batch=1, dtype=np.float32, **more)
    c.args = [a if a is None else a.astype(np.float32) for a in c.args]
    options = {"precision": "highest"} if operator is CONV else {}
    assert_trees_close(c.got(implementation, **options), c.want(), 2e-6)


@double
@vary(
    "name, mode, order",
    [
        ("conv", "fwd", 1),
        ("attention", "fwd", 1),
        ("dcn", "fwd", 1),
        ("roi", "fwd", 1),
        ("conv", "rev", 2),
        ("attention", "rev", 2),
        ("roi", "rev", 2),
    ],
)
def test_forward_mode_and_second_order_of_xla(name, mode, order):
    operator = OPERATORS[name]
    # JAX differentiates pooling only with a fixed number of samples.
    case = {"conv": ["one_sided"], "roi": ["offset"]}.get(name, [])
    c = operator.derivatives(*case)
    options = {} if operator is ROI else {"workspace_bytes": 1}
    f, n = c.bind("xla", **options), c.differentiable
    run = jax.jit(lambda *args: f(*args, *c.args[n:]))
    check_grads(run, c.args[:n], order=order, modes=[mode], atol=1e-5, rtol=1e-5, eps=1e-5)


@pytest.mark.parametrize("operator", [CONV, ATTENTION], ids=["conv", "attention"])
@own_rules_or_xla
def test_residuals_are_the_inputs(operator, implementation):
    """The backward pass keeps no copies, and a scan none of its stacked inputs."""
    c = operator.make_context(implementation, dtype=np.float32)
    x, *layer = (jnp.asarray(a, jnp.float32) for a in c.args if a is not None)
    layers = [jnp.stack([a] * 3) for a in layer]
    f = c.bind(implementation)

    def network(x, *layers):
        def body(total, layer):
            return total + jnp.mean(f(x + total, *layer)), None

        return lax.scan(body, 0.0, layers)[0]

    one, run = jax.jit(f), jax.jit(network)
    kept = jax.tree.leaves(jax.vjp(one, x, *layer)[1])
    pointers = {a.unsafe_buffer_pointer() for a in kept}
    # A bias is not needed for the gradients.
    needed = [x, *layer][: 4 if operator is CONV else None]
    assert pointers >= {a.unsafe_buffer_pointer() for a in needed}
    assert sum(a.size for a in kept) <= sum(a.size for a in (x, *layer))
    pointers = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(jax.vjp(run, x, *layers)[1])}
    needed = layers[: 3 if operator is CONV else None]
    assert pointers >= {a.unsafe_buffer_pointer() for a in needed}


@all_operators
@only_own_rules
def test_runs_are_equal_to_the_bit(operator, implementation, optimized):
    c = operator.make(operator.plain_case, batch=4, dtype=np.float32)
    c.args = [a if a is None else a.astype(np.float32) for a in c.args]
    options = {"deterministic": True} if operator is CONV else {}
    run = c.compile(implementation, **options, **operator.options)
    first, *others = (run(c.args, c.dy) for _ in range(20))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@double
@vary("implementation", ["default", "xla"], indirect=True)
@pytest.mark.parametrize(
    ("operator", "case", "options"),
    [
        (ATTENTION, "levels", {"queries": 300}),
        (CONV, "one_sided", {"batch": 3}),
        (DCN, "even", {}),
        (ROI, "offset", {}),
    ],
    ids=["attention", "conv", "dcn", "roi"],
)
def test_slices_of_a_tpu(operator, case, options, implementation, monkeypatch):
    """Programs that are traced for a TPU; they run on the CPU here."""
    c = operator.make(case, **options)
    monkeypatch.setattr(roi_reference, "TPU_SLICE_BYTES", 100_000)
    options = {} if operator is ROI else {"workspace_bytes": 200_000}
    with trace_for_platform("tpu"):
        got = c.got(implementation, **options)
    assert_trees_close(got, c.want(), 1e-12)
