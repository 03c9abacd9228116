"""Residuals that a checkpoint policy saves for the backward pass."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from effjax import offload_scan, offload_sequential, to_device, to_host
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_close,
    in_memory,
    kinds,
    layer,
    params,
    value_and_grads,
)
from tests.tiers import vary

ROWS = 6  # unlike any axis of the parameters
NAMES = jax.checkpoint_policies.save_only_these_names("h")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip


def inputs():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def casting(w, x, key):
    """Compute large values from the parameters alone and from constants."""
    half = jax.tree.map(lambda a: (2 * a).astype(jnp.bfloat16), w)
    h = jnp.tanh(x.astype(jnp.bfloat16) @ half["a"] + half["c"])
    table = jnp.cos(jnp.arange(2 * WIDTH * WIDTH).reshape(WIDTH, -1)).astype(jnp.bfloat16)
    return x + (h @ (half["b"] + table.T)).astype(x.dtype)


def named(w, x, key):
    return layer({**w, "c": 0 * w["c"]}, checkpoint_name(x @ w["a"], "h") @ w["b"] + x, key)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def composed(w, x, key):
    """Combine a custom derivative, a loop, a branch and a constant."""
    h = jax.jit(jnp.sin)(doubled(x) @ w["a"]) * np.linspace(0.5, 1, 2 * WIDTH, dtype="float32")
    h, sums = lax.scan(lambda h, c: (jnp.tanh(h + c), h.sum(1)), h, jnp.stack([w["c"]] * 2))
    y = lax.cond(sums[0, 0] > 0, jnp.sin, jnp.cos, h @ w["b"])
    return x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0)


def key_for(layer):
    """Return the key of the layer that needs one."""
    return KEY if layer is composed else None


def offloaded(layer, sequential=False, **options):
    options = {"key": key_for(layer), **options}

    def apply(w, x):
        if not sequential:
            return offload_scan(layer, w, x, **options)
        w = [jax.tree.map(lambda a, i=i: to_host(to_device(a)[i]), w) for i in range(LAYERS)]
        return offload_sequential([layer] * LAYERS, w, x, **options)

    return apply


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
        (named, NAMES, [WIDTH, 2 * WIDTH]),
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


@vary(
    ("layer", "sequential", "num_microbatches", "policy"),
    [
        (composed, True, 1, "everything"),
        (composed, False, 2, "recomputed"),
        (casting, True, 1, "nothing"),
        (named, True, 2, "dots"),
        (jax.checkpoint(named, policy=OFFLOADED, prevent_cse=False), True, 2, "everything"),
    ],
)
def test_gradients_match_in_memory(layer, sequential, num_microbatches, policy):
    options = {"num_microbatches": num_microbatches, "num_slices": 2, "policy": POLICIES[policy]}
    # XLA may omit a rounding to bfloat16 in one program and not in the other.
    run = functools.partial(value_and_grads, xla_allow_excess_precision=False)
    got = run(offloaded(layer, sequential, **options), to_host(params()), inputs())
    plain = functools.partial(in_memory, layer)
    want = run(lambda w, x: plain(w, x, key_for(layer), num_microbatches), params(), inputs())
    tolerance = 2e-2 if layer is casting else 2e-5
    assert_close(got, want, rtol=tolerance, atol=tolerance / 10)


@vary(("activations", "policy"), [("host", NAMES), ("device", OFFLOADED)])
def test_activations_sets_memory_of_residuals(activations, policy):
    """The option takes precedence over the policy."""
    options = {"num_slices": 2, "num_microbatches": 2}
    apply = offloaded(named, policy=policy, activations=activations, **options)
    pull_back = lambda apply: jax.jit(lambda w, x: jax.vjp(apply, w, x)[1])  # noqa: E731
    pull = pull_back(apply)(to_host(params()), inputs())
    shapes = {a.shape for a in jax.tree.leaves(params())}
    residuals = [a for a in jax.tree.leaves(pull) if a.ndim > 1 and a.shape not in shapes]
    assert kinds(residuals) == {"pinned_host" if activations == "host" else "device"}
    cotangent = jnp.ones((ROWS, WIDTH))
    got = jax.jit(lambda pull: pull(cotangent))(pull)
    plain = lambda w, x: in_memory(named, w, x, None, 2)  # noqa: E731
    want = jax.jit(lambda w, x: jax.vjp(plain, w, x)[1](cotangent))(params(), inputs())
    assert_close(got, want, 2e-5, 2e-6)


@vary(("dtype", "rows"), [("bfloat16", ROWS), ("float16", 0)])
def test_half_precision_and_empty_batches(dtype, rows):
    w, x = jax.tree.map(lambda a: a.astype(dtype), (params(), inputs()[:rows]))
    total = lambda apply: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda w, x: apply(w, x).astype(jnp.float32).sum(), (0, 1))
    )
    got = total(offloaded(layer, policy=POLICIES["everything"]))(to_host(w), x)
    want = total(lambda w, x: in_memory(layer, w, x, None))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=0.05, atol=0.05
        )


@vary("sequential", [False, True])
def test_forward_pass_alone_does_not_linearize(sequential):
    asked = []

    def policy(prim, *_, **__):
        asked.append(prim)
        return True

    apply = offloaded(layer, sequential, policy=policy)
    y = jax.jit(apply)(to_host(params()), inputs())
    assert not asked
    np.testing.assert_allclose(y, in_memory(layer, params(), inputs(), None), rtol=1e-5, atol=1e-6)
    jax.jit(jax.grad(lambda w: apply(w, inputs()).sum()))(to_host(params()))
    assert asked
