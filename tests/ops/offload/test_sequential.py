"""offload_sequential compared with the same layers in device memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import offload_sequential, to_host
from effjax.ops._common.platform import trace_for_platform
from effjax.ops.offload.sequential import split_by_bytes
from tests.ops.offload.stacks import (
    KEY,
    POLICIES,
    assert_close,
    inputs,
    key_of,
    kinds,
    loss,
    value_and_grads,
)
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")

WIDTHS = 8, 16, 16, 4


def params():
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    sizes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [{"w": 0.4 * jax.random.normal(k, (a, b))} for k, a, b in sizes]


def dense(w, x, key):
    h = jnp.tanh(x["h"] @ w["w"])
    return {"h": jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0), "n": x["n"] + 1}


def fork(w, x, key):
    """Return another structure of two tensors, both with a gradient."""
    y = dense(w, x, key)
    return {**y, "skip": (x["h"].sum(-1), y["h"] * 2)}


def join(w, x, key):
    y = dense(w, {"h": x["h"] + x["skip"][1], "n": x["n"]}, key)
    return {**y, "h": y["h"] * x["skip"][0][:, None]}


LAYERS = [fork, join, dense]


def in_memory(params, h, num_microbatches):
    def one(m, h):
        x = {"h": h, "n": jnp.zeros(h.shape[0], jnp.int32)}
        for i, (layer, w) in enumerate(zip(LAYERS, params, strict=True)):
            x = layer(w, x, key_of(KEY, i, m))
        return x["h"]

    parts = jnp.split(h, num_microbatches)
    return jnp.concatenate([one(m, part) for m, part in enumerate(parts)])


def offloaded(params, h, **options):
    x = {"h": h, "n": jnp.zeros(h.shape[0], jnp.int32)}
    y = offload_sequential(LAYERS, params, x, key=KEY, **options)
    return y["h"]


def want(num_microbatches):
    run = functools.partial(in_memory, num_microbatches=num_microbatches)
    return value_and_grads(run, params(), inputs())


@vary(
    ("options", "num_microbatches", "policy", "platform"),
    [
        ({"num_slices": 2}, 2, "everything", "cpu"),
        ({}, 1, "recomputed", "tpu"),
        ({"num_slices": 2, "activations": "device"}, 2, "dots", "tpu"),
        ({"params_in": "device"}, 1, "recomputed", "cpu"),
    ],
    ids=str,
)
def test_loss_and_gradients_match_in_memory(options, num_microbatches, policy, platform):
    run = functools.partial(
        offloaded, num_microbatches=num_microbatches, policy=POLICIES[policy], **options
    )
    w = params() if options.get("params_in") == "device" else to_host(params())
    with trace_for_platform(platform):
        got = value_and_grads(run, w, inputs())
    assert_close(got, want(num_microbatches), 1e-9)
    assert kinds(got[1][0]) == kinds(w) and kinds(got[1][1]) == {"device"}


@pytest.mark.parametrize(
    ("sizes", "num_slices", "bounds"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([9, 1, 1, 1], 3, [0, 1, 2, 4]),
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([4], 1, [0, 1]),
    ],
)
def test_split_by_bytes_balances_slices(sizes, num_slices, bounds):
    assert split_by_bytes([np.zeros(n, np.int8) for n in sizes], num_slices) == bounds


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        (
            r"`layers` \(of length 3\) and `params` \(of length 2\)",
            {"params": to_host(params()[:2])},
        ),
        (r"`num_slices` \(=5\) must be at most the number of layers \(=3\)", {"num_slices": 5}),
        (r"`params` must be in host memory, but", {"params": params()}),
    ],
)
def test_rejects_invalid_input(match, arguments):
    x = {"h": inputs(), "n": jnp.zeros(8, jnp.int32)}
    call = {"layers": LAYERS, "params": to_host(params()), "x": x, "key": KEY, **arguments}
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: offload_sequential(**call))


@vary("options", [{}, {"num_slices": 1, "num_microbatches": 2}], ids=str)
def test_gradients_of_shared_arrays_are_summed(options):
    """Layers share all or some leaves, in jit and outside."""
    tanh = lambda w, x, key: jnp.tanh(x @ w["w"] + w["b"])  # noqa: E731
    own = {"w": jnp.eye(8), "b": jnp.arange(8) / 8}, {"w": jnp.ones((8, 8)) / 8, "b": jnp.ones(8)}

    def places(a, b):
        return [a, {**b, "b": a["b"]}, a, b]

    def in_memory(a, b):
        return functools.reduce(lambda x, w: tanh(w, x, None), places(a, b), inputs())

    def run(a, b):
        return offload_sequential([tanh] * 4, places(a, b), inputs(), **options)

    want = value_and_grads(in_memory, *own)
    got = value_and_grads(run, *to_host(own))
    assert_close(got, want, 1e-9)
    assert kinds(got[1]) == {"pinned_host"}
    assert_close(
        jax.grad(lambda a: loss(run(a, to_host(own[1]))))(to_host(own[0])), want[1][0], 1e-9
    )


def test_rejects_gradient_of_integer_parameters():
    w = [{"w": to_host(jnp.ones((8, 8), jnp.int8))}]
    run = lambda x: offload_sequential([lambda w, x, key: x @ w["w"]], w, x)  # noqa: E731
    assert run(inputs()).shape == (8, 8)
    with pytest.raises(TypeError, match=r"`params`.*\['w'\] must be floating-point .* int8"):
        jax.grad(lambda x: loss(run(x)))(inputs())
