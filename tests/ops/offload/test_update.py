"""stream_update of stacks and lists of layers, and host_init, compared with optax."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import host_init, offload_jit, stream_update, to_device, to_host
from tests.ops.offload import reference
from tests.ops.offload.reference import stack
from tests.ops.offload.stacks import (
    LAYERS,
    assert_close,
    assert_equal_bits,
    init,
    kinds,
    params,
)
from tests.ops.offload.steps import decayed, layers_of
from tests.tiers import vary

CLIPPED = {"clip_norm": 0.5, "clip_by": "layer"}
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


def of_form(form):
    """Return the layers, and a function of a list of them that returns the form of parameters."""
    if form == "list":
        return different_layers(), lambda layers: layers
    return layers_of(params()), stack


def gradients(layers, step):
    return jax.tree.map(lambda a: jnp.sin(a * (3 + step)), layers)


def updated_in_memory(tx, layers, steps, clip=lambda grads: grads):
    """Return parameters and states; optax updates one layer at a time."""
    new, states = list(layers), [tx.init(w) for w in layers]
    for step in range(steps):
        for i, g in enumerate(clip(gradients(layers, step))):
            updates, states[i] = tx.update(g, states[i], new[i])
            new[i] = optax.apply_updates(new[i], updates)
    return new, states


def check_update(form, tx, **clipping):
    layers, join = of_form(form)
    stream = stream_update(tx, stacked=form == "stack")
    w = to_host(join(layers))
    state = stream.init(w)
    for a in jax.tree.leaves(state):
        is_scalar = a.ndim == (form == "stack")  # of one layer
        assert a.sharding.memory_kind == ("device" if is_scalar else "pinned_host")
    step = offload_jit(lambda both, grads: stream.update(grads, *reversed(both), **clipping))
    for i in range(2):
        w, state = step((w, state), to_host(join(gradients(layers, i))))
    clip = lambda grads: grads  # noqa: E731
    if clipping:
        clipper = reference.clip_by_layer_norm(clipping["clip_norm"])
        clip = lambda grads: clipper.update({"layers": grads}, clipper.init({}))[0]["layers"]  # noqa: E731
    want, want_state = updated_in_memory(tx, layers, 2, clip)
    assert_close((w, state), (join(want), join(want_state)))
    assert kinds(w) == {"pinned_host"}


@pytest.mark.parametrize("form", ["stack", "list"])
@vary("name", OPTIMIZERS)
def test_update_matches_optax_on_each_layer(form, name):
    """Gradients of the optimizer with momentum are also clipped by the norm of each layer."""
    check_update(form, OPTIMIZERS[name], **(CLIPPED if name == "momentum" else {}))


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
    with pytest.raises(ValueError, match=r"`shardings` .* At params\['b'\]"):
        host_init(init, keys, shardings={"a": w["a"].sharding})
    scalars = host_init(lambda key: {"s": jax.random.normal(key)}, keys)
    assert scalars["s"].shape == (LAYERS,) and kinds(scalars) == {"pinned_host"}


def test_tuple_of_layers_inside_jit():
    stream = stream_update(optax.adam(0.1), stacked=False)

    @jax.jit
    def run(params, grads):
        return stream.update(grads, stream.init(params), params)

    params, state = run(
        to_host(tuple(different_layers())), to_host(tuple(gradients(different_layers(), 0)))
    )
    assert isinstance(params, tuple)
    assert_close((list(params), state), updated_in_memory(optax.adam(0.1), different_layers(), 1))


def test_moments_have_the_sharding_of_the_parameter_with_the_longest_path(mesh8):
    by_row, whole = (NamedSharding(mesh8, spec) for spec in (P(None, "data"), P()))
    kernel = jnp.ones((2, 8, 8))
    params = {
        "kernel": jax.device_put(kernel, whole),
        "mlp": {"kernel": jax.device_put(kernel, by_row)},
    }
    moments = stream_update(optax.adam(0.1)).init(params)[0].mu
    assert moments["kernel"].sharding.is_equivalent_to(whole, 3)
    assert moments["mlp"]["kernel"].sharding.is_equivalent_to(by_row, 3)


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
    with pytest.raises(TypeError, match="`params` must be a list or a tuple, .* not a dict"):
        stream.init({"a": params[0]})
    grads = [{**params[0], "c": params[0]["c"][:1]}, *params[1:]]
    with pytest.raises(ValueError, match=r"`grads`\[0\]\['c'\] must have the shape \(5,\)"):
        stream.update(grads, state, params)
