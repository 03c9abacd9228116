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
from tests.ops.offload import reference
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
from tests.ops.offload.steps import (
    ADAMW,
    DIFFERENT,
    TOKENS,
    different_params,
    embed,
    head,
    is_trained,
    make_batches,
    make_ends,
    model_state,
    others,
    shifted,
    wide,
)
from tests.tiers import vary

SGD = optax.sgd(0.5, momentum=0.9)
ADAM = optax.adam(1e-2)
BATCH_OF_ONES = make_batches(TOKENS, [1.0])[0]


def make(tx=ADAMW, layer=layer, has_state=False, **options):
    names = "head_has_aux", "weighted_loss"
    run_embed, run_head = make_ends(
        has_state=has_state, **{n: options[n] for n in names if n in options}
    )
    return offload_train_step(run_embed, layer, run_head, tx, has_state=has_state, **options)


# Arrays of the state.


def test_first_step_donates_layers_only():
    init, step = make(has_state=True)
    w, kept = to_host(params()), (others(), model_state())
    state, *_ = offload_jit(step)(init(w, *kept), BATCH_OF_ONES)
    assert not any(a.is_deleted() for a in jax.tree.leaves(kept))
    assert all(a.is_deleted() for a in jax.tree.leaves(w))
    assert int(state.model_state["batches"]) == 1


def test_resumed_run_is_equal_to_the_bit():
    init, step = make(
        SGD, clip_norm=0.1, clip_by="previous", fuse_update=False, loss_scale=8.0, has_state=True
    )
    step = offload_jit(step)

    def start():
        return init(to_host(params()), others(), model_state())

    def run(state, steps):
        for i in steps:
            state, *_ = step(state, BATCH_OF_ONES, jax.random.fold_in(KEY, i))
        return state

    whole = run(start(), range(4))
    saved = to_numpy(run(start(), range(2)))
    resumed = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), saved, start())
    assert_equal_bits(run(resumed, range(2, 4)), whole)


def test_frozen_layers_of_a_tuple_have_no_optimizer_state():
    w = different_params()
    init, step = offload_train_step(
        embed, tuple(DIFFERENT), head, ADAMW, trainable=(True, True, False, False)
    )
    state = init(to_host(tuple(w)), others())
    state, *_ = offload_jit(step)(state, TOKENS)
    assert isinstance(state.layers, tuple)
    for i in (2, 3):
        jax.tree.map(np.testing.assert_array_equal, state.layers[i], w[i])
        assert all(a.ndim == 0 for a in jax.tree.leaves(state.layers_state[i]))
    assert (np.asarray(state.layers[0]["a"]) != np.asarray(w[0]["a"])).any()


def test_layer_inputs_are_a_pytree_with_integers():
    def run_embed(others, batch, key):
        h = embed(others, batch["tokens"], key)
        return {"h": h, "skip": 2 * h, "n": batch["n"]}

    def run_head(others, x, batch, key):
        return head(others, x["h"] + x["n"][:, None] * x["skip"], batch["tokens"], key)

    def run_layer(w, x, key):
        h = layer(w, x["h"], key) + 0.1 * x["skip"]
        return {"h": h, "skip": x["skip"] * 0.9, "n": x["n"] + 1}

    functions, batch = (run_embed, run_layer, run_head), {"tokens": TOKENS, "n": TOKENS % 3}
    init, step = offload_train_step(*functions, ADAMW, num_microbatches=2)
    state, loss, *_ = offload_jit(step)(init(to_host(params(2)), others()), batch)
    want = reference.train(
        *functions, ADAMW, params(2), others(), [batch], num_microbatches=2, compiled=True
    )
    assert_close((loss, state.layers, state.others), (want.losses[0], *want[1:3]), 5e-6)


def test_frozen_integer_others():
    init, step = offload_train_step(
        lambda others, batch, key: others["codes"].astype(jnp.float32)[batch] * 0.1, layer,
        lambda others, x, batch, key: jnp.mean(x**2), ADAMW, trainable_others=False,
    )  # fmt: skip
    codes = jnp.arange(11 * WIDTH, dtype=jnp.int8).reshape(11, WIDTH)
    state, *_ = offload_jit(step)(init(to_host(params()), {"codes": codes}), TOKENS)
    np.testing.assert_array_equal(state.others["codes"], codes)


@pytest.mark.exhaustive
def test_closed_over_array_is_constant():
    def run(scale):
        layers = [lambda w, x, key: scale * wide(w, x, key), *DIFFERENT[1:]]
        init, step = offload_train_step(embed, layers, head, ADAMW, trainable=is_trained)
        state, loss, *_ = step(init(to_host(different_params()), others()), TOKENS)
        return loss, state.layers

    assert_close(jax.jit(run)(jnp.float32(0.5)), run(0.5), 5e-6)


def test_empty_batch():
    def run_head(others, x, batch, key):
        return jnp.sum(x)

    init, step = offload_train_step(
        embed, DIFFERENT, run_head, optax.sgd(0.1), trainable=is_trained
    )
    state, loss, *_ = offload_jit(step)(init(to_host(different_params()), others()), TOKENS[:0])
    assert loss == 0
    jax.tree.map(np.testing.assert_array_equal, state.layers, different_params())


# Values that are not finite.


def test_skip_nonfinite_keeps_the_whole_state():
    init, step = make(
        SGD, fuse_update=False, skip_nonfinite=True, has_state=True, num_microbatches=2,
        clip_norm=0.1, clip_by="previous",
    )  # fmt: skip
    state, run = init(to_host(params()), others(), model_state()), offload_jit(step)
    for factor in (1.0, 1e38, jnp.inf, jnp.nan, 1.0):
        before = to_numpy(state)
        state, loss, *_ = run(state, make_batches(TOKENS, [100 * factor])[0])
        if factor == 1:
            assert np.any(np.asarray(state.layers["a"]) != before.layers["a"])
        else:
            assert jnp.isnan(loss)
            assert_equal_bits(state, before)


def test_infinite_norm_is_not_stored():
    init, step = make(optax.sgd(1e-26), clip_norm=0.1, clip_by="previous")
    state, step = init(to_host(params()), others()), offload_jit(step)
    norms = []
    for factor in (1.0, 1e25, jnp.inf, jnp.nan):  # the gradients of 1e25 are finite
        state, *_ = step(state, make_batches(TOKENS, [factor])[0])
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


def half(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float16), tree)


def half_embed(others, batch, key):
    return half(others["e"])[batch]


def half_layer(w, x, key):
    return layer(half(w), x, key)


def half_head(others, x, batch, key):
    return head(half(others), x.astype(jnp.float16), batch, key).astype(jnp.float32)


@vary(
    ("dtype", "options"),
    [(jnp.float32, {"compute_dtype": jnp.float16, "clip_norm": 0.05}), (jnp.float16, {})],
    ids=["compute_dtype", "float16 parameters"],
)
def test_loss_scale_in_float16(dtype, options):
    """The first scale is too large for the gradients, several times over."""
    functions, options = (half_embed, half_layer, half_head), {"loss_scale": 2.0**24, **options}
    w, other = (jax.tree.map(lambda a: a.astype(dtype), tree) for tree in (params(), others()))
    want = reference.train(*functions, ADAMW, w, other, [TOKENS] * 12, compiled=True, **options)
    init, step = offload_train_step(*functions, ADAMW, fuse_update=False, **options)
    state, step, skipped = init(to_host(w), other), offload_jit(step), 0
    for i in range(12):
        before = to_numpy(state)
        state, *_ = step(state, TOKENS)
        assert state.loss_scale.scale == want.loss_scales[i]
        if state.loss_scale.scale < before.loss_scale.scale:
            assert_equal_bits(state[:4], before[:4])
            skipped += 1
    assert_close((state.layers, state.others), want[1:3], 2e-3)
    assert 2 <= skipped <= 10


@pytest.mark.exhaustive
def test_compute_dtype_of_different_layers():
    def run_embed(others, batch, key):
        return embed(others, batch, key).astype(jnp.bfloat16)

    def run_head(others, x, batch, key):
        return head(others, x.astype(jnp.float32), batch, key)

    functions, w = (run_embed, DIFFERENT, run_head), different_params()
    options = {"compute_dtype": jnp.bfloat16, "trainable": is_trained}
    sgd = optax.sgd(1.0)  # the updates are the gradients
    init, step = offload_train_step(*functions, sgd, **options)
    state, loss, *_ = offload_jit(step)(
        init(to_host(w), others()), TOKENS, jax.random.fold_in(KEY, 0)
    )
    want = reference.train(*functions, sgd, w, others(), [TOKENS], key=KEY, **options)
    assert_close(loss, want.losses[0], 2e-2)
    updates = jax.tree.map(np.subtract, to_numpy((state.layers, want.layers)), to_numpy((w, w)))
    for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * np.abs(b).max())
    assert all(a.dtype in (jnp.float32, jnp.int8) for a in jax.tree.leaves(state.layers))


# Weights of losses.


def test_weights_add_up_to_zero():
    """The loss and the gradients are 0, and not NaN."""
    init, step = make(
        SGD, weighted_loss=True, num_microbatches=4, fuse_update=False, skip_nonfinite=True
    )  # fmt: skip
    batch = {**BATCH_OF_ONES, "tokens": jnp.zeros(BATCH, int)}
    state, loss, *_ = offload_jit(step)(init(to_host(params()), others()), batch)
    assert loss == 0
    assert_close((state.layers, state.others), (params(), others()), 0)


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
        init, step = make(
            SGD, weighted_loss=weighted_loss, has_state=True, head_has_aux=True, num_microbatches=4
        )
        state = init(to_host(params()), others(), model_state())
        text = jax.jit(step).lower(state, BATCH_OF_ONES).compile().as_text()
        return len(re.findall(r" dot\(|custom_call_target=\"[^\"]*(?:matmul|dot)", text))

    assert products(True) == products(False) > 0


# Errors.


def changed(**entries):
    """Return an embed that replaces entries of the state."""
    return lambda others, state, batch, key: (embed(others, batch, key), {**state, **entries})


def end_with(*results):
    """Return a head with other results than its options describe."""
    return {"head": lambda others, x, batch, key: results[0] if len(results) == 1 else results}


STATE = {
    "has_state": True,
    "embed": changed(),
    "head": lambda others, state, x, batch, key: (x.sum(), state),
}
WEIGHTED = {"weighted_loss": True}
SCALAR = jnp.float32(1)
WRONG = {
    "state is not returned": ("`embed` must return", {**STATE, "embed": lambda *a: SCALAR}),
    "state of another shape": ("'mean'", {**STATE, "embed": changed(mean=jnp.ones(3))}),
    "state of another dtype": ("'batches'", {**STATE, "embed": changed(batches=SCALAR)}),
    "aux is missing": ("`head` must return", {**STATE, "head_has_aux": True}),
    "loss of each row": ("scalar loss", end_with(jnp.ones(2))),
    "no weight": ("loss_sum", WEIGHTED | end_with(SCALAR)),
    "weight of each row": ("scalar weight", WEIGHTED | end_with(SCALAR, jnp.ones(2))),
    "batch of several lengths": (
        r"batch\['b'\]", {"num_microbatches": 2, "batch": {"a": TOKENS, "b": TOKENS[:4]}}
    ),
    "scalar for the layers": (
        r"`num_microbatches`.*x\['n'\]",
        {"num_microbatches": 2, "embed": lambda *a: {"x": embed(*a), "n": SCALAR}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_rejects_invalid_results_and_batches(name):
    match, options = WRONG[name]
    options = {"embed": embed, "head": head, "batch": TOKENS, **options}
    run_embed, run_head, batch = (options.pop(n) for n in ("embed", "head", "batch"))
    init, step = offload_train_step(run_embed, layer, run_head, SGD, **options)
    state = init(to_host(params()), others(), model_state() if "has_state" in options else ())
    with pytest.raises((TypeError, ValueError), match=match):
        jax.eval_shape(step, state, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 1.0},
        {"loss_scale": 4.0},
        {"skip_nonfinite": True},
        {"clip_norm": 1.0, "clip_by": "row"},
        {"clip_by": "layer"},
        {"others_in": "disk"},
    ],
    ids=str,
)
def test_rejects_invalid_options(options):
    """A fused update cannot depend on all gradients."""
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"`{name}`.*{value}"):
        offload_train_step(embed, layer, head, SGD, **options)


W = params()
INVALID_PARAMS = {
    "layers on the device": (r"`layers` .*: layers\['a'\]", {"layers": W}),
    "integers": (r"`layers`\['n'\]", {"layers": to_host({**W, "n": jnp.zeros(LAYERS, int)})}),
    "nothing is trained": ("`trained layers`", {"trainable": lambda path, leaf: False}),
    "flags of another tree": ("children", {"trainable": {"a": True}}),
    "others on the host": ("`others` .*device", {"others": to_host(others())}),
    "others on the device": ("`others` .*host", {"others_in": "host"}),
    "optimizer that mixes": (
        "every parameter.*`clip_norm`", {"tx": optax.chain(optax.clip_by_global_norm(1.0), ADAMW)}
    ),
    "a dict for a list": ("list or a tuple", {"layer": [layer]}),
    "a shared array": (
        r"`layers\[0\]` and `layers\[1\]`",
        {"layers": [to_host(W["a"])] * 2, "layer": [shifted] * 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID_PARAMS)
def test_rejects_invalid_parameters(name):
    match, options = INVALID_PARAMS[name]
    options = {"layer": layer, "tx": SGD, "layers": to_host(W), "others": others(), **options}
    layers, other = options.pop("layers"), options.pop("others")
    init, _ = offload_train_step(embed, head=head, **options)
    with pytest.raises((TypeError, ValueError), match=match):
        init(layers, other)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layers_state", {"tx": ADAM}),
        ("loss_scale", {"loss_scale": 4.0, "fuse_update": False}),
        ("grad_norm", {"clip_norm": 1.0, "clip_by": "previous"}),
    ],
)
def test_rejects_state_of_other_options(name, options):
    state = offload_train_step(embed, layer, head, optax.sgd(0.1)).init(to_host(W), others())
    _, step = offload_train_step(embed, layer, head, **{"tx": optax.sgd(0.1), **options})
    with pytest.raises(ValueError, match=f"`state.{name}` must have the structure of"):
        step(state, TOKENS)


def test_rejects_wrong_number_of_layers():
    init, step = offload_train_step(embed, [shifted] * 2, head, SGD)
    with pytest.raises(ValueError, match=r"of length 2\).*of length 1\)"):
        step(init(to_host([jnp.ones(WIDTH)]), others()), TOKENS)
