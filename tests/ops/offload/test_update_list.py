"""stream_update of a list of different layers, compared with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, stream_update, to_device, to_host
from effjax.memory import plan
from tests.ops.offload.stacks import kinds
from tests.ops.offload.test_noise import own_key
from tests.ops.offload.test_update import OPTIMIZERS, close
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive, plainly


def layers():
    """Return different layers, one without parameters, one with a scalar."""
    a, b, c = jax.random.split(jax.random.key(0), 3)
    return [
        {"a": jax.random.normal(a, (3, 5)), "c": jnp.ones(5)},
        {},
        {"b": jax.random.normal(b, (5, 2, 2)), "s": jnp.float32(0.5)},
        {"a": jax.random.normal(c, (4,))},
    ]


def gradients(step):
    return jax.tree.map(lambda a: jnp.sin(a * (3 + step)), layers())


def in_memory(tx, steps, clip=lambda grads: grads):
    """Return parameters and states; optax updates one layer at a time."""
    params = layers()
    states = [tx.init(w) for w in params]
    for step in range(steps):
        for i, g in enumerate(clip(gradients(step))):
            updates, states[i] = tx.update(g, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    return params, states


# "by_name" labels the parameters of a single layer.
@pytest.mark.parametrize("name", plainly("adamw", of=[n for n in OPTIMIZERS if n != "by_name"]))
def test_update_matches_optax_on_each_layer(name):
    stream = stream_update(OPTIMIZERS[name], stacked=False)
    params = to_host(layers())
    state = stream.init(params)
    for a in jax.tree.leaves(state):
        assert a.sharding.memory_kind == ("pinned_host" if a.ndim else "device")
    step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both)))
    for i in range(2):
        params, state = step((params, state), to_host(gradients(i)))
    close((params, state), in_memory(OPTIMIZERS[name], 2))
    assert kinds(params) == {"pinned_host"}
    assert isinstance(params, list)


def test_clip_norm_is_over_all_layers():
    tx = optax.adam(0.1)
    stream = stream_update(tx, stacked=False)
    for norm in (0.5, 100.0):
        clip = lambda g, norm=norm: optax.clip_by_global_norm(norm).update(g, None)[0]  # noqa: E731
        params = to_host(layers())
        update = jax.jit(functools.partial(stream.update, clip_norm=norm))
        close(update(to_host(gradients(0)), stream.init(params), params), in_memory(tx, 1, clip))


def test_tuple_of_layers_inside_jit():
    stream = stream_update(optax.adam(0.1), stacked=False)

    @jax.jit
    def run(params, grads):
        return stream.update(grads, stream.init(params), params)

    params, state = run(to_host(tuple(layers())), to_host(tuple(gradients(0))))
    assert isinstance(params, tuple)
    close((list(params), state), in_memory(optax.adam(0.1), 1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, exhaustive(jnp.float16)])
def test_half_precision(dtype):
    cast = functools.partial(jax.tree.map, lambda a: a.astype(dtype))
    stream, tx = stream_update(optax.adam(0.1), stacked=False), optax.adam(0.1)
    params, grads = cast(layers()), cast(gradients(0))
    got, _state = jax.jit(stream.update)(
        to_host(grads), stream.init(to_host(params)), to_host(params)
    )
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    for w, g, new in zip(params, grads, got, strict=True):
        want = optax.apply_updates(w, jax.jit(tx.update)(g, tx.init(w), w)[0])
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-2)
        jax.tree.map(lambda a, b, c=compare: c(np.float32(a), np.float32(b)), new, want)


def test_layers_draw_independent_noise():
    make = lambda key: optax.noisy_sgd(1.0, eta=0.1, key=key)  # noqa: E731
    key = jax.random.key(3)
    stream, params = stream_update(make(key), stacked=False), layers()
    got, _ = jax.jit(stream.update)(
        to_host(gradients(0)), stream.init(to_host(params)), to_host(params)
    )
    for i, (w, g) in enumerate(zip(params, gradients(0), strict=True)):
        tx = make(own_key(key, i))
        close(got[i], optax.apply_updates(w, tx.update(g, tx.init(w), w)[0]))


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
    close(to_device(new), want)


def test_rejects_invalid_arguments():
    params = to_host(layers())
    stream = stream_update(optax.adam(0.1), stacked=False)
    state = stream.init(params)
    with pytest.raises(TypeError, match="`params` must be a list or a tuple, .* not a dict"):
        stream.init({"a": params[0]})
    with pytest.raises(ValueError, match="`state` must have the states of 4 layers, not of 3"):
        stream.update(params, state[:3], params)
    with pytest.raises(
        ValueError, match=r"`state\[2\]` must have the structure of the result of init"
    ):
        stream.update(params, [*state[:2], state[0], state[3]], params)
    with pytest.raises(ValueError, match="`grads` must have the structure of `params`"):
        stream.update(params[:3], state, params)


@needs_gpu_compiler
@pytest.mark.exhaustive
def test_device_memory_does_not_grow_with_depth():
    # Parameters, gradient and two moments of 1024 x 1024 take 16 MiB per layer.
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    stream = stream_update(optax.adam(1e-3), stacked=False)

    def planned(count):
        w = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=host)] * count
        one = jax.eval_shape(optax.adam(1e-3).init, w[0])
        here = lambda a: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=host if a.ndim else NamedSharding(mesh, P())
        )
        state = [jax.tree.map(here, one)] * count
        step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both)))
        return plan(step, (w, state), w)

    few, many = planned(4), planned(8)
    assert many.peak_device_bytes <= 1.01 * few.peak_device_bytes
    assert many.peak_device_bytes <= 2.6 * 16 * 2**20
    assert many.host.temporaries <= 2**14
