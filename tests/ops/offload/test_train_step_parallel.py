"""Training steps of a stack and of a list of layers over eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, offload_train_step
from effjax.memory import collectives
from tests.contexts import mesh_of
from tests.ops.offload.stacks import LAYERS, WIDTH, assert_close, kinds, layer, on, params
from tests.ops.offload.steps import layers_of, others, stack, train_in_memory
from tests.tiers import exhaustive, product_cases

TOKENS = jnp.arange(32) * 7 % 11
STATE = {"sum": jnp.zeros(WIDTH), "batches": jnp.int32(0)}
ADAM = optax.adam(1e-2)


def embed(others, batch, key):
    return jax.nn.one_hot(batch, 11) @ others["e"]


def head(others, x, batch, key):
    return optax.softmax_cross_entropy(x @ others["u"], jax.nn.one_hot(batch, 11)).mean()


def ends(mean=lambda x: x):
    """Return embed and head with a state; `mean` averages over the devices."""

    def run_embed(others, state, batch, key):
        x = embed(others, batch, key)
        return x, {**state, "sum": state["sum"] + mean(x.mean(0))}

    def run_head(others, state, x, batch, key):
        loss = mean(head(others, x, batch, key))
        return loss, {**state, "batches": state["batches"] + 1}, {"rows": x.sum(1), "loss": loss}

    return run_embed, run_head


@functools.cache
def want():
    """Return (losses, layers, others, model_state, aux) of two steps."""
    return train_in_memory(ADAM, STATE, TOKENS, None, steps=2, ends=ends())


def make(form, mean=lambda x: x, tx=ADAM, **options):
    """Make a step of a stack, or of the same layers as a list."""
    run_embed, run_head = ends(mean)
    layers = layer if form == "stack" else [layer] * LAYERS
    return offload_train_step(
        run_embed, layers, run_head, tx, has_state=True, head_has_aux=True, **options
    )


def train(form, init, step, mesh, host=True, spec=P()):  # noqa: B008
    w = params() if form == "stack" else layers_of(params())
    state = init(
        jax.device_put(w, on(mesh, spec, host)),
        jax.device_put(others(), on(mesh, P())),
        jax.device_put(STATE, on(mesh, P())),
    )
    batch = jax.device_put(TOKENS, on(mesh, P("i")))
    run, losses = offload_jit(step), []
    for _ in range(2):
        state, loss, aux = run(state, batch)
        losses.append(loss)
    assert kinds(state.layers) == {"pinned_host" if host else "device"}
    return losses, state, aux


def close(results, m=1):
    losses, state, aux = results
    if isinstance(state.layers, list):
        state = state._replace(layers=stack(jax.tree.map(np.asarray, state.layers)))
    sums, batches = (state.model_state[name] for name in ("sum", "batches"))
    got = losses, state.layers, state.others, {"sum": sums / m, "batches": batches // m}
    assert_close(got, want()[:4], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(np.mean(aux["loss"]), losses[-1], rtol=1e-5)


SPECS = {
    "in_specs": (P(), P("i")),
    "out_specs": (P(), P(), {"rows": P(None, "i"), "loss": P()}),
}
MAPPED = {
    "microbatches": {"num_microbatches": 2},
    "clipped": {"num_microbatches": 2, "fuse_update": False, "clip_norm": 1e3},
    "on_device": {"num_microbatches": 2, "params_in": "device"},
}


@pytest.mark.parametrize(
    ("form", "name"),
    product_cases(
        ["stack", "list"], MAPPED, plain=[("stack", "clipped"), ("list", "microbatches")]
    ),
)
def test_shard_map(form, name):
    options, mesh = MAPPED[name], mesh_of((8,), ("i",))
    init, step = make(form, lambda x: lax.pmean(x, "i"), **options)
    run = jax.shard_map(step, mesh=mesh, **SPECS)
    results = train(form, init, run, mesh, options.get("params_in") != "device")
    close(results, 2)
    assert results[2]["rows"].shape == (2, TOKENS.size // 2)


@pytest.mark.parametrize(("fuse_update", "prefetch"), [(False, 1), exhaustive(True, 0)])
def test_shard_map_with_sharded_and_replicated_parameters(fuse_update, prefetch):
    mesh, tx = mesh_of((8,), ("i",)), optax.sgd(lambda count: 0.5)
    w = {"a": jnp.ones((2, WIDTH)), "b": jnp.arange(16.0 * WIDTH).reshape(2, 8, WIDTH)}
    x = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)
    init, step = offload_train_step(
        lambda others, batch, key: batch + others,
        lambda w, x, key: x * w["b"][0] + w["a"],
        lambda others, x, batch, key: lax.pmean(jnp.mean(jnp.sin(x)), "i"),
        tx, fuse_update=fuse_update, prefetch=prefetch, num_microbatches=2,
    )  # fmt: skip
    specs = {"a": P(), "b": P(None, "i")}
    place = lambda a, spec: jax.device_put(a, on(mesh, spec, host=True))  # noqa: E731
    state = init(jax.tree.map(place, w, specs), jax.device_put(jnp.zeros(WIDTH), on(mesh, P())))
    specs = jax.tree.map(lambda _: P(), state)._replace(layers=specs)
    run = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("i")), out_specs=(specs, P()))
    state, _ = offload_jit(run)(state, jax.device_put(x, on(mesh, P("i"))))

    def loss(w):
        y = x
        for i in range(2):
            y = y * jnp.repeat(w["b"][i], 2, 0) + w["a"][i]
        return jnp.mean(jnp.sin(y))

    want = jax.tree.map(lambda a, d: a - 0.5 * d, w, jax.grad(loss)(w))
    assert_close(jax.tree.map(np.asarray, state.layers), want, rtol=1e-4, atol=2e-5)


def test_gradients_of_other_parameters_are_reduced_once():
    """Not once per microbatch, and no rows are exchanged."""
    mesh = mesh_of((8,), ("i",))
    init, step = make("stack", lambda x: lax.pmean(x, "i"), num_microbatches=2)
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    run = jax.shard_map(lambda *a: step(*a)[0], mesh=mesh, **specs)
    arguments = (params(), True), (others(), False), (STATE, False)
    state = init(*(jax.device_put(tree, on(mesh, P(), host)) for tree, host in arguments))
    batch = jax.device_put(TOKENS, on(mesh, P("i")))
    program = jax.jit(run).lower(state, batch).compile()
    operations = collectives(program.as_text())
    assert {c.kind for c in operations} == {"all-reduce"}
    of_others = sum(a.nbytes for a in jax.tree.leaves(others()))
    of_layers = sum(a.nbytes for a in jax.tree.leaves(params()))
    of_states = 2 * 4 * WIDTH + 2 * 4  # the means and the losses of two microbatches
    assert sum(c.bytes * c.count for c in operations) <= 2 * of_others + of_layers + of_states


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["stack", "list"])
def test_shard_map_without_check_vma(form):
    """Each device has the gradient of its own loss; the optimizer averages them first."""
    mesh, mean = mesh_of((8,), ("i",)), lambda x: lax.pmean(x, "i")
    average = optax.stateless(lambda grads, params: mean(grads))
    _, step = make(form, mean, optax.chain(average, ADAM), num_microbatches=2)
    init, _ = make(form, tx=optax.chain(optax.identity(), ADAM))  # outside there is no axis
    run = jax.shard_map(step, mesh=mesh, check_vma=False, **SPECS)
    close(train(form, init, run, mesh), 2)


@pytest.mark.parametrize(
    ("form", "kind", "spec", "options"),
    [
        ("stack", AxisType.Auto, P(None, "i"), {}),
        exhaustive("stack", AxisType.Explicit, P(), {}),
        exhaustive("stack", AxisType.Auto, P(None, "i"), {"fuse_update": False, "clip_norm": 1e3}),
        exhaustive("list", AxisType.Auto, P(), {}),
        exhaustive("list", AxisType.Explicit, P(), {"params_in": "device"}),
        ("stack", AxisType.Explicit, P(), {"num_microbatches": 2}),
        ("list", AxisType.Explicit, P(), {"num_microbatches": 2, "params_in": "device"}),
        exhaustive(
            "stack",
            AxisType.Explicit,
            P(),
            {"num_microbatches": 2, "fuse_update": False, "clip_norm": 1e3},
        ),
    ],
    ids=str,
)
def test_jit_over_mesh(form, kind, spec, options):
    """Moments have the sharding of their parameters."""
    mesh = mesh_of((8,), ("i",), kind)
    with jax.set_mesh(mesh):
        results = train(form, *make(form, **options), mesh, "params_in" not in options, spec)
        close(results, options.get("num_microbatches", 1))
    where = on(mesh, spec, "params_in" not in options)
    moments = [a for a in jax.tree.leaves(results[1].layers_state) if a.ndim > 1]
    assert all(a.sharding.is_equivalent_to(where, a.ndim) for a in moments)


@pytest.mark.exhaustive
def test_replicated_layer_inputs():
    """The gradient of learned queries is summed over the devices."""
    mesh = mesh_of((8,), ("i",))

    def trained(mean, wrap):
        init, step = offload_train_step(
            lambda others, batch, key: jnp.broadcast_to(others["e"][0], (len(batch), WIDTH)),
            layer,
            lambda others, x, batch, key: mean(head(others, x, batch, key)),
            ADAM,
            params_in="device",
        )
        state = init(*(jax.device_put(tree, on(mesh, P())) for tree in (params(), others())))
        return jax.jit(wrap(step))(state, jax.device_put(TOKENS, on(mesh, P("i"))))

    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    wrap = functools.partial(jax.shard_map, mesh=mesh, **specs)
    got, expected = trained(lambda x: lax.pmean(x, "i"), wrap), trained(lambda x: x, lambda f: f)
    assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mapped", [False, True])
def test_frozen_parameters_and_loss_scale(mapped):
    mesh = mesh_of((8,), ("i",))

    def trained(mean, wrap, place, **options):
        init, step = offload_train_step(
            embed,
            layer,
            lambda others, x, batch, key: mean(head(others, x, batch, key)),
            ADAM,
            trainable=lambda path, leaf: path[0].key != "b",
            trainable_others={"e": False, "u": True},
            **options,
        )
        state = init(place(params(), True), place(others(), False))
        state, loss = offload_jit(wrap(step))(state, TOKENS)
        return state.layers, state.others, loss

    expected = trained(lambda x: x, lambda step: step, lambda tree, host: tree, params_in="device")
    np.testing.assert_array_equal(expected[0]["b"], params()["b"])
    wrap = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P()))
    got = trained(
        (lambda x: lax.pmean(x, "i")) if mapped else (lambda x: x),
        wrap if mapped else (lambda step: step),
        lambda tree, host: jax.device_put(tree, on(mesh, P(), host)),
        fuse_update=False,
        loss_scale=8.0,
    )
    assert_close(got, expected, rtol=1e-4, atol=2e-5)
