"""The list of optimizers that treat rows separately, against updates of whole matrices."""

import functools
import logging

import jax
import jax.numpy as jnp
import optax
import pytest

from effjax.ops.offload import mixing, row_update
from effjax.ops.offload.optimizer import (
    OffloadParams,
    apply_optimizer,
    make_clip,
    with_clipping,
    with_full_paths,
)
from effjax.ops.offload.row_update import find_mixing, plan_rows, update_rows
from effjax.optimizers import (
    adamw_8bit,
    in_24_bits,
    in_float32,
    stochastic_rounding,
    with_matmul_precision,
)
from tests.ops.offload.stacks import assert_close, to_numpy

# adafactor factors moments of at least 128 rows and columns; 8-bit moments have blocks of 256.
SHAPES = {"table": (1300, 260), "head": (160, 1000), "norm": (1000,)}
RATE = optax.linear_schedule(1e-2, 1e-3, 5)


def is_matrix(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def label(params):
    return {name: "first" if name == "table" else "second" for name in params}


# Each transformation of the list at least once.
SEPARATE = {
    "adamw": lambda: optax.adamw(RATE, mask=is_matrix),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=False),
    "momentum": lambda: with_matmul_precision(
        optax.sgd(0.5, momentum=0.9, nesterov=True), "highest"
    ),
    "noise": lambda: optax.chain(optax.sgd(0.5), optax.add_noise(0.0, 0.5, 0)),
    "partition": lambda: optax.partition(
        {"first": optax.adam(1e-2), "second": optax.sgd(0.5)}, label
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "8-bit": lambda: adamw_8bit(1e-2, weight_decay=0.1),
    "others": lambda: with_full_paths(
        optax.adamw(RATE, mask=lambda p: p._replace(others=is_matrix(p.others))),
        lambda w: OffloadParams({}, w), lambda params: params.others,
    ),
    "in 32 and 24 bits": lambda: optax.chain(
        in_24_bits(in_float32(optax.adam(1e-2))), stochastic_rounding(0)
    ),
}  # fmt: skip
# They depend on other rows, on the number of rows, or are not known.
MIXING = {
    "adafactor": lambda: optax.adafactor(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "skip": lambda: optax.MultiSteps(optax.sgd(0.5), 2, should_skip_update_fn=lambda *_: False),
    "own": lambda: optax.GradientTransformation(optax.sgd(0.5).init, lambda g, s, p: (g, s)),
    "in a chain": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_block_rms(1.0)),
    "masked": lambda: optax.masked(optax.centralize(), is_matrix),
    "rate of each row": lambda: optax.scale(jnp.ones((1300, 1))),
    "schedule of each row": lambda: optax.scale_by_schedule(lambda count: jnp.ones((1300, 1))),
    "partial": lambda: optax.GradientTransformation(
        optax.adam(1e-2).init, functools.partial(optax.adam(1e-2).update)
    ),
}


@pytest.fixture(autouse=True)
def chunks_of_many_rows(monkeypatch):
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 2**19)


@functools.cache
def arrays(i):
    keys = jax.random.split(jax.random.key(i), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def train(tx, update):
    """Return the parameters and the state after some steps with clipped gradients."""
    w = arrays(0)
    state = jax.tree.map(jnp.asarray, tx.init(w))

    @jax.jit
    def step(w, state, grads):
        norm = optax.tree.norm(grads)
        return update(with_clipping(tx, make_clip(0.5 * norm, "global", norm)), w, state, grads)

    for i in range(3):
        w, state = step(w, state, arrays(i + 1))
    return to_numpy((w, state))


@pytest.mark.parametrize("name", SEPARATE)
def test_update_in_chunks_is_that_of_whole_matrices(name):
    tx = SEPARATE[name]()
    plan = plan_rows(tx, arrays(0))
    chunks = [leaf.num_rows / leaf.size for leaf in plan.large.values() if leaf.factors]
    assert len(chunks) == 2 and min(chunks) > 1

    def in_chunks(clipped, w, state, grads):
        return update_rows(clipped, plan, w, state, grads, 0)

    # XLA fuses the operations differently, and a rounding error can change an 8-bit code.
    tolerance = 1e-3 if "8" in name else 1e-5
    got, want = train(tx, in_chunks), train(tx, apply_optimizer)
    if "8" in name:
        got, want = got[0], want[0]
    assert_close(got, want, tolerance)


def test_cases_cover_the_list():
    used = {name for make in SEPARATE.values() for name, _, _ in mixing._walk(make().update)}
    lists = mixing.SEPARATE_ROWS, mixing.WRAPPERS
    assert used == {
        f"{package}.{name}" for table in lists for package in table for name in table[package]
    }


@pytest.mark.parametrize("name", MIXING)
def test_unknown_transformations_are_updated_whole(name):
    assert find_mixing(MIXING[name]()) is not None


def test_wrapped_function_is_not_taken_for_the_original():
    inner = optax.adam(1e-2)

    @functools.wraps(inner.update)
    def normalized(grads, state, params=None):
        grads = jax.tree.map(lambda g: g / jnp.linalg.norm(g), grads)
        return inner.update(grads, state, params)

    mixing = find_mixing(optax.GradientTransformation(inner.init, normalized))
    assert mixing is not None and mixing.startswith("tests.")


def test_mask_that_depends_on_the_number_of_rows():
    tall = lambda params: jax.tree.map(lambda a: a.shape[0] > 1000, params)  # noqa: E731
    large = plan_rows(optax.adamw(1e-2, mask=tall), arrays(0)).large
    assert [leaf.factors is None for leaf in large.values()] == [False, True]  # head, table


def test_logs_why_parameters_are_updated_whole(caplog):
    row_update._log_whole.cache_clear()
    with caplog.at_level(logging.INFO, "effjax.ops.offload"):
        large = plan_rows(optax.lamb(1e-2), arrays(0)).large
        plan_rows(optax.lamb(1e-2), arrays(0))
    assert all(leaf.factors is None for leaf in large.values())
    (message,) = caplog.messages
    assert "optax.scale_by_trust_ratio is not on the list" in message
