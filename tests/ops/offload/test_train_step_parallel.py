"""Training steps over eight devices, compared with training in memory."""

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
from effjax.ops._common.platform import trace_for_platform
from effjax.ops.offload import row_update
from effjax.ops.offload.train_step import StepResult
from tests.contexts import mesh_of
from tests.ops.offload import reference
from tests.ops.offload.reference import stack
from tests.ops.offload.stacks import WIDTH, assert_close, kinds, layer, on, params
from tests.ops.offload.steps import (
    ADAMW,
    APART,
    FROZEN,
    MICROBATCHES,
    SECOND_IS_NAN,
    embed,
    make_batches,
    make_functions,
    make_options,
    make_params,
    model_state,
    others,
    row_losses,
    train_in_memory,
)
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")
TOKENS = jnp.arange(32) * 7 % 11


def expected(form, splits_rows, factors, **options):
    """Train in memory; with `splits_rows` a microbatch has some rows of each device."""

    def reorder(a):
        rows = a.reshape(8, options.get("num_microbatches", 1), -1)
        return rows.swapaxes(0, 1).reshape(-1) if splits_rows else a

    batches = jax.tree.map(reorder, make_batches(TOKENS, factors))
    return train_in_memory(form, batches, compiled=True, **options)


def make_results_specs(form, has_aux=False, head_has_aux=False, **options):
    """Return the PartitionSpecs of the results of a step."""
    aux = P(None, None, "i") if form == "stack" else P(None, "i")
    head_aux = {"rows": P(None, "i")} if head_has_aux else None
    return StepResult(P(), P(), aux if has_aux else None, head_aux, P(), P())


def train(form, context, spec, factors, **options):
    """Return the losses, and the result of the last step."""
    options = make_options(form, **options)
    is_mapped = context not in ("auto", "explicit")
    run_embed, layers, run_head = make_functions(form, "i" if is_mapped else None, **options)
    tx = init_tx = ADAMW
    if context in ("shard_map without types", "pmap"):
        # Each device has the gradient of its own loss. There is no axis when the state is made.
        average = optax.stateless(lambda grads, params: lax.pmean(grads, "i"))
        tx, init_tx = optax.chain(average, ADAMW), optax.chain(optax.identity(), ADAMW)
    init, _ = offload_train_step(run_embed, layers, run_head, init_tx, **options)
    _, step = offload_train_step(run_embed, layers, run_head, tx, **options)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit if context == "explicit" else AxisType.Auto)
    place = lambda tree, spec, where: jax.device_put(tree, on(mesh, spec, where == "host"))  # noqa: E731
    data = make_batches(TOKENS, factors)
    if context == "pmap":
        place = lambda tree, spec, where: tree  # noqa: E731
        data = jax.tree.map(lambda a: a.reshape(8, -1), data)
        run = jax.pmap(step, "i", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:8])
    elif is_mapped:
        specs = {"in_specs": (P(), P("i")), "out_specs": make_results_specs(form, **options)}
        run = offload_jit(jax.shard_map(step, mesh=mesh, check_vma=context == "shard_map", **specs))
    else:
        run = offload_jit(step)
    losses = []
    with jax.set_mesh(mesh):
        state = init(
            place(make_params(form), spec, options.get("params_in", "host")),
            jax.tree.map(
                lambda a, spec: place(a, spec, options.get("others_in", "device")),
                others(),
                OTHERS_SPECS if context == "auto" else {"e": P(), "u": P()},
            ),
            place(model_state(), P(), "device") if options.get("has_state") else (),
        )
        for batch in data:
            result = run(state, place(batch, P("i"), "device"))
            state = result.state
            losses.append(result.loss)
    return losses, result


OTHERS_SPECS = {"e": P(None, "i"), "u": P("i")}
AUX = {"has_state": True, "head_has_aux": True, "has_aux": True}
ON_DEVICE = {"params_in": "device"}
PREVIOUS = {"clip_norm": 0.1, "clip_by": "previous"}
WEIGHTED = {**MICROBATCHES, "weighted_loss": True}
SKIPPED = {**MICROBATCHES, **APART, "clip_norm": 0.1, "loss_scale": 8.0, "factors": SECOND_IS_NAN}
SHARDED = {"spec": P(None, "i")}


def check(form, context, options):
    options = {"spec": P(), "factors": (1.0, 1.0), **options}
    losses, (state, _, aux, head_aux, grad_norm, finite) = train(form, context, **options)
    where, spec = options.get("params_in", "host"), options.pop("spec")
    splits_rows = context != "auto" and options.get("num_microbatches", 1) > 1
    want = expected(form, splits_rows, **options)
    layers = jax.tree.map(np.asarray, state.layers)
    assert_close((losses, layers, state.others, state.model_state), want[:4], 1e-9)
    got = aux, head_aux, state.grad_norm
    assert_close(got, (want.aux, want.head_aux, want.last_norm), 1e-9)
    if context not in ("shard_map without types", "pmap"):  # there it is that of one device
        assert_close(grad_norm, want.grad_norm, 1e-9)
    assert finite == np.isfinite(grad_norm).all()
    if "loss_scale" in options:
        assert state.loss_scale.scale == want.loss_scales[-1]
    if context == "pmap":
        return
    memory = "pinned_host" if where == "host" else "device"
    moments = [a for a in jax.tree.leaves(state.layers_state) if a.ndim > (form == "stack")]
    assert kinds(state.layers) == kinds(moments) == {memory}
    for a in moments:
        assert a.sharding.is_equivalent_to(on(a.sharding.mesh, spec, where == "host"), a.ndim)
    if context == "auto":
        for name, a in state.others.items():
            in_host = options.get("others_in") == "host"
            assert a.sharding.is_equivalent_to(on(a.sharding.mesh, OTHERS_SPECS[name], in_host), 2)
    for a in jax.tree.leaves(state.layers):
        if a.sharding.is_fully_replicated:
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(shard.data, a.addressable_shards[0].data)


# Fused updates in functions that each device runs on its own rows.
MAPPED = {
    "all results": ("stack", "shard_map", {**WEIGHTED, **AUX, **PREVIOUS}),
    "list": ("list", "shard_map", {**MICROBATCHES, **AUX}),
    "without types": ("stack", "shard_map without types", {**WEIGHTED, "has_state": True}),
    "list without types": ("list", "shard_map without types", MICROBATCHES),
    "pmap": ("stack", "pmap", {**ON_DEVICE, "weighted_loss": True}),
}
AUTO = {
    "clipped by previous": ("stack", {**SHARDED, **PREVIOUS, "others_in": "host"}),
    "clipped by layer": (
        "stack",
        {**SHARDED, **MICROBATCHES, **APART, "clip_norm": 0.1, "clip_by": "layer"},
    ),
    "scaled": ("list", {**APART, "loss_scale": 8.0}),
}
EXPLICIT = {
    "weighted": {**WEIGHTED, "has_state": True, "head_has_aux": True},
    "frozen": {**MICROBATCHES, **APART, **FROZEN, **ON_DEVICE, "clip_norm": 0.1},
}


@vary("name", MAPPED)
def test_fused_step_in_shard_map(name):
    check(*MAPPED[name])


@pytest.mark.exhaustive
@vary(("form", "options"), [("list", {}), ("stack", {**FROZEN, "others_in": "host"})])
def test_skipped_step_in_shard_map(form, options):
    check(form, "shard_map", {**SKIPPED, **options})


@vary("name", AUTO)
def test_step_with_auto_axes(name, monkeypatch):
    """Other parameters in host memory are updated in chunks of their shards."""
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 600)
    form, options = AUTO[name]
    check(form, "auto", options)


@vary("form", ["stack", "list"])
@vary("name", EXPLICIT)
def test_step_with_explicit_axes(form, name):
    check(form, "explicit", EXPLICIT[name])


# Two layers with a matrix of which each device has one row, and a replicated vector.


def make_ends_of_sines(mean):
    """Return embed and head."""
    return (
        lambda others, batch, key: batch + others["in"],
        lambda others, x, batch, key: mean(jnp.mean(jnp.sin(x))),
    )


SGD = optax.sgd(lambda count: 0.5)


def make_data():
    """Return the parameters of embed, and a batch."""
    return {"in": jnp.zeros(WIDTH)}, jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)


def train_sharded(form, layer, layers, steps, platform="cpu", **options):
    """Return the state before and after training with one batch, and the last loss."""
    mesh, specs = mesh_of((8,), ("i",)), [{"a": P(), "b": P("i")}] * 2
    if form == "stack":
        layers, specs = stack(layers), {"a": P(), "b": P(None, "i")}
    run_embed, run_head = make_ends_of_sines(lambda a: lax.pmean(a, "i"))
    init, step = offload_train_step(
        run_embed, layer if form == "stack" else [layer] * 2, run_head, SGD, num_microbatches=2,
        **options,
    )  # fmt: skip
    place = lambda a, spec: jax.device_put(a, on(mesh, spec, host=True))  # noqa: E731
    others, batch = make_data()
    state = init(jax.tree.map(place, layers, specs), jax.device_put(others, on(mesh, P())))
    before = jax.tree.map(np.asarray, state)
    specs = jax.tree.map(lambda _: P(), state)._replace(layers=specs)
    specs = {"in_specs": (specs, P("i")), "out_specs": (specs, P())}
    run = jax.shard_map(lambda *args: step(*args)[:2], mesh=mesh, **specs)
    run, batch = offload_jit(run), jax.device_put(batch, on(mesh, P("i")))
    with trace_for_platform(platform):
        for _ in range(steps):
            state, loss = run(state, batch)
    return before, state, loss


@vary(
    ("form", "platform", "options"),
    [
        ("stack", "cpu", {"clip_norm": 0.02, **APART}),
        ("stack", "cpu", {"clip_norm": 0.02, "clip_by": "previous"}),
        ("stack", "cpu", {"clip_norm": 0.02, "clip_by": "layer", "prefetch": 0}),
        ("list", "cpu", {"clip_norm": 0.02, "clip_by": "layer", **APART}),
        ("list", "tpu", {}),
    ],
)
def test_shard_map_with_sharded_and_replicated_parameters(form, platform, options):
    """The norm of a sharded parameter is that of all its shards, in every step on every device."""
    first = {"a": jnp.ones(WIDTH), "b": jnp.arange(8.0 * WIDTH).reshape(8, WIDTH) / 16}
    layers = [first, jax.tree.map(jnp.cos, first)]
    _, state, _ = train_sharded(
        form, lambda w, x, key: x * w["b"][0] + w["a"], layers, 2, platform, **options
    )
    run_embed, run_head = make_ends_of_sines(lambda a: a)
    whole = lambda w, x, key: x * jnp.repeat(w["b"], 2, 0) + w["a"]  # noqa: E731
    clipping = {k: v for k, v in options.items() if k.startswith("clip")}
    others, batch = make_data()
    want = reference.train(
        run_embed,
        [whole] * 2,
        run_head,
        SGD,
        layers,
        others,
        [batch] * 2,
        compiled=True,
        **clipping,
    )
    want_layers = stack(want.layers) if form == "stack" else want.layers
    got = jax.tree.map(np.asarray, (state.layers, state.others))
    assert_close(got, (want_layers, want.others), 1e-9)


@vary("form", ["stack", "list"])
def test_gradient_of_one_shard_that_is_not_finite(form):
    """All devices skip the step. The loss and all other gradients are finite."""
    layers = [{"a": jnp.ones(WIDTH), "b": jnp.ones((8, WIDTH))} for _ in range(2)]
    layers[0]["b"] = layers[0]["b"].at[3].set(0)  # where sqrt has no derivative
    before, state, loss = train_sharded(
        form, lambda w, x, key: x + w["a"] * jnp.sqrt(w["b"][0]), layers, 1,
        fuse_update=False, skip_nonfinite=True, loss_scale=8.0,
    )  # fmt: skip
    assert np.isnan(loss)
    assert state.loss_scale.scale == 4
    for a, b in zip(*map(jax.tree.leaves, (state[:3], before[:3])), strict=True):
        for shard in a.addressable_shards:
            np.testing.assert_array_equal(shard.data, b[shard.index])


def test_gradients_of_other_parameters_are_reduced_once():
    """Not once per microbatch, and no rows are exchanged."""
    mesh, options = mesh_of((8,), ("i",)), {"num_microbatches": 2, "has_state": True}
    init, step = offload_train_step(*make_functions("stack", "i", **options), ADAMW, **options)
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    arguments = (params(), True), (others(), False), (model_state(), False)
    state = init(*(jax.device_put(tree, on(mesh, P(), host)) for tree, host in arguments))
    batch = jax.device_put(make_batches(TOKENS, [1.0])[0], on(mesh, P("i")))
    operations = collectives(jax.jit(run).lower(state, batch).compile().as_text())
    assert {c.kind for c in operations} == {"all-reduce"}
    of_params = sum(a.nbytes for a in jax.tree.leaves((params(), others())))
    of_states = 2 * 8 * (WIDTH + 1 + 1)  # the means and the losses of two microbatches
    assert sum(c.bytes * c.count for c in operations) <= of_params + of_states


@pytest.mark.exhaustive
def test_replicated_layer_inputs():
    """The gradient of learned queries is summed over the devices."""
    mesh = mesh_of((8,), ("i",))

    def functions(mean):
        return (
            lambda others, batch, key: jnp.broadcast_to(others["e"][0], (len(batch), WIDTH)),
            layer,
            lambda others, x, batch, key: mean(row_losses(others, x, batch, key).mean()),
        )

    init, step = offload_train_step(
        *functions(lambda a: lax.pmean(a, "i")), ADAMW, params_in="device"
    )
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    state = init(*(jax.device_put(tree, on(mesh, P())) for tree in (params(), others())))
    state, loss, *_ = jax.jit(run)(state, jax.device_put(TOKENS, on(mesh, P("i"))))
    want = reference.train(*functions(lambda a: a), ADAMW, params(), others(), [TOKENS])
    assert_close((loss, state.layers, state.others), (want.losses[0], *want[1:3]), 1e-9)


def test_rejects_weight_of_one_device():
    def run_head(others, x, batch, key):
        losses = row_losses(others, x, batch, key)
        return lax.psum(losses.sum(), "i"), batch.sum()

    mesh = mesh_of((8,), ("i",))
    init, step = offload_train_step(
        embed, layer, run_head, ADAMW, weighted_loss=True, params_in="device"
    )
    state = jax.device_put(init(params(), others()), on(mesh, P()))
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    with pytest.raises(ValueError, match=r"`head` must sum the weight over the devices"):
        jax.eval_shape(run, state, TOKENS)
