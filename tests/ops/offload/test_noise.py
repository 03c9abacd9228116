"""Optimizers that draw noise: each layer has its own key; shared keys are rejected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax import stream_update, to_device, to_host
from tests.ops.offload.reference import own_key
from tests.ops.offload.stacks import LAYERS, assert_close, kinds, to_numpy
from tests.tiers import vary

KEY = jax.random.key(3)
SHAPES = {"a": (3, 2), "b": (3,)}
noisy_sgd = functools.partial(optax.noisy_sgd, 1.0, eta=0.1)


def params():
    return {name: jnp.ones((LAYERS, *shape)) for name, shape in SHAPES.items()}


def old_style(key):
    """Draw noise from a uint32 key in the optimizer state."""

    def update(updates, state, params=None):
        count, key = state
        key, sample = jax.random.split(key)
        noise = jax.tree.map(lambda g: jax.random.normal(sample, g.shape), updates)
        return jax.tree.map(jnp.add, updates, noise), (count + 1, key)

    return optax.GradientTransformation(lambda params: (jnp.uint32([0, 0]), key), update)


OPTIMIZERS = {
    "noisy_sgd": (lambda key: noisy_sgd(key=key), KEY),
    "uint32 key": (old_style, jax.random.PRNGKey(3)),
    "among others": (lambda key: optax.chain(optax.add_noise(0.1, 0.5, key), optax.adam(0.1)), KEY),
    "every second step": (
        lambda key: optax.MultiSteps(noisy_sgd(key=key), 2).gradient_transformation(),
        KEY,
    ),
}


def of_each_layer(make, key, grads, steps):
    """Update each layer with its own optimizer and its own key."""
    results = []
    for i in range(LAYERS):
        tx = make(own_key(key, i))
        w = jax.tree.map(lambda a, i=i: a[i], params())
        g, state = jax.tree.map(lambda a, i=i: a[i], grads), tx.init(w)
        for _ in range(steps):
            updates, state = tx.update(g, state, w)
            w = optax.apply_updates(w, updates)
        results.append((w, state))
    return jax.tree.map(lambda *a: jnp.stack(a), *results)


@vary("name", OPTIMIZERS)
def test_layers_draw_independent_noise(name):
    make, key = OPTIMIZERS[name]
    init, update = stream_update(make(key))
    w, grads = to_host(params()), params()
    state, update = init(w), jax.jit(update)
    for _ in range(2):
        w, state = update(to_host(grads), state, w)
    got, want = map(to_numpy, (to_device((w, state)), of_each_layer(make, key, grads, 2)))
    assert_close(got, want, 1e-5, 1e-6)
    assert kinds(w) == {"pinned_host"}
    for a in jax.tree.leaves(w):
        assert len(np.unique(np.asarray(a))) == a.size


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
        assert tuple(np.asarray(jax.random.key_data(own_key(KEY, i)))) not in used


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
    with pytest.raises(ValueError, match="`tx` draws random numbers .*optax.add_noise"):
        stream_update(tx).init(w)
    with pytest.raises(ValueError):
        stream_update(tx).update(w, (), w)
