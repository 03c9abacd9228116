"""Residuals that a checkpoint policy saves for the backward pass."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import to_host
from tests.ops.offload.stacks import (
    LAYERS,
    OFFLOADED,
    POLICIES,
    WIDTH,
    assert_close,
    casting,
    in_memory,
    kinds,
    layer,
    named,
    offloaded,
    params,
)
from tests.tiers import vary

ROWS = 6  # unlike any axis of the parameters


def inputs():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def kept(apply, x):
    """Count the shapes of the residuals other than the parameters and the key."""
    pull = jax.eval_shape(lambda w, x: jax.vjp(apply, w, x)[1], to_host(params()), x)
    shapes = Counter(a.shape for a in jax.tree.leaves(pull) if a.shape)
    shapes.subtract(a.shape for a in jax.tree.leaves(params()))
    return shapes


@pytest.mark.parametrize(
    ("layer", "policy", "features"),
    [
        (layer, POLICIES["nothing"], [WIDTH]),
        (layer, POLICIES["dots"], [WIDTH, 2 * WIDTH]),
        (casting, POLICIES["dots"], [WIDTH, 2 * WIDTH]),
        (named, POLICIES["names"], [WIDTH, 2 * WIDTH]),
        (named, OFFLOADED, [WIDTH, 2 * WIDTH]),
    ],
)
def test_residuals_follow_policy(layer, policy, features):
    """The residuals are the input of each layer and the values that the policy saves."""
    shapes = [(LAYERS, 1, ROWS, n) for n in features]
    assert +kept(offloaded(layer, policy=policy), inputs()) == Counter(shapes)


@pytest.mark.parametrize(
    ("layer", "num_slices", "num_microbatches", "compute_dtype"),
    [(casting, 2, 2, None), (layer, None, 1, "bfloat16")],
)
def test_residuals_hold_parameters_once(layer, num_slices, num_microbatches, compute_dtype):
    """Saving everything saves no copy of the parameters in another dtype."""
    options = {"num_slices": num_slices, "num_microbatches": num_microbatches}
    options |= {"compute_dtype": compute_dtype, "policy": POLICIES["everything"]}
    shapes = kept(offloaded(layer, **options), inputs())
    assert min(shapes.values()) == 0
    assert {shape[-2] for shape in +shapes} == {ROWS // num_microbatches}


@vary(("activations_in", "policy"), [("host", POLICIES["names"]), ("device", OFFLOADED)])
def test_activations_in_sets_memory_of_residuals(activations_in, policy):
    """The option takes precedence over the policy."""
    options = {"num_slices": 2, "num_microbatches": 2}
    apply = offloaded(named, policy=policy, activations_in=activations_in, **options)
    pull_back = lambda apply: jax.jit(lambda w, x: jax.vjp(apply, w, x)[1])  # noqa: E731
    pull = pull_back(apply)(to_host(params()), inputs())
    shapes = {a.shape for a in jax.tree.leaves(params())}
    residuals = [a for a in jax.tree.leaves(pull) if a.ndim > 1 and a.shape not in shapes]
    assert kinds(residuals) == {"pinned_host" if activations_in == "host" else "device"}
    cotangent = jnp.ones((ROWS, WIDTH))
    got = jax.jit(lambda pull: pull(cotangent))(pull)
    plain = lambda w, x: in_memory(named, w, x, None, 2)  # noqa: E731
    want = jax.jit(lambda w, x: jax.vjp(plain, w, x)[1](cotangent))(params(), inputs())
    assert_close(got, want, 2e-5, 2e-6)


@vary("form", ["stack", "list"])
def test_forward_pass_alone_does_not_linearize(form):
    asked = []

    def policy(prim, *_, **__):
        asked.append(prim)
        return True

    apply = offloaded(layer, form, policy=policy)
    y = jax.jit(apply)(to_host(params()), inputs())
    assert not asked
    np.testing.assert_allclose(y, in_memory(layer, params(), inputs(), None), rtol=1e-5, atol=1e-6)
    jax.jit(jax.grad(lambda w: apply(w, inputs()).sum()))(to_host(params()))
    assert asked
