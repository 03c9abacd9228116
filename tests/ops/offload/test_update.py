"""stream_update of stacks and lists of layers, and host_init, compared with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import host_init, offload_jit, stream_update, to_device, to_host
from tests.ops.offload import reference
from tests.ops.offload.reference import stack
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    assert_close,
    assert_equal_bits,
    init,
    kinds,
    params,
    to_numpy,
)
from tests.ops.offload.steps import decayed, layers_of
from tests.tiers import vary

OPTIMIZERS = {
    # Momentum depends on the size of the gradients.
    "momentum": optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2, mask=decayed),
    "by_name": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-1)},
        lambda params: {name: "adam" if name in "ab" else "sgd" for name in params},
    ),
    "schedule": optax.adam(optax.linear_schedule(1e-2, 1e-3, 3)),
    "lamb": optax.lamb(1e-2),
    "every_second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
}


def different_layers():
    """Return different layers, one without parameters, one with a scalar."""
    a, b, c = jax.random.split(jax.random.key(0), 3)
    return [
        {"a": jax.random.normal(a, (3, 5)), "c": jnp.ones(5)},
        {},
        {"b": jax.random.normal(b, (5, 2, 2)), "s": jnp.float32(0.5)},
        {"a": jax.random.normal(c, (4,))},
    ]


def gradients(layers, step):
    return jax.tree.map(lambda a: jnp.sin(a * (3 + step)), layers)


def update_in_memory(make_tx, layers, num_steps, clip=lambda grads: grads):
    """Return parameters and states; ``make_tx(i)`` updates layer i alone."""
    optimizers = [make_tx(i) for i in range(len(layers))]
    new, states = list(layers), [tx.init(w) for tx, w in zip(optimizers, layers, strict=True)]
    for step in range(num_steps):
        for i, g in enumerate(clip(gradients(layers, step))):
            updates, states[i] = optimizers[i].update(g, states[i], new[i])
            new[i] = optax.apply_updates(new[i], updates)
    return new, states


def check_update(form, tx, make_tx=None, clip=lambda grads: grads, **clipping):
    """Compare two updates with those of ``make_tx(i)``, by default `tx`; return the parameters."""
    layers, join = different_layers(), list
    if form == "stack":
        layers, join = layers_of(params()), stack
    stream = stream_update(tx, stacked=form == "stack")
    w = to_host(join(layers))
    state = stream.init(w)
    for a in jax.tree.leaves(state):
        is_scalar = a.ndim == (form == "stack")  # of one layer
        assert is_scalar or a.sharding.memory_kind == "pinned_host"
    step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both), **clipping))
    for i in range(2):
        w, state = step((w, state), to_host(join(gradients(layers, i))))
    want, want_state = update_in_memory(make_tx or (lambda i: tx), layers, 2, clip)
    assert_close(*map(to_numpy, ((w, state), (join(want), join(want_state)))))
    assert kinds(w) == {"pinned_host"}
    return w


@pytest.mark.parametrize("form", ["stack", "list"])
@vary("name", OPTIMIZERS)
def test_update_matches_optax_on_each_layer(form, name):
    """Gradients of the optimizer with momentum are also clipped by the norm of each layer."""
    if name == "momentum":
        clipper = reference.clip_by_layer_norm(0.5)
        clip = lambda grads: clipper.update({"layers": grads}, clipper.init({}))[0]["layers"]  # noqa: E731
        check_update(form, OPTIMIZERS[name], clip=clip, clip_norm=0.5, clip_by="layer")
    else:
        check_update(form, OPTIMIZERS[name])


def old_style(key):
    """Draw noise from a uint32 key in the optimizer state."""

    def update(updates, state, params=None):
        count, key = state
        key, sample = jax.random.split(key)
        noise = jax.tree.map(lambda g: jax.random.normal(sample, g.shape), updates)
        return jax.tree.map(jnp.add, updates, noise), (count + 1, key)

    return optax.GradientTransformation(lambda params: (jnp.uint32([0, 0]), key), update)


NOISY = {
    "noisy_sgd": lambda key: optax.noisy_sgd(1.0, eta=0.1, key=key),
    "uint32 key": lambda key: old_style(jax.random.key_data(key)),
    "among others": lambda key: optax.chain(optax.add_noise(0.1, 0.5, key), optax.adam(0.1)),
    "every second step": lambda key: optax.MultiSteps(
        optax.noisy_sgd(1.0, eta=0.1, key=key), 2
    ).gradient_transformation(),
}


@vary("name", NOISY)
def test_layers_draw_independent_noise(name):
    """Each layer has its own key."""
    make = NOISY[name]
    w = check_update("stack", make(KEY), lambda i: make(reference.own_key(KEY, i)))
    assert all(len(np.unique(np.asarray(a))) == a.size for a in jax.tree.leaves(w))


@pytest.mark.parametrize(
    ("form", "dtype", "clip_norm"),
    [("stack", "float64", 0.1), ("list", "complex128", 0.1), ("list", "float64", 1e3)],
)
def test_clip_norm_is_that_of_optax(x64, form, dtype, clip_norm):
    """It is computed from all gradients, in their precision."""
    layers = [{"w": jnp.linspace(0.1, 0.7, 5) * i} for i in (1, 2)]
    if dtype == "complex128":
        layers = jax.tree.map(lambda a: a + 2j, layers)
    grads, join = jax.tree.map(jnp.cos, layers), stack if form == "stack" else list
    clipped = optax.chain(optax.clip_by_global_norm(clip_norm), optax.sgd(1.0))
    updates, _ = clipped.update(grads, clipped.init(layers))
    stream = stream_update(optax.sgd(1.0), stacked=form == "stack")
    w = to_host(join(layers))
    got, _ = stream.update(to_host(join(grads)), stream.init(w), w, clip_norm=clip_norm)
    assert_close(got, join(optax.apply_updates(layers, updates)), 1e-14)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}


def test_host_init():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    w = host_init(init, keys)
    assert kinds(w) == {"pinned_host"}
    assert_close(w, params(), 1e-7)
    one = jax.tree.map(lambda a: a[:1], params())
    assert_close(host_init(init, keys[:1]), one, 1e-7)
    inside = jax.jit(functools.partial(host_init, init))(keys)
    assert_equal_bits(inside, w)
    with pytest.raises(ValueError, match=r"`shardings` .*params\['b'\]"):
        host_init(init, keys, shardings={"a": w["a"].sharding})
    scalars = host_init(lambda key: {"s": jax.random.normal(key)}, keys)
    assert scalars["s"].shape == (LAYERS,) and kinds(scalars) == {"pinned_host"}


def test_tuple_of_layers_inside_jit():
    tx, layers = optax.adam(0.1), different_layers()
    stream = stream_update(tx, stacked=False)

    @jax.jit
    def run(params, grads):
        return stream.update(grads, stream.init(params), params)

    params, state = run(to_host(tuple(layers)), to_host(tuple(gradients(layers, 0))))
    assert isinstance(params, tuple)
    assert_close((list(params), state), update_in_memory(lambda i: tx, layers, 1))


@pytest.mark.parametrize("stacked", [True, False])
def test_update_is_differentiable_on_the_device(stacked):
    layers = jnp.arange(1.0, 7).reshape(3, 2)
    w = layers if stacked else list(layers)
    stream = stream_update(optax.sgd(0.1), stacked=stacked)

    def loss(w, grads):
        new, _ = stream.update(grads, stream.init(w), w)
        return sum(jnp.sum(a**2) for a in new)

    got = jax.grad(loss, argnums=(0, 1))(w, w)
    want = 1.8 * layers, -0.18 * layers
    assert_close([jnp.stack(list(d)) for d in got], list(want))


def test_update_keeps_shardings(mesh8):
    tx = optax.adam(0.1)
    by_row = NamedSharding(mesh8, P("data"), memory_kind="pinned_host")
    whole = NamedSharding(mesh8, P(), memory_kind="pinned_host")
    weights = [{"a": jnp.arange(16.0).reshape(8, 2)}, {"b": jnp.ones(3)}]
    params = [
        jax.device_put(w, sharding) for w, sharding in zip(weights, (by_row, whole), strict=True)
    ]
    stream = stream_update(tx, stacked=False)
    state = stream.init(params)
    assert state[0][0].mu["a"].sharding == by_row and state[1][0].nu["b"].sharding == whole
    grads = jax.tree.map(lambda a: jax.device_put(jnp.ones(a.shape), a.sharding), params)
    step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both)))
    new, state = step((params, state), grads)
    assert new[0]["a"].sharding == by_row and state[0][0].mu["a"].sharding == by_row
    want = [optax.apply_updates(w, tx.update(jax.tree.map(jnp.ones_like, w), tx.init(w))[0])
            for w in weights]  # fmt: skip
    assert_close(to_device(new), want)


def test_rejects_invalid_arguments():
    params = to_host(different_layers())
    stream = stream_update(optax.adam(0.1), stacked=False)
    state = stream.init(params)
    with pytest.raises(TypeError, match="`params`"):
        stream.init({"a": params[0]})
    grads = [{**params[0], "c": params[0]["c"][:1]}, *params[1:]]
    with pytest.raises(ValueError, match=r"`grads`\[0\]\['c'\]"):
        stream.update(grads, state, params)


def test_noise_keys_of_layers_and_other_parameters_differ():
    """The keys of the other parameters are chains of split, which contain fold_in(key, i)."""
    keys, drawn = [KEY], []
    for _ in range(3):
        rest, sample = jax.random.split(keys[-1])
        keys.append(rest)
        drawn += [sample, *jax.random.split(sample, 4)]
    used = {tuple(np.asarray(jax.random.key_data(k))) for k in [*keys, *drawn]}
    assert tuple(np.asarray(jax.random.key_data(jax.random.fold_in(KEY, 0)))) in used
    for i in range(LAYERS):
        assert tuple(np.asarray(jax.random.key_data(reference.own_key(KEY, i)))) not in used


# Noise that all layers would share.


def from_the_count(grads, state, params=None):
    key = jax.random.fold_in(KEY, state)
    noise = jax.tree.map(lambda g: jax.random.normal(key, g.shape), grads)
    return jax.tree.map(jnp.add, grads, noise), state + 1


def in_a_loop(grads, state, params=None):
    def body(total, key):
        return total + jax.random.normal(key), None

    total, _ = jax.lax.scan(body, 0.0, jax.random.split(KEY, 3))
    return jax.tree.map(lambda g: g + total, grads), state + 1


def at_first(params):
    return jax.tree.map(lambda a: jax.random.normal(KEY, a.shape), params)


def renewed(grads, state, params=None):
    """Replace the key in the state by one that is the same in every layer."""
    count, key = state
    noise = jax.tree.map(lambda g: jax.random.normal(key, g.shape), grads)
    return jax.tree.map(jnp.add, grads, noise), (count + 1, jax.random.fold_in(KEY, count))


@pytest.mark.parametrize(
    ("init", "update"),
    [
        (lambda params: jnp.int32(0), from_the_count),
        (lambda params: jnp.int32(0), in_a_loop),
        (lambda params: (jnp.int32(0), KEY), renewed),
        (at_first, lambda grads, state, params=None: (grads, state)),
    ],
    ids=["count", "loop", "renewed", "init"],
)
def test_rejects_noise_shared_by_layers(init, update):
    tx, w = optax.GradientTransformation(init, update), to_host(params())
    with pytest.raises(ValueError, match="`tx` draws random numbers"):
        stream_update(tx).init(w)
    with pytest.raises(ValueError):
        stream_update(tx).update(w, (), w)
