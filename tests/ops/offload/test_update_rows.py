"""Updates of large parameters in rows, against updates of whole matrices."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from effjax import offload_train_step, to_host
from effjax.ops.offload import row_update
from effjax.ops.offload.optimizer import (
    OffloadParams,
    apply_optimizer,
    make_clip,
    with_clipping,
    with_full_paths,
)
from effjax.ops.offload.row_update import plan_rows, update_params
from effjax.optimizers import (
    adamw_8bit,
    in_24_bits,
    in_float32,
    stochastic_rounding,
    with_matmul_precision,
)
from tests.ops.offload.stacks import assert_close, to_numpy
from tests.ops.offload.steps import every_row

# adafactor factors moments of at least 128 rows and columns; 8-bit moments have blocks of 256.
SHAPES = {"table": (1300, 260), "head": (160, 1000), "norm": (1000,)}
RATE = optax.linear_schedule(1e-2, 1e-3, 5)


def is_matrix(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def label(params):
    return {name: "first" if name == "table" else "second" for name in params}


# Optimizers whose update of a row depends on no other row.
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
        arrays(0), lambda w: OffloadParams({}, w), lambda params: params.others,
    ),
    "in 32 and 24 bits": lambda: optax.chain(
        in_24_bits(in_float32(optax.adam(1e-2))), stochastic_rounding(0)
    ),
}  # fmt: skip


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
    plan = plan_rows(tx, arrays(0), every_row)
    chunks = [leaf.num_rows / leaf.size for leaf in plan.large.values()]
    assert len(chunks) == 2 and min(chunks) > 1

    def in_chunks(clipped, w, state, grads):
        return update_params(clipped, plan, w, state, grads, 0)

    # XLA fuses the operations differently, and a rounding error can change an 8-bit code.
    tolerance = 1e-3 if "8" in name else 1e-5
    got, want = train(tx, in_chunks), train(tx, apply_optimizer)
    if "8" in name:
        got, want = got[0], want[0]
    assert_close(got, want, tolerance)


def test_parameters_are_updated_whole_by_default():
    large = plan_rows(optax.adamw(1e-2), arrays(0), None).large
    assert [leaf.in_rows for leaf in large.values()] == [False, False]  # head and table


def head_only(path, leaf):
    assert leaf.shape == SHAPES[path[0].key]
    return path[0].key == "head"


def test_predicate_selects_by_path():
    """An optimizer that mixes the rows of other parameters is no error."""
    tx = optax.partition({"first": optax.adafactor(1e-2), "second": optax.adam(1e-2)}, label)
    large = plan_rows(tx, arrays(0), head_only).large
    assert [leaf.in_rows for leaf in large.values()] == [True, False]


NORM = optax.GradientTransformation(
    lambda params: jnp.zeros(()), lambda grads, state, params=None: (grads, optax.tree.norm(grads))
)
# Optimizers with a state that has no row for each row, and the entry that the error names.
WITHOUT_ROWS = {
    "factored": (optax.adafactor(1e-2), (1300, 260), r"v_row\['w'\] of shape \(260,\)"),
    "factored square": (optax.adafactor(1e-2), (512, 512), r"v_(row|col)\['w'\] of shape \(512,\)"),
    "number": (optax.novograd(1e-2), (1300, 260), r"nu\['w'\] of shape \(\)"),
    "blocks": (adamw_8bit(1e-2), (200_000,), r"mu_scale\['w'\] of shape \(782,\)"),
    "masked by rows": (
        optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda a: a.shape[0] > 1000, p)),
        (1300, 260), r"mu\['w'\]",
    ),
    "of several parameters": (optax.chain(optax.adam(1e-2), NORM), (1300, 260), r"\[1\] "),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_rejects_state_without_rows(name):
    tx, shape, entry = WITHOUT_ROWS[name]
    w = {"v": jnp.zeros(3), "w": jnp.zeros(shape)}
    match = rf"^`update_rows` must return False for \['w'\] .*the optimizer's state.*{entry}"
    with pytest.raises(ValueError, match=match):
        plan_rows(tx, w, every_row)
    # Small parameters are updated whole anyway.
    assert not plan_rows(tx, {"v": jnp.zeros(3), "w": jnp.zeros(7)}, every_row).large


@pytest.mark.parametrize("answer", [None, 1, "head", jnp.bool_(True)])
def test_rejects_answer_that_is_no_bool(answer):
    with pytest.raises(TypeError, match=r"`update_rows` must return a bool, not .* \['head'\]"):
        plan_rows(optax.sgd(0.5), arrays(0), lambda path, leaf: answer)


def test_rejects_predicate_that_selects_nothing():
    init, _ = start(others_in="host", update_rows=lambda path, leaf: path[0].key == "embedding")
    with pytest.raises(ValueError, match=r"`update_rows` must select .* \['a'\], \['b'\]"):
        init(*to_host(({"w": jnp.ones((2, 3, 3))}, {"a": jnp.ones(3), "b": jnp.ones(3)})))
    init, _ = start(others_in="host", update_rows=every_row, trainable_others=False)
    with pytest.raises(ValueError, match="`update_rows` must select .* there are none"):
        init(*to_host(({"w": jnp.ones((2, 3, 3))}, {"a": jnp.ones(3)})))


def test_rejects_predicate_for_parameters_on_the_device():
    with pytest.raises(ValueError, match="`update_rows` needs others_in='host'"):
        start(update_rows=every_row)


def start(**options):
    return offload_train_step(
        lambda others, batch, key: batch * others["a"], lambda w, x, key: x @ w["w"],
        lambda others, x, batch, key: x.sum(), optax.adam(1e-2), **options,
    )  # fmt: skip
