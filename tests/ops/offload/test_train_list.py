"""Training steps of a list of unlike layers, beside the same in memory."""

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
from tests.contexts import mesh_of
from tests.ops.offload.stacks import KEY, WIDTH, key_of, kinds
from tests.ops.offload.steps import ADAMW, TOKENS, embed, head, others, parts_of
from tests.ops.offload.test_noise import own_key
from tests.ops.offload.test_train_step_parallel import on
from tests.programs import needs_gpu_compiler
from tests.tiers import plainly


def wide(w, x, key):
    h = jnp.tanh(x @ w["a"] + w["c"])
    return h if key is None else jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)


def squashed(_, x, key):
    return jnp.sin(x)


def shifted(w, x, key):
    return x + w


def quantised(w, x, key):
    kernel = w["kernel"].astype(x.dtype) * w["scale"] + w["low"][0] @ w["low"][1]
    return jnp.tanh(x @ kernel)


# One without parameters, and one of which they are an array.
LAYERS = [wide, squashed, shifted, quantised, wide]


def params():
    a, b, c, d, e = jax.random.split(jax.random.key(0), 5)
    return [
        {"a": 0.3 * jax.random.normal(a, (WIDTH, 12)), "c": jnp.zeros(12)},
        {},
        0.1 * jax.random.normal(b, (12,)),
        {
            "kernel": jax.random.randint(c, (12, 16), -127, 127, jnp.int8),
            "scale": jnp.float32(0.004),
            "low": [0.3 * jax.random.normal(d, (12, 2)), 0.3 * jax.random.normal(d, (2, 16))],
        },
        {"a": 0.3 * jax.random.normal(e, (16, WIDTH)), "c": jnp.ones(WIDTH)},
    ]


def is_trained(path, leaf):
    return path[-1].key not in ("kernel", "scale") if hasattr(path[-1], "key") else True


def split(w):
    """(what is trained, a function that makes all of it)"""
    frozen = {name: w[3][name] for name in ("kernel", "scale")}
    trained = [*w[:3], {"low": w[3]["low"]}, *w[4:]]
    return trained, lambda t: [*t[:3], frozen | t[3], *t[4:]]


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
    """(losses, layers, others); optax sees the layers one by one."""
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
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


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
    "one_slice": {"num_slices": 1},
    "apart": {"fuse_update": False},
    "clipped": {"fuse_update": False, "clip_norm": 0.1, "num_microbatches": 2, "num_slices": 3},
    "scaled": {"fuse_update": False, "loss_scale": 64.0},
    "everything": {"policy": jax.checkpoint_policies.everything_saveable},
    "dots": {"policy": jax.checkpoint_policies.dots_saveable, "num_microbatches": 2},
    "on_device": {"params_in": "device"},
    "kept_here": {"activations": "device"},
}


@pytest.mark.parametrize("name", plainly("fused", "clipped", of=OPTIONS))
def test_equals_optax_on_every_layer(name):
    options = OPTIONS[name]
    here = options.get("params_in") == "device"
    w = params() if here else to_host(params())
    losses, state = train(*make(**options), w)
    m, clip = options.get("num_microbatches", 1), options.get("clip_norm")
    close((losses, state.layers, state.others), trained_in_memory(m=m, clip=clip))
    np.testing.assert_array_equal(state.layers[3]["kernel"], params()[3]["kernel"])
    assert kinds(state.layers) == {"device" if here else "pinned_host"}
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim]
    assert kinds(moments) == kinds(state.layers)
    trained, _ = split(params())
    assert len(moments) == 2 * len([a for a in jax.tree.leaves(trained) if a.ndim])


def test_layers_that_are_frozen_whole():
    """Also one whose parameters are an array, and tx has no state for them."""
    w = params()
    frozen = [True, True, False, False, True]
    init, step = offload_train_step(embed, LAYERS, head, ADAMW, trainable=frozen)
    _, state = train(init, step, to_host(w))
    for i in (2, 3):
        jax.tree.map(np.testing.assert_array_equal, state.layers[i], w[i])
        assert all(a.ndim == 0 for a in jax.tree.leaves(state.layers_state[i]))
    for i in (0, 4):
        assert (np.asarray(state.layers[i]["a"]) != np.asarray(w[i]["a"])).any()


def test_a_tuple_stays_one_and_second_results_are_of_every_layer():
    def with_aux(layer):
        def run(w, x, key):
            y = layer(w, x, key)
            return y, {"largest": y.max(), "n": jnp.int32(y.shape[1])}

        return run

    layers = tuple(map(with_aux, LAYERS))
    init, step = make(layers=layers, has_aux=True, num_microbatches=2, num_slices=2)
    state, loss, aux = offload_jit(step)(init(to_host(tuple(params())), others()), TOKENS)
    assert isinstance(state.layers, tuple) and loss.shape == ()
    assert [a["n"].tolist() for a in aux] == [[n, n] for n in (12, 12, 12, 16, WIDTH)]
    assert [a["largest"].shape for a in aux] == [(2,)] * len(LAYERS)


@pytest.mark.exhaustive
def test_what_layers_close_over_has_no_gradient_and_no_update():
    scale = jnp.float32(0.5)

    def closing(scale):
        return [lambda w, x, key: scale * wide(w, x, key), *LAYERS[1:]]

    def run(scale):
        init, step = make(layers=closing(scale))
        state, loss = step(init(to_host(params()), others()), TOKENS)
        return loss, state.layers

    close(jax.jit(run)(scale), run(0.5))


def test_noise_of_every_layer_is_its_own():
    """Of layers whose gradients are zeros."""
    noise = lambda key: optax.noisy_sgd(1.0, eta=0.1, key=key)  # noqa: E731
    key, w = jax.random.key(3), [jnp.zeros(WIDTH)] * 2

    def end(others, x, batch, key):
        return 0 * jnp.sum(x)

    init, step = offload_train_step(embed, [shifted, shifted], end, noise(key))
    state, _ = jax.jit(step)(init(to_host([jnp.copy(a) for a in w]), others()), TOKENS)
    for i in range(2):
        tx = noise(own_key(key, i))
        updates, _ = tx.update(w[i], tx.init(w[i]), w[i])
        np.testing.assert_allclose(state.layers[i], updates, rtol=1e-6)


def test_gradients_added_up_over_calls():
    tx = optax.MultiSteps(optax.adam(1e-2), 2)
    step_init, step = make(tx)
    run, state = offload_jit(step), step_init(to_host(params()), others())
    first = jax.tree.map(np.asarray, state.layers)
    state, _ = run(state, TOKENS)
    jax.tree.map(np.testing.assert_array_equal, state.layers, first)
    state, _ = run(state, TOKENS)
    want = trained_in_memory(optax.adam(1e-2), key=None, steps=1)
    close((state.layers, state.others), want[1:])


def test_a_step_that_overflows_changes_nothing():
    def end(*args):
        return 1e4 * head(*args)

    init, step = make(head=end, fuse_update=False, loss_scale=2.0**127)
    state = init(to_host(params()), others())
    before = jax.tree.map(np.asarray, (state.layers, state.layers_state, state.others))
    state, _ = offload_jit(step)(state, TOKENS)
    after = state.layers, state.layers_state, state.others
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert state.loss_scale.scale == 2.0**126


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layers_computed_in_half_precision(dtype):
    def whole(others, batch, key):
        return embed(others, batch, key).astype(dtype)

    def end(others, x, batch, key):
        return head(others, x.astype(jnp.float32), batch, key)

    losses, state = train(*make(embed=whole, head=end, compute_dtype=dtype), to_host(params()))
    want = trained_in_memory()
    close(losses, want[0], 5e-2)
    assert all(a.dtype in (jnp.float32, jnp.int8) for a in jax.tree.leaves(state.layers))


def replicated(mesh, tree, host=False):
    return jax.device_put(tree, on(mesh, P(), host))


def over_devices(mesh, options, wrap, mean, tx=ADAMW, tx_outside=None):
    """(losses, layers, others) of two steps with the tokens over the devices."""

    def run_embed(others, batch, key):
        return jax.nn.one_hot(batch, 11) @ others["e"]

    def run_head(others, x, batch, key):
        of = jax.nn.one_hot(batch, 11)
        return mean(optax.softmax_cross_entropy(x @ others["u"], of).mean())

    init, step = make(tx, embed=run_embed, head=run_head, **options)
    if tx_outside is not None:
        init, _ = make(tx_outside, embed=run_embed, head=run_head, **options)
    host = options.get("params_in") != "device"
    state = init(replicated(mesh, params(), host), replicated(mesh, others()))
    batch = jax.device_put(BATCH, on(mesh, P("i")))
    run, losses = offload_jit(wrap(step)), []
    for _ in range(2):
        state, loss = run(state, batch)
        losses.append(loss)
    assert kinds(state.layers) == {"pinned_host" if host else "device"}
    return jax.tree.map(np.asarray, (losses, state.layers, state.others))


BATCH = jnp.arange(32) * 7 % 11
SPECS = {"in_specs": (P(), P("i")), "out_specs": (P(), P())}


@functools.cache
def on_one_device():
    mesh = mesh_of((1,), ("i",))
    return over_devices(mesh, {"params_in": "device"}, lambda step: step, lambda x: x)


MAPPED = {
    "fused": {},
    "microbatches": {"num_microbatches": 2, "num_slices": 2},
    "clipped": {"num_microbatches": 2, "fuse_update": False, "clip_norm": 1e3},
    "dots": {"policy": jax.checkpoint_policies.dots_saveable},
    "on_device": {"params_in": "device"},
}


@pytest.mark.parametrize("name", plainly("fused", of=MAPPED))
def test_shard_map(name):
    mesh = mesh_of((8,), ("i",))
    wrap = functools.partial(jax.shard_map, mesh=mesh, **SPECS)
    found = over_devices(mesh, MAPPED[name], wrap, lambda x: lax.pmean(x, "i"))
    close(found, on_one_device(), 2e-5)


def test_shard_map_without_types():
    """Gradients are those of each device's own loss; the optimizer averages them first."""
    mesh, mean = mesh_of((8,), ("i",)), lambda x: lax.pmean(x, "i")
    wrap = functools.partial(jax.shard_map, mesh=mesh, check_vma=False, **SPECS)
    average = optax.stateless(lambda grads, params: mean(grads))
    chains = optax.chain(average, ADAMW), optax.chain(optax.identity(), ADAMW)
    close(over_devices(mesh, {}, wrap, mean, *chains), on_one_device(), 2e-5)


@pytest.mark.covering
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("params_in", ["host", "device"])
def test_jit_over_a_mesh(kind, params_in):
    mesh = mesh_of((8,), ("i",), kind)
    with jax.set_mesh(mesh):
        found = over_devices(mesh, {"params_in": params_in}, lambda step: step, lambda x: x)
    close(found, on_one_device(), 2e-5)


@pytest.mark.parametrize("fuse_update", [True, False])
def test_parameters_that_differ_from_device_to_device(fuse_update):
    """Beside one that is the same on all, which stays that."""
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
    ], replicated(mesh, jnp.zeros(WIDTH)))  # fmt: skip
    of_state = jax.tree.map(lambda _: P(), state)._replace(layers=specs)
    run = jax.shard_map(step, mesh=mesh, in_specs=(of_state, P("i")), out_specs=(of_state, P()))
    state, _ = offload_jit(run)(state, jax.device_put(x, on(mesh, P("i"))))

    def loss(w):
        return jnp.mean(jnp.sin((x + w[0]) * jnp.repeat(w[1], 2, 0)))

    want = jax.tree.map(lambda a, d: a - 0.5 * d, w, jax.grad(loss)(w))
    close(jax.tree.map(np.asarray, state.layers), want)


def test_one_array_in_two_places():
    init, _ = offload_train_step(embed, [shifted, shifted], head, ADAMW)
    a = to_host(jnp.zeros(WIDTH))
    with pytest.raises(ValueError, match=r"`layers\[0\]` and `layers\[1\]` are the same array"):
        init([a, a], others())


def test_an_empty_batch():
    def end(others, x, batch, key):
        return jnp.sum(x)

    init, step = make(optax.sgd(0.1), head=end)
    state, loss = offload_jit(step)(init(to_host(params()), others()), TOKENS[:0])
    assert loss == 0
    jax.tree.map(np.testing.assert_array_equal, state.layers, params())


def test_arguments_that_do_not_fit():
    for name in ("prefetch", "resident_slices"):
        with pytest.raises(ValueError, match=f"`{name}` is an option of a stack, not of a list"):
            make(**{name: 1})
    init, step = make()
    state = init(to_host(params()), others())
    with pytest.raises(ValueError, match="`layers` must have the parameters of the 5 layers"):
        init(to_host(params()[:4]), others())
    with pytest.raises(TypeError, match="`layers` must be a list or a tuple, .* not a dict"):
        init({"a": to_host(params()[0]["a"])}, others())
    with pytest.raises(ValueError, match="`state.layers_state` must have the states of 5 layers"):
        step(state._replace(layers_state=state.layers_state[1:]), TOKENS)
    with pytest.raises(ValueError, match=r"`state.layers_state\[0\]`.* the result of init"):
        moved = [state.layers_state[4], *state.layers_state[1:]]
        step(state._replace(layers_state=moved), TOKENS)
    with pytest.raises(ValueError, match="`num_slices` .* from 1 to the number of layers"):
        make(num_slices=6)[1](state, TOKENS)
    with pytest.raises(TypeError, match="`layers`.* must be floating-point to be differentiated"):
        offload_train_step(embed, LAYERS, head, ADAMW).init(to_host(params()), others())
    mixed = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
    with pytest.raises(ValueError, match="pass `clip_norm`"):
        make(mixed).init(to_host(params()), others())


@needs_gpu_compiler
def test_device_memory_is_that_of_a_few_layers():
    """Of 1024 x 1024 with Adam: parameters, gradient and two moments are 16 MiB a layer."""
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
            lambda others, x, batch, key: jnp.sum(x), tx,
        )  # fmt: skip
        scale = shape(jax.ShapeDtypeStruct((), jnp.float32), False)
        states = [jax.tree.map(lambda a: shape(a, a.ndim > 0), jax.eval_shape(tx.init, w[0]))]
        others_state = jax.tree.map(lambda a: shape(a, False), jax.eval_shape(tx.init, scale))
        state = OffloadState(w, scale, states * count, others_state)
        batch = shape(jax.ShapeDtypeStruct((32, 1024), jnp.float32), False)
        return plan(offload_jit(step), state, batch)

    few, many = planned(4), planned(8)
    assert many.peak_device_bytes <= 1.01 * few.peak_device_bytes
    assert many.peak_device_bytes <= 3 * 16 * 2**20
    # What is kept of every layer, and a copy of the parameters of the last.
    assert many.host.temporaries <= 1.01 * (8 * 32 * 4096 + 4 * 1024 * 1024 + 2**14)
