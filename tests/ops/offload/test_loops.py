"""Loops over slices: any number of turns, in the form for TPUs too."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from effjax import to_host
from effjax.ops._common.platform import trace_for_platform
from effjax.ops.offload.backends import run_as_loop, scan_slices
from tests.ops.offload.stacks import (
    assert_equal_bits,
    kinds,
    to_numpy,
)


def test_scan_in_pairs_matches_scan():
    """Without a pair, with one pair, and with two pairs and a single turn."""

    def body(carry, x):
        host, total = carry
        total = 2 * total + x
        return (host, total), (total, jax.device_put(total + 1, jax.memory.Space.Host), key)

    key = jax.random.key(3)

    def run(scan):
        carry = to_host(jnp.ones(2)), jnp.int32(1)
        cases = itertools.product((1, 2, 5), (False, True))
        return [scan(body, carry, jnp.arange(n), n, reverse) for n, reverse in cases]

    with trace_for_platform("tpu"):
        got = jax.jit(lambda: run(scan_slices))()
        want = jax.jit(lambda: run(lambda *args: lax.scan(*args[:4], reverse=args[4])))()
    assert kinds([outputs[1] for _, outputs in got]) == {"pinned_host"}
    assert_equal_bits(to_numpy(got), to_numpy(want))


def test_xla_keeps_loop_of_one_iteration():
    run = jax.jit(lambda x: run_as_loop(lambda x: 3 * x + 1, x))
    assert run(jnp.float32(2)) == 7
    assert " while(" in run.lower(jnp.ones(100)).compile().as_text()
