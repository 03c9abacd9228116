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


def params():
    keys, shapes = jax.random.split(jax.random.key(0), 3), [(8, 16), (16, 16), (16, 4)]
    return [{"w": 0.4 * jax.random.normal(*args)} for args in zip(keys, shapes, strict=True)]


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


@vary(
    ("options", "num_microbatches", "policy", "platform"),
    [
        ({"num_slices": 2}, 2, "everything", "cpu"),
        ({}, 1, "recomputed", "tpu"),
        ({"num_slices": 2, "activations_in": "device"}, 2, "dots", "tpu"),
        ({"params_in": "device"}, 1, "recomputed", "cpu"),
    ],
    ids=str,
)
def test_loss_and_gradients_match_in_memory(options, num_microbatches, policy, platform):
    def with_counts(h):
        return {"h": h, "n": jnp.zeros(h.shape[0], jnp.int32)}

    more = {"key": KEY, "num_microbatches": num_microbatches, "policy": POLICIES[policy]}

    def run(params, h):
        return offload_sequential(LAYERS, params, with_counts(h), **more, **options)["h"]

    def plain(params, h):
        results = []
        for m, rows in enumerate(jnp.split(h, num_microbatches)):
            x = with_counts(rows)
            for i, (layer, w) in enumerate(zip(LAYERS, params, strict=True)):
                x = layer(w, x, key_of(KEY, i, m))
            results.append(x["h"])
        return jnp.concatenate(results)

    w = params() if options.get("params_in") == "device" else to_host(params())
    with trace_for_platform(platform):
        got = value_and_grads(run, w, inputs())
    assert_close(got, value_and_grads(plain, params(), inputs()), 1e-9)
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
