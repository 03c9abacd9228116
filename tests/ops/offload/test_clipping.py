"""Clipping by the norm of the previous step and by layer, compared with optax in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, offload_train_step, stream_update, to_host
from tests.contexts import mesh_of
from tests.ops.offload.clips import CLIPS
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    WIDTH,
    assert_close,
    assert_equal_bits,
    layer,
    on,
    params,
)
from tests.ops.offload.steps import (
    TOKENS,
    close,
    embed,
    head,
    layers_of,
    others,
    stack,
    train_in_memory,
)
from tests.ops.offload.test_update import different_layers, gradients, updated_in_memory
from tests.tiers import exhaustive, product_cases

SGD = optax.sgd(0.5, momentum=0.9)  # unlike Adam, it depends on the size of the gradients
NORM = 0.1
OPTIONS = {
    "fused": {},
    "slices": {"num_slices": 2, "num_microbatches": 2},
    "apart": {"fuse_update": False, "num_microbatches": 2},
    "scaled": {"fuse_update": False, "loss_scale": 64.0},
    "on_device": {"params_in": "device", "num_slices": 2},
}


@functools.cache
def in_memory(clip_by, m):
    tx = optax.chain(CLIPS[clip_by](NORM), SGD)
    return train_in_memory(tx, m=m)[:3]


def train(form, state, step, steps=3):
    run, losses = offload_jit(step), []
    for i in range(steps):
        state, loss = run(state, TOKENS, jax.random.fold_in(KEY, i))
        losses.append(loss)
    if form == "list":
        state = state._replace(layers=stack(jax.tree.map(np.asarray, state.layers)))
    return losses, state


@pytest.mark.parametrize(
    ("form", "clip_by", "name"),
    product_cases(
        ["stack", "list"],
        ["previous", "layer"],
        OPTIONS,
        plain=[
            ("stack", "previous", "slices"),
            ("list", "previous", "fused"),
            ("stack", "layer", "scaled"),
        ],
    ),
)
def test_step_matches_optax(form, clip_by, name):
    options = OPTIONS[name]
    layers = layer if form == "stack" else [layer] * LAYERS
    init, step = offload_train_step(
        embed, layers, head, SGD, clip_norm=NORM, clip_by=clip_by, **options
    )
    w = params() if form == "stack" else layers_of(params())
    w = w if options.get("params_in") == "device" else to_host(w)
    losses, state = train(form, init(w, others()), step)
    want = in_memory(clip_by, options.get("num_microbatches", 1))
    close((losses, state.layers, state.others), want, 5e-6)
    unclipped = train_in_memory(SGD)[0]
    assert abs(float(losses[2]) - float(unclipped[2])) > 1e-3
    assert len(jax.tree.leaves(state.grad_norm)) == (clip_by == "previous")


def test_previous_norm_by_hand():
    """In float64, with a given norm for the first step."""
    with jax.enable_x64(True):
        w, other = (
            jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
            for tree in (layers_of(params()), others())
        )

        def loss(model):
            x = embed(model["others"], TOKENS, None)
            for one in model["layers"]:
                x = layer(one, x, None)
            return head(model["others"], x, TOKENS, None)

        init, step = offload_train_step(
            embed, layer, head, optax.sgd(0.5), clip_norm=NORM, clip_by="previous", num_slices=2
        )
        state, step = init(to_host(stack(w)), other), offload_jit(step)
        assert state.grad_norm == 0 and state.grad_norm.dtype == jnp.float64
        state = state._replace(grad_norm=jnp.float64(0.3))
        model, norm, factors = {"layers": w, "others": other}, 0.3, []
        for _ in range(4):
            factors.append(min(1.0, NORM / norm))
            grads = jax.grad(loss)(model)
            model = jax.tree.map(lambda p, g: p - 0.5 * factors[-1] * g, model, grads)
            norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
            state, _ = step(state, TOKENS)
            np.testing.assert_allclose(state.grad_norm, norm, rtol=1e-12)
        close((state.layers, state.others), (stack(model["layers"]), model["others"]), 1e-12)
        assert len({round(f, 6) for f in factors}) == 4 and max(factors) < 1


def test_resumed_run_is_equal_to_the_bit():
    init, step = offload_train_step(embed, layer, head, SGD, clip_norm=NORM, clip_by="previous")
    step = offload_jit(step)

    def run(state, steps):
        for i in steps:
            state, _ = step(state, TOKENS, jax.random.fold_in(KEY, i))
        return state

    whole = run(init(to_host(params()), others()), range(4))
    half = run(init(to_host(params()), others()), range(2))
    saved = jax.tree.map(np.asarray, half)
    fresh = init(to_host(params()), others())
    resumed = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), saved, fresh)
    assert_equal_bits(run(resumed, range(2, 4)), whole)


def scaled_head(others, x, batch, key):
    return head(others, x, batch["tokens"], key) * batch["scale"]


def make_scaled(**options):
    return offload_train_step(
        lambda others, batch, key: embed(others, batch["tokens"], key),
        layer, scaled_head, optax.sgd(1e-26), clip_norm=NORM, **options,
    )  # fmt: skip


def test_infinite_norm_is_not_stored():
    init, step = make_scaled(clip_by="previous")
    state, step = init(to_host(params()), others()), offload_jit(step)
    norms = []
    for scale in (1.0, 1e25, jnp.inf, jnp.nan):  # finite gradients, then others
        state, _ = step(state, {"tokens": TOKENS, "scale": jnp.float32(scale)})
        norms.append(float(state.grad_norm))
        if scale == 1e25:
            assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.layers))
    assert norms[0] > NORM and norms == norms[:1] * 4


def test_skipped_step_keeps_the_norm():
    init, step = make_scaled(clip_by="previous", fuse_update=False, skip_nonfinite=True)
    state, step = init(to_host(params()), others()), offload_jit(step)
    state, _ = step(state, {"tokens": TOKENS, "scale": jnp.float32(1)})
    before = jax.tree.map(np.asarray, state)
    state, loss = step(state, {"tokens": TOKENS, "scale": jnp.float32(jnp.nan)})
    assert jnp.isnan(loss)
    assert_equal_bits(state, before)


def test_layer_with_nan_does_not_change_others():
    """As in optax, gradients that are NaN stay NaN; here those of one layer."""

    def poisoned(w, x, key):
        return x + w["w"] * x

    init, step = offload_train_step(
        lambda others, batch, key: batch, [poisoned, poisoned],
        lambda others, x, batch, key: jnp.sum(x) + jnp.sum(others["in"]),
        optax.sgd(0.1), params_in="device", clip_norm=1.0, clip_by="layer",
    )  # fmt: skip
    w = [{"w": jnp.zeros(3)}, {"w": jnp.full(3, jnp.nan)}]  # the gradient of the first is NaN
    state, _ = step(init(w, {"in": jnp.ones(3)}), jnp.ones(3))
    assert np.isnan(state.layers[0]["w"]).all()
    np.testing.assert_allclose(state.others["in"], 1 - 0.1 / np.sqrt(3), rtol=1e-6)


@pytest.mark.parametrize("clip_by", ["previous", "layer"])
def test_frozen_parameters_do_not_count(clip_by):
    init, step = offload_train_step(
        embed, layer, head, SGD, clip_norm=NORM, clip_by=clip_by,
        trainable=lambda path, leaf: path[0].key != "b", trainable_others={"e": False, "u": True},
    )  # fmt: skip
    _, state = train("stack", init(to_host(params()), others()), step)
    trained = {"layers": [{"a": True, "b": False, "c": True}] * LAYERS}
    trained["others"] = {"e": False, "u": True}
    freeze = optax.masked(optax.set_to_zero(), jax.tree.map(lambda a: not a, trained))
    want = train_in_memory(optax.chain(freeze, CLIPS[clip_by](NORM), SGD))
    close((state.layers, state.others), want[1:3], 5e-6)


@pytest.mark.parametrize(
    ("clip_by", "fuse_update"),
    [
        ("global", False),
        ("previous", True),
        exhaustive("layer", True),
        exhaustive("layer", False),
    ],
)
def test_shard_map_with_sharded_and_replicated_parameters(clip_by, fuse_update):
    """The norm of a sharded parameter is that of all its shards, in every step on every device."""
    mesh, tx = mesh_of((8,), ("i",)), optax.sgd(0.5)
    w = {"a": jnp.ones((2, WIDTH)), "b": jnp.arange(16.0 * WIDTH).reshape(2, 8, WIDTH) / 16}
    x = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)
    init, step = offload_train_step(
        lambda others, batch, key: batch + others["in"],
        lambda w, x, key: x * w["b"][0] + w["a"],
        lambda others, x, batch, key: lax.pmean(jnp.mean(jnp.sin(x)), "i"),
        tx, fuse_update=fuse_update, num_microbatches=2, clip_norm=0.02, clip_by=clip_by,
    )  # fmt: skip
    specs = {"a": P(), "b": P(None, "i")}
    place = lambda a, spec: jax.device_put(a, on(mesh, spec, host=True))  # noqa: E731
    start = {"in": jnp.zeros(WIDTH)}
    state = init(jax.tree.map(place, w, specs), jax.device_put(start, on(mesh, P())))
    specs = jax.tree.map(lambda _: P(), state)._replace(layers=specs)
    run = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("i")), out_specs=(specs, P()))
    run, batch = offload_jit(run), jax.device_put(x, on(mesh, P("i")))
    model = {"layers": [jax.tree.map(lambda a, i=i: a[i], w) for i in range(2)], "others": start}
    want_tx = optax.chain(CLIPS[clip_by](0.02), tx)
    want_state = want_tx.init(model)

    def loss(model):
        y = x + model["others"]["in"]
        for w in model["layers"]:
            y = y * jnp.repeat(w["b"], 2, 0) + w["a"]
        return jnp.mean(jnp.sin(y))

    for _ in range(2):
        state, _ = run(state, batch)
        updates, want_state = want_tx.update(jax.grad(loss)(model), want_state)
        model = optax.apply_updates(model, updates)
    got = jax.tree.map(np.asarray, (state.layers, state.others))
    assert_close(got, (stack(model["layers"]), model["others"]), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("clip_by", "kind", "spec"),
    [
        ("previous", AxisType.Auto, P(None, "i")),
        exhaustive("layer", AxisType.Explicit, P()),
        exhaustive("layer", AxisType.Auto, P(None, "i")),
        exhaustive("previous", AxisType.Explicit, P()),
    ],
    ids=str,
)
def test_jit_over_mesh(clip_by, kind, spec):
    mesh = mesh_of((8,), ("i",), kind)

    def embed(others, batch, key):
        return jax.nn.one_hot(batch, 11) @ others["e"]

    def head(others, x, batch, key):
        return optax.softmax_cross_entropy(x @ others["u"], jax.nn.one_hot(batch, 11)).mean()

    with jax.set_mesh(mesh):
        init, step = offload_train_step(
            embed, layer, head, SGD, clip_norm=NORM, clip_by=clip_by, num_slices=2
        )
        state = init(
            jax.device_put(params(), on(mesh, spec, True)), jax.device_put(others(), on(mesh, P()))
        )
        batch, step = jax.device_put(jnp.tile(TOKENS, 2), on(mesh, P("i"))), offload_jit(step)
        for _ in range(2):
            state, _ = step(state, batch)
    tx = optax.chain(CLIPS[clip_by](NORM), SGD)
    ends = (
        lambda others, state, batch, key: (embed(others, batch, key), state),
        lambda others, state, x, batch, key: (head(others, x, batch, key), state, ()),
    )
    want = train_in_memory(tx, batch=jnp.tile(TOKENS, 2), key=None, steps=2, ends=ends)
    assert_close(
        jax.tree.map(np.asarray, (state.layers, state.others)), want[1:3], rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("form", ["stack", exhaustive("list")])
def test_stream_update_clips_by_layer(form):
    layers = layers_of(params()) if form == "stack" else different_layers()
    join = stack if form == "stack" else list
    stream = stream_update(optax.sgd(1.0), stacked=form == "stack")
    clip = CLIPS["layer"](0.5)
    w = to_host(join(layers))
    update = jax.jit(functools.partial(stream.update, clip_norm=0.5, clip_by="layer"))
    got, _ = update(to_host(join(gradients(layers, 0))), stream.init(w), w)
    by_layer = lambda grads: clip.update({"layers": grads}, optax.EmptyState())[0]["layers"]  # noqa: E731
    want, _ = updated_in_memory(optax.sgd(1.0), layers, 1, by_layer)
    close(got, join(want))


def test_rejects_invalid_arguments():
    make = functools.partial(offload_train_step, embed, layer, head, SGD)
    with pytest.raises(ValueError, match=r"`clip_by` \(='row'\) must be"):
        make(clip_norm=1.0, clip_by="row")
    with pytest.raises(ValueError, match=r"`clip_by` \(='layer'\) needs `clip_norm`"):
        make(clip_by="layer")
    with pytest.raises(ValueError, match=r'`clip_norm` .* Or use clip_by="previous" or "layer"'):
        make(clip_norm=1.0)
    with pytest.raises(ValueError, match='`clip_by` .* must be "global" or "layer"'):
        stream_update(SGD).update(None, None, None, 1.0, "previous")
    state = make().init(to_host(params()), others())
    with pytest.raises(ValueError, match="`state.grad_norm` must have the structure of"):
        make(clip_norm=1.0, clip_by="previous").step(state, TOKENS)
