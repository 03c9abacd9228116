"""stream_update, host_init and training steps of a stack, compared with optax."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from effjax import host_init, offload_jit, offload_train_step, stream_update, to_device, to_host
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    assert_equal_bits,
    init,
    kinds,
    layer,
    params,
)
from tests.ops.offload.steps import (
    ADAMW,
    TOKENS,
    close,
    decayed,
    embed,
    head,
    layers_of,
    others,
    stack,
    trained_in_memory,
)
from tests.tiers import plainly

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, mask=decayed),
    "schedule": optax.adam(optax.linear_schedule(1e-2, 1e-3, 3)),
    "momentum": optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2),
    "by_name": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-1)}, {"a": "adam", "b": "adam", "c": "sgd"}
    ),
    "every_second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
}


# Optimizers with different kinds of state.
PLAIN = "adamw", "by_name", "every_second"


@pytest.mark.parametrize("name", plainly(*PLAIN, of=OPTIMIZERS))
def test_update_matches_optax_on_each_layer(name):
    tx = OPTIMIZERS[name]
    stream = stream_update(tx)
    w = to_host(params())
    state = stream.init(w)
    for a in jax.tree.leaves(state):
        assert a.shape[0] == LAYERS
        assert a.sharding.memory_kind == ("device" if a.ndim == 1 else "pinned_host")
    listed = layers_of(w)
    states = [tx.init(p) for p in listed]
    update = jax.jit(stream.update)
    for step in range(2):
        grads = jax.tree.map(lambda a, s=step: jnp.sin(a * (3 + s)), params())
        w, state = update(to_host(grads), state, w)
        for i, g in enumerate(layers_of(grads)):
            updates, states[i] = tx.update(g, states[i], listed[i])
            listed[i] = optax.apply_updates(listed[i], updates)
    close(w, stack(listed))
    close(state, jax.tree.map(lambda *a: jnp.stack(a), *states))
    assert kinds(w) == {"pinned_host"}


def test_clip_norm_is_over_all_layers():
    tx, w = optax.sgd(1.0), to_host(params())
    stream = stream_update(tx)
    for factor in (0.01, 100.0):
        grads = jax.tree.map(lambda a, f=factor: a * f, params())
        got, _ = jax.jit(functools.partial(stream.update, clip_norm=1.0))(
            to_host(grads), stream.init(w), w
        )
        clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        close(got, jax.tree.map(jnp.subtract, params(), clipped))


def test_clip_norm_of_complex_gradients():
    w = {"a": to_host(jnp.full((LAYERS, 2), 3 - 4j))}
    got, _ = stream_update(optax.sgd(1.0)).update(w, stream_update(optax.sgd(1.0)).init(w), w, 1.0)
    clipped, _ = optax.clip_by_global_norm(1.0).update(to_device(w), optax.EmptyState())
    close(got, jax.tree.map(jnp.subtract, to_device(w), clipped))


def test_rejects_optimizer_that_mixes_parameters():
    tx, w = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), to_host(params())
    with pytest.raises(ValueError, match=r"update of .*\['a'\] depends on .*\['b'\].*clip_norm"):
        stream_update(tx).init(w)
    with pytest.raises(ValueError, match="must treat every parameter separately"):
        offload_train_step(embed, layer, head, tx).init(w, others())


def test_host_init():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    w = host_init(init, keys)
    assert kinds(w) == {"pinned_host"}
    close(w, params(), 1e-7)
    one = jax.tree.map(lambda a: a[:1], params())
    close(host_init(init, keys[:1]), one, 1e-7)
    inside = jax.jit(functools.partial(host_init, init))(keys)
    assert_equal_bits(inside, w)
    with pytest.raises(ValueError, match=r"`shardings` .* has none for params\['b'\]"):
        host_init(init, keys, shardings={"a": w["a"].sharding})
    scalars = host_init(lambda key: {"s": jax.random.normal(key)}, keys)
    assert scalars["s"].shape == (LAYERS,) and kinds(scalars) == {"pinned_host"}


STEPS = {
    "fused": {},
    "fused_slices": {"num_slices": 2, "resident_slices": 1, "num_microbatches": 2},
    "fused_no_prefetch": {"prefetch": 0},
    "fused_slices_policy": {
        "num_slices": 2, "resident_slices": 1, "num_microbatches": 2,
        "policy": POLICIES["everything"],
    },
    "clipped": {"fuse_update": False, "clip_norm": 0.1, "num_microbatches": 2},
    "clipped_policy": {"fuse_update": False, "clip_norm": 0.1, "policy": POLICIES["everything"]},
    "on_device": {"params_in": "device"},
    "on_device_slices": {"params_in": "device", "activations": "host", "num_slices": 2},
    "on_device_clipped": {"params_in": "device", "fuse_update": False, "clip_norm": 0.1},
}  # fmt: skip
WHERE = {"host": "pinned_host", "device": "device"}


@functools.cache
def clipped(clip_norm):
    return ADAMW if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), ADAMW)


@pytest.mark.parametrize("name", plainly("fused_slices_policy", "clipped", "on_device", of=STEPS))
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


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"`clip_norm` \(=1.0\) needs fuse_update=False", {"clip_norm": 1.0}),
        (r"`params_in` \(='gpu'\) must be", {"params_in": "gpu"}),
    ],
)
def test_rejects_invalid_option(match, options):
    with pytest.raises(ValueError, match=match):
        offload_train_step(embed, layer, head, optax.sgd(0.1), **options)


def test_rejects_invalid_parameters_and_loss():
    make = functools.partial(offload_train_step, embed, layer, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="None of them are"):
        make(head).init(params(), others())
    with pytest.raises(ValueError, match="`others` is 'device', but"):
        make(head).init(to_host(params()), to_host(others()))
    init_state, step = make(lambda others, x, batch, key: x.sum(0))
    with pytest.raises(ValueError, match="`head` must return a scalar loss"):
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
    with pytest.raises(TypeError, match=r"`others`\['n'\] must be floating-point .* int32"):
        init_state(to_host(params()), {**others(), "n": number})
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
    grads = to_host(jax.tree.map(lambda a: a[:1], params()))
    with pytest.raises(ValueError, match=r"`grads`\['a'\] must have the shape \(4, 8, 16\)"):
        stream_update(optax.sgd(0.1)).update(grads, state.layers_state, w)
