"""Values and gradients of every sampling operator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from effjax.ops._common.platform import trace_for_platform
from effjax.ops.samplers.roi import reference as roi_reference
from tests.contexts import assert_trees_close
from tests.ops.battery import IMPLEMENTATIONS, own_rules_or_xla
from tests.ops.samplers.deform_attention.cases import ATTENTION, DCN
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import OPERATOR as ROI
from tests.tiers import vary

OPERATORS = {"conv": CONV, "attention": ATTENTION, "dcn": DCN, "roi": ROI}
all_operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
double = pytest.mark.usefixtures("x64")


CASES = [
    pytest.param(operator, case, options, id=f"{name}-{case}-{options or ''}")
    for name, operator in OPERATORS.items()
    for case, options in [*((case, {}) for case in operator.cases), *operator.sizes]
]


@double
@own_rules_or_xla
@pytest.mark.parametrize(("operator", "case", "options"), CASES)
def test_matches_float64_oracle(operator, case, options, implementation):
    c = operator.make(case, **options)
    assert_trees_close(c.got(implementation), c.want(), 1e-12 if options else 1e-13)


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
@vary("name, kilobytes", [("conv", 36), ("conv", 4), ("conv", 150), ("attention", 1)])
def test_chunks(name, kilobytes, implementation):
    """Chunks of one element, of all, and chunks whose last one is smaller."""
    case = {"conv": "one_sided", "attention": "levels"}[name]
    c = OPERATORS[name].make(case, batch=3)
    got = c.got(implementation, chunk_bytes=1000 * kilobytes)
    assert_trees_close(got, c.want(), 1e-13)


@all_operators
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_float32_matches_float64_oracle(operator, implementation):
    more = {ROI: {"channels": 72}, DCN: {"depth": 72}}.get(operator, {})
    c = operator.make(operator.plain_case, batch=1, **more)
    c.cast(np.float32)
    options = {"precision": "highest"} if operator is CONV else {}
    assert_trees_close(c.got(implementation, **options), c.want(), 2e-6)


@own_rules_or_xla
@vary("image, others", [("bfloat16", "float32"), ("float16",) * 2, ("bfloat16",) * 2])
@pytest.mark.parametrize(
    ("operator", "case", "options"),
    [
        (ATTENTION, "wide", {"queries": 9}),
        (DCN, "plain", {"depth": 16}),
        (ROI, "offset", {}),
        (ROI, "by_position", {}),
    ],
    ids=["attention", "dcn", "roi", "roi by_position"],
)
def test_half_precision_rounds_once(operator, case, options, image, others, implementation):
    """Positions and sums, in chunks too, are float32; results are rounded to the dtypes."""
    c = operator.make(case, **options)
    c.cast(image, *[others] * (c.differentiable - 1), "float32")
    chunks = {"chunk_bytes": 20_000} if operator.options else {}
    got, want = c.got(implementation, **chunks), c.want()
    assert [str(a.dtype) for a in got] == [image, image, *[others] * (c.differentiable - 1)]
    for a, b in zip(got, want, strict=True):
        half = 0.51 * float(jnp.finfo(a.dtype).eps)
        atol = 1e-5 * max(10, np.abs(b).max())
        np.testing.assert_allclose(np.asarray(a, "f8"), b, rtol=half, atol=atol)


@double
@all_operators
@vary("image, others, tolerance", [("float32", "float64", 1e-6), ("bfloat16", "float32", 1e-2)])
def test_results_have_the_dtype_of_the_image(operator, image, others, tolerance):
    """Gradients have the dtypes of the arguments."""
    c = operator.make(operator.context_case, **operator.context_options)
    c.cast(image, others)
    got = c.got(None)
    assert [str(a.dtype) for a in got] == [image, image, *[others] * (len(got) - 2)]
    assert_trees_close(got[0], c.want()[0], tolerance)


@double
@vary(
    "name, mode, order",
    [(name, "fwd", 1) for name in OPERATORS]
    + [(n, "rev", 2) for n in ("conv", "attention", "roi")],
)
def test_forward_mode_and_second_order_of_xla(name, mode, order):
    operator = OPERATORS[name]
    # JAX differentiates pooling only with a fixed number of samples.
    case = {"conv": ["one_sided"], "roi": ["offset"]}.get(name, [])
    c = operator.derivatives(*case)
    options = {} if operator is ROI else {"chunk_bytes": 1}
    f, n = c.bind("xla", **options), c.differentiable
    run = jax.jit(lambda *args: f(*args, *c.args[n:]))
    check_grads(run, c.args[:n], order=order, modes=[mode], atol=1e-5, rtol=1e-5, eps=1e-5)


@all_operators
def test_runs_are_equal_to_the_bit(operator, optimized):
    c = operator.make(operator.plain_case, batch=4)
    c.cast(np.float32)
    options = {"deterministic": True} if operator is CONV else {}
    run = c.compile(None, **options, **operator.options)
    first, *others = (run(c.args, c.dy) for _ in range(20))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


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
def test_chunks_of_a_tpu(operator, case, options, implementation, monkeypatch):
    """Programs that are traced for a TPU; they run on the CPU here."""
    c = operator.make(case, **options)
    monkeypatch.setattr(roi_reference, "TPU_CHUNK_BYTES", 100_000)
    options = {} if operator is ROI else {"chunk_bytes": 200_000}
    with trace_for_platform("tpu"):
        got = c.got(implementation, **options)
    assert_trees_close(got, c.want(), 1e-12)
