"""Frozen parameters: gradients of the trained ones, and no writes to the frozen ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, offload_scan, offload_train_step, to_device, to_host
from tests.contexts import mesh_of
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    WIDTH,
    assert_close,
    assert_equal_bits,
    in_memory,
    inputs,
    kinds,
    layer,
    loss,
    params,
    value_and_grads,
)
from tests.ops.offload.steps import TOKENS, embed, head, others
from tests.tiers import exhaustive, plainly

RANK = 2


def quantized():
    """Return low-rank matrices and frozen int8 kernels with their scales."""
    w = params()
    scale = jnp.abs(w["a"]).max((1, 2), keepdims=True) / 127
    keys = jax.random.split(jax.random.key(4))
    return {
        "kernel": jnp.round(w["a"] / scale).astype(jnp.int8),
        "scale": scale,
        "low": {
            "a": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, RANK)),
            "b": 0.1 * jax.random.normal(keys[1], (LAYERS, RANK, 2 * WIDTH)),
        },
        "out": w["b"].astype(jnp.bfloat16),
    }


def low_rank_layer(w, x, key):
    kernel = w["kernel"].astype(x.dtype) * w["scale"] + w["low"]["a"] @ w["low"]["b"]
    h = jnp.tanh(x @ kernel)
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0) if key is not None else h
    return x + h @ w["out"].astype(x.dtype)


def is_low(path, leaf):
    return path[0].key == "low"


def merged(low, w=None):
    return {**(w or quantized()), "low": low}


@functools.cache
def want(m):
    run = lambda low, x: in_memory(low_rank_layer, merged(low), x, KEY, m)  # noqa: E731
    return value_and_grads(run, quantized()["low"], inputs())


@pytest.mark.parametrize(
    "options",
    [
        exhaustive({"num_slices": 2, "num_microbatches": 2}),
        exhaustive({"resident_slices": 1}),
        exhaustive({"params_in": "device"}),
    ],
    ids=str,
)
def test_gradients_of_low_rank_parameters_match_in_memory(options):
    w = quantized()
    if options.get("params_in") != "device":
        w = to_host(w)
    run = lambda low, x: offload_scan(  # noqa: E731
        low_rank_layer, merged(low, w), x, key=KEY, trainable=is_low, **options
    )
    got = value_and_grads(run, w["low"], inputs())
    assert_close(got, want(options.get("num_microbatches", 1)), rtol=1e-5, atol=1e-6)
    assert kinds(got[1][0]) == kinds(w["low"])


FLAGS = {
    "path": lambda path, leaf: path[0].key != "b",
    "tree": {"a": True, "b": False, "c": np.True_},
}


@pytest.mark.parametrize(("name", "params_in"), [("tree", "host"), exhaustive("path", "device")])
def test_gradients_of_frozen_parameters_are_zeros(name, params_in):
    w = params() if params_in == "device" else to_host(params())
    apply = functools.partial(offload_scan, layer, key=KEY, params_in=params_in)
    value, (dw, dx) = value_and_grads(functools.partial(apply, trainable=FLAGS[name]), w, inputs())
    want_value, (want_dw, want_dx) = value_and_grads(apply, w, inputs())
    assert kinds(dw) == kinds(w)
    want_dw = {**to_device(want_dw), "b": jnp.zeros_like(params()["b"])}
    assert_close((value, dw, dx), (want_value, want_dw, want_dx), rtol=1e-5, atol=1e-6)


def test_gradient_passes_through_frozen_layers():
    run = lambda x: offload_scan(layer, to_host(params()), x, trainable=False)  # noqa: E731
    got = jax.grad(lambda x: loss(run(x)))(inputs())
    expected = jax.grad(lambda x: loss(in_memory(layer, params(), x, None)))(inputs())
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_shard_map():
    mesh = mesh_of((8,), ("i",))
    w = quantized()

    def local(low, rest, x):
        def total(low):
            y = offload_scan(low_rank_layer, merged(low, rest), x, trainable=is_low)
            return lax.pmean(loss(y), "i")

        return jax.value_and_grad(total)(low)

    specs = {"in_specs": (P(), P(), P("i")), "out_specs": P()}
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    on_host = jax.device_put(w, host)
    run = jax.jit(jax.shard_map(local, mesh=mesh, **specs), out_shardings=(None, host))
    got = run(on_host["low"], on_host, inputs())
    expected = jax.value_and_grad(
        lambda low: loss(in_memory(low_rank_layer, merged(low), inputs(), None))
    )(w["low"])
    assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_over_mesh(kind):
    mesh = mesh_of((8,), ("i",), kind)
    with jax.set_mesh(mesh):
        spec = P(None, "i") if kind == AxisType.Auto else P()
        w = jax.device_put(params(), NamedSharding(mesh, spec, memory_kind="pinned_host"))
        x = jax.device_put(inputs(), NamedSharding(mesh, P("i")))
        run = lambda w, x: offload_scan(layer, w, x, trainable=FLAGS["tree"])  # noqa: E731
        value, (dw, dx) = value_and_grads(run, w, x)
    want_value, (want_dw, want_dx) = value_and_grads(
        lambda w, x: in_memory(layer, w, x, None), params(), inputs()
    )
    want_dw["b"] = jnp.zeros_like(want_dw["b"])
    assert_close((value, dw, dx), (want_value, want_dw, want_dx), rtol=1e-4, atol=1e-6)
    assert kinds(dw) == {"pinned_host"}


def by_path(tree):
    """Return a mask that decays only the parameters named `a`."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "a", tree)


TX = optax.adamw(1e-2, weight_decay=0.1, mask=by_path)
STEPS = {
    "fused": {"num_slices": 2, "num_microbatches": 2},
    "clipped on device": {"fuse_update": False, "clip_norm": 0.1, "params_in": "device"},
}


@functools.cache
def trained(m, clip_norm):
    """Return the trained parameters after two steps in memory."""
    tx = TX if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), TX)

    def total(model, key):
        other = {"e": model["e"], "u": others()["u"]}
        fold = lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j)  # noqa: E731
        parts = TOKENS.reshape(m, -1)
        x = [embed(other, part, fold(LAYERS, j)) for j, part in enumerate(parts)]
        y = in_memory(low_rank_layer, merged(model["low"]), jnp.concatenate(x), key, m)
        y = y.reshape(m, -1, WIDTH)
        losses = [head(other, y[j], part, fold(LAYERS + 1, j)) for j, part in enumerate(parts)]
        return sum(losses) / m

    model = {"low": quantized()["low"], "e": others()["e"]}
    state, gradients = tx.init(model), jax.jit(jax.grad(total))
    for i in range(2):
        grads = gradients(model, jax.random.fold_in(KEY, i))
        updates, state = tx.update(grads, state, model)
        model = optax.apply_updates(model, updates)
    return model


@pytest.mark.parametrize("name", plainly("fused", of=STEPS))
def test_train_step_with_low_rank_parameters(name):
    options = STEPS[name]
    where = options.get("params_in", "host")
    init, step = offload_train_step(
        embed, low_rank_layer, head, TX, trainable=is_low,
        trainable_others={"e": True, "u": False}, **options,
    )  # fmt: skip
    w, other = quantized(), others()
    state = init(w if where == "device" else to_host(w), other)
    moments = jax.tree.leaves(state.layers_state)
    assert {a.shape for a in moments if a.ndim > 1} == {a.shape for a in jax.tree.leaves(w["low"])}
    frozen = jax.tree.map(np.asarray, {**w, "low": ()})
    step = offload_jit(step)
    for i in range(2):
        state, _ = step(state, TOKENS, jax.random.fold_in(KEY, i))
    model = trained(options.get("num_microbatches", 1), options.get("clip_norm"))
    assert_close(
        (state.layers["low"], state.others["e"]), (model["low"], model["e"]), rtol=1e-4, atol=1e-5
    )
    assert_equal_bits({**state.layers, "low": ()}, frozen)
    np.testing.assert_array_equal(state.others["u"], other["u"])
    assert kinds(state.layers) == {"device" if where == "device" else "pinned_host"}


def test_train_step_with_frozen_integer_others():
    init, step = offload_train_step(
        lambda others, batch, key: others["codes"].astype(jnp.float32)[batch] * 0.1, layer,
        lambda others, x, batch, key: loss(x), TX, trainable_others=False,
    )  # fmt: skip
    codes = jnp.arange(11 * WIDTH, dtype=jnp.int8).reshape(11, WIDTH)
    state, _ = offload_jit(step)(init(to_host(params()), {"codes": codes}), TOKENS)
    np.testing.assert_array_equal(state.others["codes"], codes)


@pytest.mark.parametrize(
    ("match", "w", "options"),
    [
        ("`trained layers` must be arrays .* their first axes are none", params(),
         {"trainable": lambda path, leaf: False}),
        (r"`layers`\['kernel'\] must be floating-point .* int8", quantized(), {}),
        ("different numbers of pytree children", params(),
         {"trainable": {"a": True}}),
    ],
    ids=["none", "integers", "another tree"],
)  # fmt: skip
def test_train_step_rejects_trainable(match, w, options):
    init, _ = offload_train_step(embed, layer, head, TX, **options)
    with pytest.raises((TypeError, ValueError), match=match):
        init(to_host(w), others())
