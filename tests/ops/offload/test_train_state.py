"""The state of training steps, skipped steps, half precision, weights of losses, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from effjax import offload_jit, offload_train_step, to_host
from effjax.ops.offload.train_state import GROWTH_INTERVAL, LossScale, next_loss_scale
from tests.ops.offload import reference, steps
from tests.ops.offload.stacks import (
    BATCH,
    KEY,
    LAYERS,
    WIDTH,
    assert_close,
    assert_equal_bits,
    layer,
    params,
    to_numpy,
)
from tests.ops.offload.steps import ADAMW, TOKENS, embed, head, make_batches, make_training, others
from tests.tiers import vary

SGD = optax.sgd(0.5, momentum=0.9)


# Arrays of the state.


def test_first_step_donates_layers_only():
    args, options = make_training("stack", has_state=True)
    *functions, layers, others, (batch, _) = args
    init, step = offload_train_step(*functions, has_state=True)
    w, kept = to_host(layers), (others, options["model_state"])
    state, *_ = offload_jit(step)(init(w, *kept), batch)
    assert not any(a.is_deleted() for a in jax.tree.leaves(kept))
    assert all(a.is_deleted() for a in jax.tree.leaves(w))
    assert int(state.model_state["batches"]) == 1


def test_resumed_run_is_equal_to_the_bit():
    (*args, batches), options = make_training(
        "stack", tx=SGD, clip_norm=0.1, clip_by="previous", fuse_update=False, loss_scale=8.0,
        has_state=True,
    )  # fmt: skip

    def run(state, indices):
        for i in indices:
            state, *_ = step(state, batches[0], jax.random.fold_in(KEY, i))
        return state

    first, step = steps.start(*args, **options)
    saved = to_numpy(run(first, range(2)))
    first, _ = steps.start(*args, **options)
    resumed = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), saved, first)
    assert_equal_bits(run(resumed, range(2, 4)), run(first, range(4)))


def test_frozen_layers_of_a_tuple_have_no_optimizer_state():
    args = embed, tuple(steps.DIFFERENT), head, ADAMW, tuple(steps.different_params()), others()
    state = steps.check(*args, [TOKENS], tolerance=5e-6, trainable=(True, True, False, False))
    assert isinstance(state.layers, tuple)
    assert all(a.ndim == 0 for a in jax.tree.leaves(state.layers_state[2:]))


def test_layer_inputs_are_a_pytree_with_integers():
    def run_embed(others, batch, key):
        h = embed(others, batch["tokens"], key)
        return {"h": h, "skip": 2 * h, "n": batch["n"]}

    def run_head(others, x, batch, key):
        return head(others, x["h"] + x["n"][:, None] * x["skip"], batch["tokens"], key)

    def run_layer(w, x, key):
        h = layer(w, x["h"], key) + 0.1 * x["skip"]
        return {"h": h, "skip": x["skip"] * 0.9, "n": x["n"] + 1}

    batch = {"tokens": TOKENS, "n": TOKENS % 3}
    args = run_embed, run_layer, run_head, ADAMW, params(2), others(), [batch]
    steps.check(*args, tolerance=5e-6, num_microbatches=2, compiled=True)


def test_frozen_integer_others():
    def run_embed(others, batch, key):
        return others["codes"].astype(jnp.float32)[batch] * 0.1

    codes = {"codes": jnp.arange(11 * WIDTH, dtype=jnp.int8).reshape(11, WIDTH)}
    args = run_embed, layer, lambda others, x, batch, key: jnp.mean(x**2), ADAMW, params(), codes
    steps.check(*args, [TOKENS], tolerance=5e-6, trainable_others=False)


@pytest.mark.exhaustive
def test_closed_over_array_is_constant():
    def run(scale):
        layers = [lambda w, x, key: scale * steps.wide(w, x, key), *steps.DIFFERENT[1:]]
        init, step = offload_train_step(embed, layers, head, ADAMW, trainable=steps.is_trained)
        state, loss, *_ = step(init(to_host(steps.different_params()), others()), TOKENS)
        return loss, state.layers

    assert_close(jax.jit(run)(jnp.float32(0.5)), run(0.5), 5e-6)


def test_empty_batch():
    *functions, tx, layers, others, _ = make_training("list", tx=optax.sgd(0.1))[0]
    functions[2] = lambda others, x, batch, key: jnp.sum(x)
    batch = make_batches(TOKENS[:1], [1.0])[0]
    batches = [jax.tree.map(lambda a: a[:0], batch)]
    losses, (state, *_) = steps.train(
        *functions, tx, layers, others, batches, trainable=steps.is_trained
    )
    assert losses == [0]
    jax.tree.map(np.testing.assert_array_equal, state.layers, layers)


# Values that are not finite.


def test_skip_nonfinite_keeps_the_whole_state():
    (*args, _), options = make_training(
        "stack", tx=SGD, fuse_update=False, skip_nonfinite=True, has_state=True,
        num_microbatches=2, clip_norm=0.1, clip_by="previous",
    )  # fmt: skip
    state, step = steps.start(*args, **options)
    for factor in (1.0, 1e38, jnp.inf, jnp.nan, 1.0):
        before = to_numpy(state)
        state, loss, *_ = step(state, make_batches(TOKENS, [100 * factor])[0])
        if factor == 1:
            assert np.any(np.asarray(state.layers["a"]) != before.layers["a"])
        else:
            assert jnp.isnan(loss)
            assert_equal_bits(state, before)


def test_infinite_norm_is_not_stored():
    factors = 1.0, 1e25, jnp.inf, jnp.nan  # the gradients of 1e25 are finite
    (*args, batches), options = make_training(
        "stack", tx=optax.sgd(1e-26), factors=factors, clip_norm=0.1, clip_by="previous"
    )
    state, step = steps.start(*args, **options)
    norms = []
    for factor, batch in zip(factors, batches, strict=True):
        state, *_ = step(state, batch)
        norms.append(float(state.grad_norm))
        if factor == 1e25:
            assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.layers))
    assert norms[0] > 0.1 and norms == norms[:1] * 4


def test_layer_with_nan_does_not_change_others():
    """With clipping by layer, only the gradients of the layer with a NaN become NaN."""

    def poisoned(w, x, key):
        return x + w["w"] * x

    init, step = offload_train_step(
        lambda others, batch, key: batch, [poisoned, poisoned],
        lambda others, x, batch, key: jnp.sum(x) + jnp.sum(others["in"]),
        optax.sgd(0.1), params_in="device", clip_norm=1.0, clip_by="layer",
    )  # fmt: skip
    w = [{"w": jnp.zeros(3)}, {"w": jnp.full(3, jnp.nan)}]  # the gradient of the first is NaN
    state, *_ = step(init(w, {"in": jnp.ones(3)}), jnp.ones(3))
    assert np.isnan(state.layers[0]["w"]).all()
    np.testing.assert_allclose(state.others["in"], 1 - 0.1 / np.sqrt(3), rtol=1e-6)


@pytest.mark.parametrize(
    ("scale", "steps", "finite"),
    [
        (2.0**16, 0, True),
        (2.0**16, GROWTH_INTERVAL - 1, True),
        (2.0**16, GROWTH_INTERVAL, False),
        (1.5, 0, False),
        (1.0, 0, False),
        (2.0**127, GROWTH_INTERVAL, True),
    ],
)
def test_next_loss_scale_matches_flax(scale, steps, finite):
    p = jnp.float32(1 if finite else np.inf)
    # An array, as in training: a Python float would overflow when Flax doubles it.
    scale = jnp.float32(scale)
    flax = DynamicScale(scale=scale, fin_steps=steps, minimum_scale=1.0)
    want, is_finite, *_ = flax.value_and_grad(lambda p: 1e-38 * p * p)(p)
    got = next_loss_scale(LossScale(scale, jnp.int32(steps)), jnp.bool_(finite))
    assert bool(is_finite) == finite
    assert got.scale == want.scale and got.finite_steps == want.fin_steps
    assert got.scale.dtype == jnp.float32 and got.finite_steps.dtype == jnp.int32


# Half precision.


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def half_embed(others, batch, key):
    return cast(others["e"], "float16")[batch]


def half_layer(w, x, key):
    return layer(cast(w, "float16"), x, key)


def half_head(others, x, batch, key):
    return head(cast(others, "float16"), x.astype(jnp.float16), batch, key).astype(jnp.float32)


@vary(
    ("dtype", "options"),
    [("float32", {"compute_dtype": jnp.float16, "clip_norm": 0.05}), ("float16", {})],
)
def test_loss_scale_in_float16(dtype, options):
    """The first scale is too large for the gradients, several times over."""
    args = half_embed, half_layer, half_head, ADAMW, *cast((params(), others()), dtype)
    options = {"loss_scale": 2.0**24, "fuse_update": False, **options}
    state = steps.check(*args, [TOKENS] * 12, tolerance=2e-3, compiled=True, **options)
    assert 2.0**14 <= state.loss_scale.scale <= 2.0**22


@pytest.mark.exhaustive
def test_compute_dtype_of_different_layers():
    def run_embed(others, batch, key):
        return embed(others, batch, key).astype(jnp.bfloat16)

    def run_head(others, x, batch, key):
        return head(others, x.astype(jnp.float32), batch, key)

    w = steps.different_params()
    sgd = optax.sgd(1.0)  # the updates are the gradients
    args = run_embed, steps.DIFFERENT, run_head, sgd, w, others(), [TOKENS]
    options = {"compute_dtype": jnp.bfloat16, "trainable": steps.is_trained, "key": KEY}
    losses, (state, *_) = steps.train(*args, **options)
    want = reference.train(*args, **options)
    assert_close(losses, want.losses, 2e-2)
    updates = jax.tree.map(np.subtract, to_numpy((state.layers, want.layers)), to_numpy((w, w)))
    for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * np.abs(b).max())
    assert all(a.dtype in (jnp.float32, jnp.int8) for a in jax.tree.leaves(state.layers))


# Weights of losses.


def test_weights_add_up_to_zero():
    """The loss and the gradients are 0, and not NaN."""
    args, options = make_training(
        "stack", tokens=jnp.zeros(BATCH, int), tx=SGD, weighted_loss=True, num_microbatches=4,
        fuse_update=False, skip_nonfinite=True,
    )  # fmt: skip
    losses, (state, *_) = steps.train(*args, **options)
    assert losses == [0, 0]
    assert_close((state.layers, state.others), args[4:6], 0)


def test_weight_is_not_differentiated():
    def run_head(others, x, batch, key):
        weight = jnp.sum(jax.nn.sigmoid(x))
        return weight * jnp.sum(others["u"]), weight

    init, step = offload_train_step(
        embed, layer, run_head, optax.sgd(1.0), weighted_loss=True, num_microbatches=2
    )
    state, loss, *_ = offload_jit(step)(init(to_host(params()), others()), TOKENS)
    np.testing.assert_allclose(loss, others()["u"].sum(), rtol=1e-5)
    np.testing.assert_allclose(state.others["u"], others()["u"] - 1, rtol=1e-5, atol=1e-5)


@vary("weight", [jnp.bfloat16(3), 3])
def test_kinds_of_weights(weight):
    init, step = offload_train_step(
        lambda others, batch, key: batch * others, lambda w, x, key: x,
        lambda others, x, batch, key: (jnp.sum(x), weight),
        SGD, weighted_loss=True, num_microbatches=2, params_in="device",
    )  # fmt: skip
    loss = jax.jit(step)(init(jnp.ones((2, 1)), jnp.ones(())), jnp.arange(4.0)).loss
    np.testing.assert_allclose(loss, 1, rtol=1e-5)


def test_weights_do_not_cost_another_forward_pass():
    """XLA removes the logits from the loop that computes the weights."""

    def products(weighted_loss):
        (*args, (batch, _)), options = make_training(
            "stack", tx=SGD, weighted_loss=weighted_loss, has_state=True, head_has_aux=True,
            num_microbatches=4,
        )  # fmt: skip
        state, step = steps.start(*args, **options)
        text = jax.jit(step).lower(state, batch).compile().as_text()
        return len(re.findall(r" dot\(|custom_call_target=\"[^\"]*(?:matmul|dot)", text))

    assert products(True) == products(False) > 0


# Errors.


def changed(**entries):
    """Return an embed that replaces entries of the state."""
    return lambda others, state, batch, key: (embed(others, batch, key), {**state, **entries})


def end_with(*results):
    """Return a head with other results than its options describe."""
    return lambda others, x, batch, key: results[0] if len(results) == 1 else results


W, SCALAR = params(), jnp.float32(1)
STATE = {
    "has_state": True,
    "model_state": steps.model_state(),
    "embed": changed(),
    "head": lambda others, state, x, batch, key: (x.sum(), state),
}
WEIGHTED = {"weighted_loss": True}
INVALID = [
    # Options. A fused update cannot depend on all gradients.
    ("`clip_norm`", {"clip_norm": 1.0}),
    ("`loss_scale`", {"loss_scale": 4.0}),
    ("`skip_nonfinite`", {"skip_nonfinite": True}),
    ("`clip_by`.*row", {"clip_norm": 1.0, "clip_by": "row"}),
    ("`clip_by`.*layer", {"clip_by": "layer"}),
    ("`others_in`.*disk", {"others_in": "disk"}),
    # Parameters.
    (r"`layers` .*: layers\['a'\]", {"layers": W}),
    (r"`layers`\['n'\]", {"layers": to_host({**W, "n": jnp.zeros(LAYERS, int)})}),
    ("`trained layers`", {"trainable": lambda path, leaf: False}),
    ("`trainable`", {"trainable": {"a": True}}),
    ("`others` .*device", {"others": to_host(others())}),
    ("`others` .*host", {"others_in": "host"}),
    ("`tx` .*`clip_norm`", {"tx": optax.chain(optax.clip_by_global_norm(1.0), ADAMW)}),
    ("list or a tuple", {"layer": [layer]}),
    (
        r"`layers\[0\]` and `layers\[1\]`",
        {"layers": [to_host(W["a"])] * 2, "layer": [steps.shifted] * 2},
    ),
    (
        r"of length 2\).*of length 1\)",
        {"layers": [to_host(jnp.ones(WIDTH))], "layer": [steps.shifted] * 2},
    ),
    # Results of the functions, and batches.
    ("`embed` must return", {**STATE, "embed": lambda *a: SCALAR}),
    ("'mean'", {**STATE, "embed": changed(mean=jnp.ones(3))}),
    ("'batches'", {**STATE, "embed": changed(batches=SCALAR)}),
    ("`head` must return", {**STATE, "head_has_aux": True}),
    ("scalar loss", {"head": end_with(jnp.ones(2))}),
    ("loss_sum", WEIGHTED | {"head": end_with(SCALAR)}),
    ("scalar weight", WEIGHTED | {"head": end_with(SCALAR, jnp.ones(2))}),
    (r"batch\['b'\]", {"num_microbatches": 2, "batch": {"a": TOKENS, "b": TOKENS[:4]}}),
    (
        r"`num_microbatches`.*x\['n'\]",
        {"num_microbatches": 2, "embed": lambda *a: {"x": embed(*a), "n": SCALAR}},
    ),
]


@pytest.mark.parametrize(("match", "changes"), INVALID, ids=[match for match, _ in INVALID])
def test_error_names_what_is_invalid(match, changes):
    valid = {"embed": embed, "layer": layer, "head": head, "tx": SGD, "layers": to_host(W)}
    call = valid | {"others": others(), "batch": TOKENS, "model_state": ()} | changes
    layers, other, state, batch = (
        call.pop(n) for n in ("layers", "others", "model_state", "batch")
    )
    with pytest.raises((TypeError, ValueError), match=match):
        init, step = offload_train_step(**call)
        jax.eval_shape(step, init(layers, other, state), batch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layers_state", {"tx": optax.adam(1e-2)}),
        ("loss_scale", {"loss_scale": 4.0, "fuse_update": False}),
        ("grad_norm", {"clip_norm": 1.0, "clip_by": "previous"}),
    ],
)
def test_rejects_state_of_other_options(name, options):
    state = offload_train_step(embed, layer, head, optax.sgd(0.1)).init(to_host(W), others())
    _, step = offload_train_step(embed, layer, head, **{"tx": optax.sgd(0.1), **options})
    with pytest.raises(ValueError, match=f"`state.{name}`"):
        step(state, TOKENS)
