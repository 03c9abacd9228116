"""Training steps of a list of different layers, compared with optax in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import OffloadState, offload_jit, offload_train_step, to_host
from effjax.memory import plan
from effjax.ops._common.platform import trace_for_platform
from tests.contexts import mesh_of
from tests.ops.offload.stacks import (
    KEY,
    WIDTH,
    assert_close,
    key_of,
    kinds,
    on,
)
from tests.ops.offload.steps import ADAMW, TOKENS, embed, head, others, parts_of
from tests.programs import needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import exhaustive, plainly


def wide(w, x, key):
    h = jnp.tanh(x @ w["a"] + w["c"])
    return h if key is None else jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)


def squashed(_, x, key):
    return jnp.sin(x)


def shifted(w, x, key):
    return x + w


def quantized(w, x, key):
    kernel = w["kernel"].astype(x.dtype) * w["scale"] + w["low"][0] @ w["low"][1]
    return jnp.tanh(x @ kernel)


# One layer has no parameters; the parameters of another are a single array.
LAYERS = [wide, squashed, shifted, quantized]


def params():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    return [
        {"a": 0.3 * jax.random.normal(a, (WIDTH, 12)), "c": jnp.zeros(12)},
        {},
        0.1 * jax.random.normal(b, (12,)),
        {
            "kernel": jax.random.randint(c, (12, WIDTH), -127, 127, jnp.int8),
            "scale": jnp.float32(0.004),
            "low": [0.3 * jax.random.normal(d, (12, 2)), 0.3 * jax.random.normal(d, (2, WIDTH))],
        },
    ]


def is_trained(path, leaf):
    return path[-1].key not in ("kernel", "scale") if hasattr(path[-1], "key") else True


def split(w):
    """Return the trained parameters and a function that restores the whole list."""
    frozen = {name: w[3][name] for name in ("kernel", "scale")}
    trained = [*w[:3], {"low": w[3]["low"]}]
    return trained, lambda t: [*t[:3], frozen | t[3]]


def loss_in_memory(model, batch, key, m):
    losses = []
    for j, part in enumerate(parts_of(batch, m)):
        x = embed(model["others"], part, key_of(key, len(LAYERS), j))
        for i, (layer, w) in enumerate(zip(LAYERS, model["layers"], strict=True)):
            x = layer(w, x, key_of(key, i, j))
        losses.append(head(model["others"], x, part, key_of(key, len(LAYERS) + 1, j)))
    return sum(losses) / m


@functools.cache
def trained_in_memory(tx=ADAMW, m=1, key=KEY, steps=2, clip=None):
    """Return (losses, layers, others); optax updates one layer at a time."""
    trained, whole = split(params())
    model = {"layers": trained, "others": others()}

    @jax.jit
    def step(model, states, key):
        def run(model):
            return loss_in_memory(model | {"layers": whole(model["layers"])}, TOKENS, key, m)

        loss, grads = jax.value_and_grad(run)(model)
        if clip is not None:
            grads, _ = optax.clip_by_global_norm(clip).update(grads, None)
        parts = zip([*grads["layers"], grads["others"]], states, as_list(model), strict=True)
        new = [tx.update(*part) for part in parts]
        after = [optax.apply_updates(w, u) for w, (u, _) in zip(as_list(model), new, strict=True)]
        return {"layers": after[:-1], "others": after[-1]}, [s for _, s in new], loss

    def as_list(model):
        return [*model["layers"], model["others"]]

    states, losses = [tx.init(w) for w in as_list(model)], []
    for i in range(steps):
        at = None if key is None else jax.random.fold_in(key, i)
        model, states, loss = step(model, states, at)
        losses.append(loss)
    return losses, whole(model["layers"]), model["others"]


def close(got, want, tolerance=5e-6):
    assert_close(got, want, rtol=tolerance, atol=tolerance)


def make(tx=ADAMW, layers=LAYERS, embed=embed, head=head, **options):
    return offload_train_step(embed, layers, head, tx, trainable=is_trained, **options)


def train(init, step, layers, key=KEY, steps=2):
    run, losses, state = offload_jit(step), [], init(layers, others())
    for i in range(steps):
        at = () if key is None else (jax.random.fold_in(key, i),)
        state, loss, *_ = run(state, TOKENS, *at)
        losses.append(loss)
    return losses, state


OPTIONS = {
    "fused": {},
    "slices": {"num_slices": 2, "num_microbatches": 2},
    "clipped": {"fuse_update": False, "clip_norm": 0.1, "num_microbatches": 2, "num_slices": 3},
    "scaled": {"fuse_update": False, "loss_scale": 64.0},
    "dots": {"policy": jax.checkpoint_policies.dots_saveable, "num_microbatches": 2},
    "on_device": {"params_in": "device"},
}


@pytest.mark.parametrize("platform", ["cpu", exhaustive("tpu")])
@pytest.mark.parametrize("name", plainly("fused", of=OPTIONS))
def test_matches_optax_on_each_layer(name, platform):
    options = OPTIONS[name]
    here = options.get("params_in") == "device"
    w = params() if here else to_host(params())
    with trace_for_platform(platform):
        losses, state = train(*make(**options), w)
    m, clip = options.get("num_microbatches", 1), options.get("clip_norm")
    close((losses, state.layers, state.others), trained_in_memory(m=m, clip=clip))
    np.testing.assert_array_equal(state.layers[3]["kernel"], params()[3]["kernel"])
    assert kinds(state.layers) == {"device" if here else "pinned_host"}
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim]
    assert kinds(moments) == kinds(state.layers)
    trained, _ = split(params())
    assert len(moments) == 2 * len([a for a in jax.tree.leaves(trained) if a.ndim])


def test_frozen_layers_have_no_optimizer_state():
    w = params()
    frozen = [True, True, False, False]
    init, step = offload_train_step(embed, LAYERS, head, ADAMW, trainable=frozen)
    _, state = train(init, step, to_host(w))
    for i in (2, 3):
        jax.tree.map(np.testing.assert_array_equal, state.layers[i], w[i])
        assert all(a.ndim == 0 for a in jax.tree.leaves(state.layers_state[i]))
    assert (np.asarray(state.layers[0]["a"]) != np.asarray(w[0]["a"])).any()


def test_tuple_of_layers_and_aux_of_each_layer():
    def with_aux(layer):
        def run(w, x, key):
            y = layer(w, x, key)
            return y, {"largest": y.max(), "n": jnp.int32(y.shape[1])}

        return run

    layers = tuple(map(with_aux, LAYERS))
    init, step = make(layers=layers, has_aux=True, num_microbatches=2, num_slices=2)
    state, loss, aux = offload_jit(step)(init(to_host(tuple(params())), others()), TOKENS)
    assert isinstance(state.layers, tuple) and loss.shape == ()
    assert [a["n"].tolist() for a in aux] == [[n, n] for n in (12, 12, 12, WIDTH)]
    assert [a["largest"].shape for a in aux] == [(2,)] * len(LAYERS)


@pytest.mark.exhaustive
def test_closed_over_array_is_constant():
    scale = jnp.float32(0.5)

    def closing(scale):
        return [lambda w, x, key: scale * wide(w, x, key), *LAYERS[1:]]

    def run(scale):
        init, step = make(layers=closing(scale))
        state, loss = step(init(to_host(params()), others()), TOKENS)
        return loss, state.layers

    close(jax.jit(run)(scale), run(0.5))


def test_overflow_skips_the_step():
    def end(*args):
        return 1e4 * head(*args)

    init, step = make(head=end, fuse_update=False, loss_scale=2.0**127)
    state = init(to_host(params()), others())
    before = jax.tree.map(np.asarray, (state.layers, state.layers_state, state.others))
    state, _ = offload_jit(step)(state, TOKENS)
    after = state.layers, state.layers_state, state.others
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert state.loss_scale.scale == 2.0**126


@pytest.mark.exhaustive
def test_compute_dtype():
    dtype = jnp.bfloat16

    def whole(others, batch, key):
        return embed(others, batch, key).astype(dtype)

    def end(others, x, batch, key):
        return head(others, x.astype(jnp.float32), batch, key)

    losses, state = train(*make(embed=whole, head=end, compute_dtype=dtype), to_host(params()))
    want = trained_in_memory()
    close(losses, want[0], 5e-2)
    assert all(a.dtype in (jnp.float32, jnp.int8) for a in jax.tree.leaves(state.layers))


@pytest.mark.parametrize(
    ("fuse_update", "platform"),
    [(True, "cpu"), *map(exhaustive, [False, True, False], ["cpu", "tpu", "tpu"])],
)
def test_shard_map_with_sharded_and_replicated_layers(fuse_update, platform):
    mesh, tx = mesh_of((8,), ("i",)), optax.sgd(0.5)
    w = [jnp.ones(WIDTH), jnp.arange(8.0 * WIDTH).reshape(8, WIDTH)]
    x = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)

    def own(w, x, key):
        return x * w[0]

    init, step = offload_train_step(
        lambda others, batch, key: batch + others, [shifted, own],
        lambda others, x, batch, key: lax.pmean(jnp.mean(jnp.sin(x)), "i"), tx,
        fuse_update=fuse_update,
    )  # fmt: skip
    specs = [P(), P("i")]
    state = init([
        jax.device_put(a, on(mesh, spec, host=True))
        for a, spec in zip(w, specs, strict=True)
    ], jax.device_put(jnp.zeros(WIDTH), on(mesh, P())))  # fmt: skip
    of_state = jax.tree.map(lambda _: P(), state)._replace(layers=specs)
    run = jax.shard_map(step, mesh=mesh, in_specs=(of_state, P("i")), out_specs=(of_state, P()))
    with trace_for_platform(platform):
        state, _ = offload_jit(run)(state, jax.device_put(x, on(mesh, P("i"))))

    def loss(w):
        return jnp.mean(jnp.sin((x + w[0]) * jnp.repeat(w[1], 2, 0)))

    want = jax.tree.map(lambda a, d: a - 0.5 * d, w, jax.grad(loss)(w))
    close(jax.tree.map(np.asarray, state.layers), want)


def test_rejects_shared_array():
    init, _ = offload_train_step(embed, [shifted, shifted], head, ADAMW)
    a = to_host(jnp.zeros(WIDTH))
    with pytest.raises(ValueError, match=r"`layers\[0\]` and `layers\[1\]` are the same array"):
        init([a, a], others())


def test_empty_batch():
    def end(others, x, batch, key):
        return jnp.sum(x)

    init, step = make(optax.sgd(0.1), head=end)
    state, loss = offload_jit(step)(init(to_host(params()), others()), TOKENS[:0])
    assert loss == 0
    jax.tree.map(np.testing.assert_array_equal, state.layers, params())


def test_rejects_invalid_arguments():
    init, step = make()
    state = init(to_host(params()), others())
    with pytest.raises(ValueError, match=r"`layers` \(of length 4\) and `params` \(of length 3\)"):
        step(init(to_host(params()[:3]), others()), TOKENS)
    with pytest.raises(TypeError, match="`trained layers` must be a list or a tuple, .* a dict"):
        init({"a": to_host(params()[0]["a"])}, others())
    with pytest.raises(ValueError, match="`state.layers_state` must have the structure of"):
        step(state._replace(layers_state=state.layers_state[1:]), TOKENS)
    with pytest.raises(ValueError, match="`state.layers_state`.* the result of init"):
        moved = [state.layers_state[2], *state.layers_state[1:]]
        step(state._replace(layers_state=moved), TOKENS)
    mixed = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
    with pytest.raises(ValueError, match="pass `clip_norm`"):
        make(mixed).init(to_host(params()), others())


@needs_gpu_compiler
@needs_tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "fuse_update", "layers_on_device"),
    [("h100", True, 3), ("v5e", True, 2), ("v5e", False, 2)],
)
def test_device_memory_does_not_grow_with_depth(target, fuse_update, layers_on_device):
    # Parameters, gradient and two moments of 1024 x 1024 take 16 MiB per layer.
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
    device = NamedSharding(mesh, P())

    def shape(a, host):
        where = device.with_memory_kind("pinned_host") if host else device
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

    def planned(count):
        tx = optax.adam(1e-3)
        layers = [lambda w, x, key: jnp.tanh(x @ w)] * count
        w = [shape(jax.ShapeDtypeStruct((1024, 1024), jnp.float32), True)] * count
        _, step = offload_train_step(
            lambda others, batch, key: batch * others, layers,
            lambda others, x, batch, key: jnp.sum(x), tx, fuse_update=fuse_update,
        )  # fmt: skip
        scale = shape(jax.ShapeDtypeStruct((), jnp.float32), False)
        states = [jax.tree.map(lambda a: shape(a, a.ndim > 0), jax.eval_shape(tx.init, w[0]))]
        others_state = jax.tree.map(lambda a: shape(a, False), jax.eval_shape(tx.init, scale))
        state = OffloadState(w, scale, states * count, others_state)
        batch = shape(jax.ShapeDtypeStruct((32, 1024), jnp.float32), False)
        return plan(offload_jit(step), state, batch, target=target)

    few, many = planned(3), planned(6)
    added = many.device.temporaries - few.device.temporaries  # by three layers
    assert added <= 0.05 * 3 * 16 * 2**20
    assert many.device.temporaries <= layers_on_device * 16 * 2**20
    if target == "h100":
        # The residuals of each layer, and a copy of the parameters of the last.
        assert many.host.temporaries <= 1.01 * (6 * 32 * 4096 + 4 * 1024 * 1024 + 2**14)
