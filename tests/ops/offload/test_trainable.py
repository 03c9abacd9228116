"""Gradients of `offload_scan` with frozen parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import offload_scan, to_host
from tests.ops.offload.stacks import (
    LAYERS,
    WIDTH,
    assert_close,
    in_memory,
    inputs,
    is_low_rank,
    kinds,
    layer,
    low_rank_layer,
    params,
    value_and_grads,
)
from tests.tiers import vary

RANK = 2


def quantized():
    """Return low-rank matrices and frozen int8 kernels with their scales."""
    w = params()
    scale = jnp.abs(w["a"]).max((1, 2), keepdims=True) / 127
    keys = jax.random.split(jax.random.key(4))
    return {
        "kernel": jnp.round(w["a"] / scale).astype(jnp.int8),
        "scale": scale,
        "low": {
            "down": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, RANK)),
            "up": 0.1 * jax.random.normal(keys[1], (LAYERS, RANK, 2 * WIDTH)),
        },
        "out": w["b"].astype(jnp.bfloat16),
    }


def merged(low, w=None):
    return {**(w or quantized()), "low": low}


@vary(
    "options",
    [{"num_slices": 2, "num_microbatches": 2}, {"resident_slices": 1}, {"params_in": "device"}],
    ids=str,
)
def test_gradients_of_low_rank_parameters_match_in_memory(options):
    w = quantized()
    if options.get("params_in") != "device":
        w = to_host(w)
    run = lambda low, x: offload_scan(  # noqa: E731
        low_rank_layer, merged(low, w), x, trainable=is_low_rank, **options
    )
    got = value_and_grads(run, w["low"], inputs())
    m = options.get("num_microbatches", 1)
    plain = lambda low, x: in_memory(low_rank_layer, merged(low), x, None, m)  # noqa: E731
    want = value_and_grads(plain, quantized()["low"], inputs())
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert kinds(got[1][0]) == kinds(w["low"])


FLAGS = {
    "tree": {"a": True, "b": False, "c": np.True_},
    "path": lambda path, leaf: path[0].key != "b",
    "nothing": False,
}


@functools.cache
def all_gradients():
    return value_and_grads(lambda w, x: in_memory(layer, w, x, None), params(), inputs())


@pytest.mark.parametrize(
    ("name", "params_in"), [("tree", "host"), ("path", "device"), ("nothing", "host")]
)
def test_gradients_of_frozen_parameters_are_zeros(name, params_in):
    w = params() if params_in == "device" else to_host(params())
    run = functools.partial(offload_scan, layer, params_in=params_in, trainable=FLAGS[name])
    value, (dw, dx) = value_and_grads(run, w, inputs())
    want_value, (want_dw, want_dx) = all_gradients()
    frozen = params() if name == "nothing" else {"b": params()["b"]}
    want_dw = want_dw | jax.tree.map(jnp.zeros_like, frozen)
    assert_close((value, dw, dx), (want_value, want_dw, want_dx), rtol=1e-5, atol=1e-6)
    assert kinds(dw) == kinds(w)


def test_rejects_flags_of_other_parameters():
    with pytest.raises(ValueError, match="`trainable` must be .* a prefix of the parameters"):
        offload_scan(layer, params(), inputs(), trainable={"a": True, "b": False})
