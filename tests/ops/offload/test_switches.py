"""Offloading where JAX is asked for its next loops and rules: the same results."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax import (
    host_init,
    offload_jit,
    offload_scan,
    offload_sequential,
    offload_train_step,
    to_device,
    to_host,
)
from effjax.ops.offload import compiled
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_equal_bits,
    init,
    inputs,
    kinds,
    layer,
    loss,
    params,
)
from tests.tiers import exhaustive

pytestmark = pytest.mark.exhaustive  # JAX as it may be one day


@pytest.fixture(params=["jax_scan3", "jax_custom_vjp3"])
def switch(request):
    name = request.param
    if not hasattr(jax.config, name):
        pytest.skip(f"jax {jax.__version__} has no {name}")
    return name


@contextlib.contextmanager
def switched_on(name):
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def with_and_without(switch, run, same=assert_equal_bits):
    """The result of ``run()`` with the switch, after comparing it with that without."""
    want = run()
    with switched_on(switch):
        got = run()
    same(got, want)
    return got


def close(got, want):
    """What layers of a slice that are not in a loop may differ by."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_host_init(switch):
    keys = jax.random.split(KEY, LAYERS)
    w = with_and_without(switch, lambda: host_init(init, keys))
    assert kinds(w) == {"pinned_host"}
    inside = with_and_without(switch, lambda: jax.jit(functools.partial(host_init, init))(keys))
    assert kinds(inside) == {"pinned_host"}


@pytest.mark.parametrize(
    ("options", "same"),
    [
        exhaustive({"num_microbatches": 2, "resident_slices": 1}, assert_equal_bits),
        ({"num_slices": 2}, close),
        ({"num_slices": 2, "policy": POLICIES["dots"]}, assert_equal_bits),
        exhaustive({"num_microbatches": 2, "policy": POLICIES["everything"]}, assert_equal_bits),
    ],
)
def test_gradients_of_a_stack(switch, options, same):
    """Of what the layers close over too, and of their second results, in their order."""

    def run():
        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
        def gradients(w, x, scale):
            def scaled(w, x, key):
                return layer(w, x * scale, key), x.mean()

            y, aux = offload_scan(scaled, w, x, key=KEY, has_aux=True, **options)
            return loss(y) + jnp.sum(aux**2 * jnp.arange(1.0, 1 + LAYERS)[:, None])

        return gradients(to_host(params()), inputs(), jnp.linspace(0.5, 1.5, WIDTH))

    _, (dw, *_) = with_and_without(switch, run, same)
    assert kinds(dw) == {"pinned_host"}


def test_keys_among_the_arrays(switch):
    keys = jax.random.split(KEY, inputs().shape[0])

    def keyed(w, x, _):
        draw = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(x["key"])
        return {"h": layer(w, x["h"] + draw, None), "key": x["key"]}

    def run():
        def total(w):
            x = {"h": inputs(), "key": keys}
            return loss(offload_scan(keyed, w, x, num_microbatches=2)["h"])

        return jax.jit(jax.grad(total))(to_host(params()))

    with_and_without(switch, run)


@pytest.mark.parametrize("policy", [exhaustive("recomputed"), "dots"])
def test_gradients_of_a_sequence(switch, policy, optimized):
    w = [jax.tree.map(lambda a: to_host(a[0]), params())] * 2

    def run():
        def total(w):
            options = {"key": KEY, "num_microbatches": 2, "policy": POLICIES[policy]}
            return loss(offload_sequential([layer] * 2, w, inputs(), **options))

        return jax.jit(jax.grad(total))(w)

    assert kinds(with_and_without(switch, run)) == {"pinned_host"}


@pytest.mark.parametrize("params_in", ["host", exhaustive("device")])
def test_training_steps_with_a_state_in_microbatches(switch, params_in):
    def run():
        start, step = offload_train_step(
            lambda others, state, batch, key: (batch @ others["in"] + state, 0.5 * state),
            lambda w, x, key: layer(w["trained"], x + w["shift"].astype(x.dtype), key),
            lambda others, state, x, batch, key: (loss(x), state + x.mean(), x.max()),
            optax.adam(1e-2),
            has_state=True,
            head_has_aux=True,
            num_microbatches=2,
            params_in=params_in,
            trainable=lambda path, leaf: path[0].key == "trained",
        )
        w = {"trained": params(), "shift": jnp.arange(LAYERS, dtype=jnp.int8)[:, None]}
        state = start(
            to_host(w) if params_in == "host" else w, {"in": jnp.eye(WIDTH)}, jnp.ones(())
        )
        return offload_jit(step)(state, inputs(), KEY)

    state, _, aux = with_and_without(switch, run, close)
    assert aux.shape == (2,)
    assert kinds(state.layers) == {"pinned_host" if params_in == "host" else "device"}


@pytest.mark.parametrize(
    ("fuse_update", "policy"), [(True, "recomputed"), exhaustive(False, "everything")]
)
def test_training_steps(switch, fuse_update, policy):
    def run():
        start, step = offload_train_step(
            lambda others, batch, key: batch @ others,
            layer,
            lambda others, x, batch, key: loss(x),
            optax.adam(1e-2),
            fuse_update=fuse_update,
            clip_norm=None if fuse_update else 0.1,
            policy=POLICIES[policy],
        )
        state, losses = start(to_host(params()), jnp.eye(WIDTH)), []
        step = offload_jit(step)
        for i in range(2):
            state, value = step(state, inputs(), jax.random.fold_in(KEY, i))
            losses.append(value)
        return losses, state

    _, state = with_and_without(switch, run)
    assert kinds(state.layers) == {"pinned_host"}


def stack(w, x):
    return offload_scan(layer, w, x, key=KEY, num_microbatches=2)


def sequence(w, x):
    listed = [jax.tree.map(lambda a, i=i: to_host(to_device(a)[i]), w) for i in range(2)]
    return offload_sequential([layer] * 2, listed, x, key=KEY, num_microbatches=2)


@pytest.mark.parametrize("apply", [stack, sequence])
def test_forward_alone(switch, apply, optimized):
    with_and_without(switch, lambda: jax.jit(apply)(to_host(params()), inputs()))


@pytest.mark.parametrize("apply", [stack, sequence])
def test_options_are_read_from_the_program(switch, apply):
    """Forward alone, where the rule of a custom_vjp is still a parameter, and of gradients."""

    def total(w, x):
        return apply(w, x).sum()

    programs = [
        apply,
        jax.jit(apply),
        jax.checkpoint(apply),
        lambda w, x: jax.vmap(functools.partial(apply, w))(x[None]),
        lambda w, x: jax.lax.cond(x[0, 0] > 0, total, lambda w, x: 0.0, w, x),
        jax.grad(total, 1),
        jax.grad(jax.checkpoint(total)),
        jax.value_and_grad(jax.jit(total), (0, 1)),
    ]
    needed = [functools.partial(options_of, program) for program in programs]
    want = [of_one() for of_one in needed]
    assert all(want) and all(options == want[0] for options in want)
    with switched_on(switch):
        assert [of_one() for of_one in needed] == want


def options_of(program):
    traced = jax.jit(lambda *args: program(*args)).trace(to_host(params()), inputs())
    return compiled.needed_options(traced.jaxpr)
