"""Training steps of a stack, with auxiliary outputs, model states and microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax import offload_jit, offload_train_step, to_host
from tests.ops.offload.stacks import (
    BATCH,
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_equal_bits,
    kinds,
    layer,
    params,
)
from tests.ops.offload.steps import (
    ADAMW,
    TOKENS,
    close,
    embed,
    head,
    others,
    train_in_memory,
    trained_in_memory,
)
from tests.tiers import exhaustive, plainly

STATE = {
    "mean": jnp.zeros(WIDTH), "top": jnp.float32(0.5), "batches": jnp.int32(0),
}  # fmt: skip


def embed_with_state(others, state, batch, key):
    """Use the state, through which no gradient flows."""
    x = embed(others, batch, key) - 0.1 * state["mean"]
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
    return x, {**state, "mean": mean, "batches": state["batches"] + 1}


def head_with_state(others, state, x, batch, key):
    loss = head(others, x * state["top"], batch, key)
    aux = {"batches": state["batches"], "largest": x.max(-1)}
    return loss, {**state, "top": 0.9 * state["top"] + 0.1 * jnp.max(x)}, aux


ENDS = embed_with_state, head_with_state
OPTIONS = {
    "fused": {},
    "microbatches": {"num_microbatches": 2, "num_slices": 2},
    "apart": {"num_microbatches": 2, "fuse_update": False},
}


def train(step, state, batch=TOKENS, key=KEY, steps=3):
    """Return the losses, the state and the other results of the last step."""
    run, losses = offload_jit(step), []
    for i in range(steps):
        state, loss, *rest = run(state, batch, None if key is None else jax.random.fold_in(key, i))
        losses.append(loss)
    return losses, state, rest


@functools.cache
def with_state_in_memory(m):
    return train_in_memory(ADAMW, STATE, m=m, ends=ENDS)


@pytest.mark.parametrize("name", plainly("apart", of=OPTIONS))
def test_model_state_and_aux_match_in_memory(name):
    """Each microbatch updates the model state in turn and has its own key."""
    options = OPTIONS[name]
    m = options.get("num_microbatches", 1)

    def aux_layer(w, x, key):
        return layer(w, x, key), x.mean()

    init, step = offload_train_step(
        embed_with_state, aux_layer, head_with_state, ADAMW,
        has_aux=True, head_has_aux=True, has_state=True, **options,
    )  # fmt: skip
    losses, state, (aux, head_aux) = train(step, init(to_host(params()), others(), STATE))
    got = losses, state.layers, state.others, state.model_state, head_aux
    close(got, with_state_in_memory(m), 5e-6)
    assert aux.shape == (LAYERS, m)
    assert head_aux["largest"].shape == (m, BATCH // m)
    np.testing.assert_array_equal(head_aux["batches"], [3 * m] * m)
    assert kinds(state.model_state) == {"device"}


def test_initial_model_state_is_not_donated():
    init, step = offload_train_step(
        embed_with_state, layer, lambda o, s, x, b, k: head_with_state(o, s, x, b, k)[:2], ADAMW,
        has_state=True,
    )  # fmt: skip
    kept = jax.tree.map(jnp.copy, STATE)
    _, state, rest = train(step, init(to_host(params()), others(), kept), steps=1)
    assert not rest and not any(a.is_deleted() for a in jax.tree.leaves(kept))
    assert int(state.model_state["batches"]) == 1


def test_head_aux_without_model_state():
    def run(others, x, batch, key):
        return head(others, x, batch, key), {"n": jnp.int32(7), "x": x}

    init, step = offload_train_step(embed, layer, run, ADAMW, head_has_aux=True)
    state = init(to_host(params()), others())
    state, loss, aux = jax.eval_shape(step, state, TOKENS)
    assert loss.shape == () and state.model_state == ()
    assert aux["n"].shape == (1,) and aux["x"].shape == (1, BATCH, WIDTH)


@pytest.mark.parametrize("m", [exhaustive(1), 2])
def test_layer_inputs_are_a_pytree_with_integers(m):
    def ends(embed, head):
        def run_embed(others, model_state, batch, key):
            h = embed(others, batch["tokens"], key)
            return {"h": h, "skip": 2 * h, "n": batch["n"]}, model_state

        def run_head(others, model_state, x, batch, key):
            logits = x["h"] + x["n"][:, None] * x["skip"]
            return head(others, logits, batch["tokens"], key), model_state, ()

        return run_embed, run_head

    def several(w, x, key):
        h = layer(w, x["h"], key) + 0.1 * x["skip"]
        return {"h": h, "skip": x["skip"] * 0.9, "n": x["n"] + 1}

    run_embed, run_head = ends(embed, head)
    batch = {"tokens": TOKENS, "n": jnp.arange(BATCH) % 3}
    init, step = offload_train_step(
        lambda *a: run_embed(a[0], (), *a[1:])[0], several,
        lambda *a: run_head(a[0], (), *a[1:])[0], ADAMW, num_microbatches=m,
    )  # fmt: skip
    losses, state, _ = train(step, init(to_host(params()), others()), batch)
    want = train_in_memory(ADAMW, batch=batch, m=m, ends=(run_embed, run_head), layer=several)
    close((losses, state.layers, state.others), want[:3], 5e-6)


@pytest.mark.parametrize(
    "options", [exhaustive({"num_slices": 2}), {"fuse_update": False}], ids=str
)
def test_multi_steps_accumulates_gradients(options):
    """Each layer has a counter, and a sum in the memory of its parameters."""
    tx = optax.MultiSteps(ADAMW, 2)
    init, step = offload_train_step(embed, layer, head, tx, **options)
    first = init(to_host(params()), others())
    moments = [a for a in jax.tree.leaves(first.layers_state) if a.ndim > 1]
    assert kinds(moments) == {"pinned_host"}
    assert sum(a.shape == (LAYERS, WIDTH, 2 * WIDTH) for a in moments) == 3  # two, and the sum
    run, state, losses = offload_jit(step), first, []
    for i in range(4):
        state, loss = run(state, TOKENS, jax.random.fold_in(KEY, i))
        losses.append(loss)
        if i == 0:
            assert_equal_bits(state.layers, params())
            np.testing.assert_array_equal(state.layers_state.mini_step, [1] * LAYERS)
    close((losses, state.layers, state.others), train_in_memory(tx, steps=4)[:3], 5e-6)
    np.testing.assert_array_equal(state.layers_state.gradient_step, [2] * LAYERS)


def run_step(embed=embed, head=head, batch=TOKENS, model_state=(), **options):
    init, step = offload_train_step(embed, layer, head, optax.sgd(0.1), **options)
    state = init(to_host(params()), others(), model_state)
    return jax.eval_shape(step, state, batch, KEY)


def changed(**entries):
    """Return an embed that replaces entries of the state."""
    return lambda others, state, batch, key: (embed(others, batch, key), {**state, **entries})


WITH_STATE = {"has_state": True, "head_has_aux": True, "model_state": STATE}
WRONG = {
    "state is not returned": (
        TypeError, r"`embed` must return \(x, model_state\), not a",
        {"has_state": True, "embed": lambda others, state, batch, key: embed(others, batch, key)},
    ),
    "aux is missing": (
        TypeError, r"`head` must return \(loss, model_state, aux\), not a tuple of 2",
        {**WITH_STATE, "embed": embed_with_state,
         "head": lambda *a: head_with_state(*a)[:2]},
    ),
    "another shape": (
        ValueError, r"`model_state`\['mean'\] must have the type float32\[8\]",
        {**WITH_STATE, "embed": changed(mean=jnp.ones(3)), "head": head_with_state},
    ),
    "another dtype": (
        ValueError, r"`model_state`\['batches'\] must have the type int32\[\], .* of `embed`",
        {**WITH_STATE, "embed": changed(batches=jnp.ones(())), "head": head_with_state},
    ),
    "an array of another length": (
        ValueError, r"but batch\['b'\] has the shape \(4,\), and batch\['a'\] the shape \(8,\)",
        {"num_microbatches": 2, "batch": {"a": TOKENS, "b": TOKENS[:4]}},
    ),
    "a scalar for the layers": (
        ValueError, r"`num_microbatches` .* all arrays of x, but .* x\['n'\] the shape \(2,\)",
        {"num_microbatches": 2,
         "embed": lambda *a: {"x": embed(*a), "n": jnp.ones(())}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_rejects_invalid_results_and_batches(name):
    kind, match, options = WRONG[name]
    with pytest.raises(kind, match=match):
        run_step(**options)


STEPS = {
    "fused": {},
    "fused_no_prefetch": {"prefetch": 0},
    "fused_slices_policy": {
        "num_slices": 2, "resident_slices": 1, "num_microbatches": 2,
        "policy": POLICIES["everything"],
    },
    "clipped": {"fuse_update": False, "clip_norm": 0.1, "num_microbatches": 2},
    "on_device": {"params_in": "device"},
    "on_device_slices": {"params_in": "device", "activations": "host", "num_slices": 2},
}  # fmt: skip
WHERE = {"host": "pinned_host", "device": "device"}


@functools.cache
def clipped(clip_norm):
    return ADAMW if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), ADAMW)


@pytest.mark.parametrize("name", plainly("fused_slices_policy", "clipped", of=STEPS))
def test_training_matches_in_memory(name):
    """Fused and separate updates donate the state and keep its memory kinds."""
    options = STEPS[name]
    where = options.get("params_in", "host")
    init_state, step = offload_train_step(embed, layer, head, ADAMW, **options)
    state = init_state(to_host(params()) if where == "host" else params(), others())
    step, losses = offload_jit(step), []
    for i in range(3):
        before = state
        state, value = step(state, TOKENS, jax.random.fold_in(KEY, i))
        losses.append(value)
        assert all(a.is_deleted() for a in jax.tree.leaves(before))
    want = trained_in_memory(clipped(options.get("clip_norm")), options.get("num_microbatches", 1))
    assert float(losses[0]) == float(want[0][0])
    close((losses, state.layers, state.others), want, 5e-6)
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim > 1]
    assert kinds(state.layers) == kinds(moments) == {WHERE[where]}
    assert kinds(state.others) == {"device"}


def test_rejects_invalid_parameters_and_loss():
    make = functools.partial(offload_train_step, embed, layer, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"`layers` must be in host memory.*: layers\['a'\], "):
        make(head).init(params(), others())
    with pytest.raises(ValueError, match="`others` must be in device memory, but"):
        make(head).init(to_host(params()), to_host(others()))
    init_state, step = make(lambda others, x, batch, key: x.sum(0))
    with pytest.raises(TypeError, match="`head` must return a scalar loss, not a traced array"):
        jax.eval_shape(step, init_state(to_host(params()), others()), TOKENS)
    init_state, step = make(lambda others, x, batch, key: (x.sum(), x))
    with pytest.raises(TypeError, match="`head` must return a scalar loss, not a tuple of 2"):
        jax.eval_shape(step, init_state(to_host(params()), others()), TOKENS)


def test_rejects_integer_parameters():
    init_state, step = offload_train_step(embed, layer, head, optax.sgd(0.1))
    state = init_state(to_host(params()), others())
    number = jnp.zeros(LAYERS, jnp.int32)
    layers = {**state.layers, "n": to_host(number)}
    with pytest.raises(TypeError, match=r"`layers`\['n'\] must be floating-point .* int32"):
        init_state(layers, others())
    with pytest.raises(TypeError, match=r"`state.layers`\['n'\] must be floating-point .* int32"):
        step(state._replace(layers=layers), TOKENS)


def test_init_copies_other_parameters_but_not_layers():
    init_state, step = offload_train_step(embed, layer, head, optax.sgd(0.1))
    w, kept = to_host(params()), others()
    offload_jit(step)(init_state(w, kept), TOKENS)
    assert not any(a.is_deleted() for a in jax.tree.leaves(kept))
    assert all(a.is_deleted() for a in jax.tree.leaves(w))


def test_rejects_state_of_another_optimizer():
    w = to_host(params())
    state = offload_train_step(embed, layer, head, optax.sgd(0.1)).init(w, others())
    with pytest.raises(
        ValueError, match="`state.layers_state` must have the structure of the result of init"
    ):
        offload_train_step(embed, layer, head, optax.adam(0.1)).step(state, TOKENS)
