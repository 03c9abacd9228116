"""Training steps over eight devices, compared with training in memory."""

import contextlib

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
from tests.ops.offload import reference, steps
from tests.ops.offload.reference import stack
from tests.ops.offload.stacks import WIDTH, assert_close, layer, on, params
from tests.ops.offload.steps import (
    ADAMW,
    APART,
    FROZEN,
    MICROBATCHES,
    OTHERS_ON_HOST,
    SECOND_IS_NAN,
    make_training,
)
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64")
TOKENS = jnp.arange(32) * 7 % 11


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Update other parameters in host memory in chunks of their shards."""
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 600)


OTHERS_SPECS = {"e": P(None, "i"), "u": P("i")}
AUX = {"has_state": True, "head_has_aux": True, "has_aux": True}
ON_DEVICE = {"params_in": "device"}
PREVIOUS = {"clip_norm": 0.1, "clip_by": "previous"}
WEIGHTED = {**MICROBATCHES, "weighted_loss": True}
SKIPPED = {**MICROBATCHES, **APART, "clip_norm": 0.1, "loss_scale": 8.0, "factors": SECOND_IS_NAN}
SHARDED = {"spec": P(None, "i")}


def train(args, context, spec, has_aux=False, head_has_aux=False, **options):
    """Take the steps of `reference.train` over eight devices, which split the rows."""
    *functions, tx, layers, others, batches = args
    mesh = mesh_of((8,), ("i",), AxisType.Explicit if context == "explicit" else AxisType.Auto)
    place = lambda a, spec: jax.device_put(a, on(mesh, spec))  # noqa: E731
    init_tx = tx
    if context in ("shard_map without types", "pmap"):
        # Each device has the gradient of its own loss. There is no axis when the state is made.
        average = optax.stateless(lambda grads, params: lax.pmean(grads, "i"))
        tx, init_tx = optax.chain(average, tx), optax.chain(optax.identity(), tx)
    options |= {"has_aux": has_aux, "head_has_aux": head_has_aux}
    step = offload_train_step(
        *functions, tx, **{n: a for n, a in options.items() if n != "model_state"}
    ).step
    if context == "pmap":
        place = lambda a, spec: a  # noqa: E731
        batches = jax.tree.map(lambda a: a.reshape(8, -1), batches)
        run = jax.pmap(step, "i", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:8])
    elif context in ("auto", "explicit"):
        run = offload_jit(step)
    else:
        aux = P(None, None, "i") if callable(functions[1]) else P(None, "i")
        head_aux = {"rows": P(None, "i")} if head_has_aux else None
        results = StepResult(P(), P(), aux if has_aux else None, head_aux, P(), P())
        specs = {"in_specs": (P(), P("i")), "out_specs": results}
        run = offload_jit(jax.shard_map(step, mesh=mesh, check_vma=context == "shard_map", **specs))
    others = {
        name: place(a, OTHERS_SPECS[name] if context == "auto" else P())
        for name, a in others.items()
    }
    model_state = place(options.pop("model_state", ()), P())
    losses = []
    with contextlib.nullcontext() if context == "pmap" else jax.set_mesh(mesh):
        state, _ = steps.start(
            *functions, init_tx, place(layers, spec), others, model_state=model_state, **options
        )
        for batch in batches:
            result = run(state, place(batch, P("i")))
            state = result.state
            losses.append(result.loss)
    return losses, result


def check(form, context, options):
    """Compare with training in memory, and check the places of the state."""
    options = {"spec": P(), **options}
    spec, num_microbatches = options.pop("spec"), options.get("num_microbatches", 1)
    axis = None if context in ("auto", "explicit") else "i"
    args, kwargs = make_training(form, tokens=TOKENS, axis=axis, **options)
    losses, result = train(args, context, spec, **kwargs)

    def reorder(a):
        """Return the rows in the order of microbatches with some rows of each device."""
        rows = a.reshape(8, num_microbatches, -1)
        return a if context == "auto" else rows.swapaxes(0, 1).reshape(-1)

    args, kwargs = make_training(form, tokens=TOKENS, **options)
    batches = jax.tree.map(reorder, args[-1])
    want = reference.train(*args[:-1], batches, compiled=True, **kwargs)
    # Without types, the norm is that of one device.
    has_types = context not in ("shard_map without types", "pmap")
    steps.assert_trained(losses, result, want, 1e-9, norm=has_types)
    state = result.state
    if context == "pmap":
        return
    steps.assert_places(state, **options)
    for a in jax.tree.leaves(state.layers_state):
        if a.ndim > (form == "stack"):
            place = on(a.sharding.mesh, spec, options.get("params_in") != "device")
            assert a.sharding.is_equivalent_to(place, a.ndim)
    if context == "auto":
        for name, a in state.others.items():
            place = on(a.sharding.mesh, OTHERS_SPECS[name], options.get("others_in") == "host")
            assert a.sharding.is_equivalent_to(place, 2)
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
    "clipped by previous": ("stack", {**SHARDED, **PREVIOUS, **OTHERS_ON_HOST}),
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
@vary(("form", "options"), [("list", {}), ("stack", {**FROZEN, **OTHERS_ON_HOST})])
def test_skipped_step_in_shard_map(form, options):
    check(form, "shard_map", {**SKIPPED, **options})


@vary("name", AUTO)
def test_step_with_auto_axes(name):
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
    mesh = mesh_of((8,), ("i",))
    args, options = make_training(
        "stack", tokens=TOKENS, axis="i", num_microbatches=2, has_state=True
    )
    *functions, tx, layers, others, (batch, _) = args
    trees = jax.device_put((layers, others, options.pop("model_state")), on(mesh, P()))
    state, step = steps.start(*functions, tx, *trees[:2], model_state=trees[2], **options)
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    program = jax.jit(run).lower(state, jax.device_put(batch, on(mesh, P("i")))).compile()
    operations = collectives(program.as_text())
    assert {c.kind for c in operations} == {"all-reduce"}
    of_params = sum(a.nbytes for a in jax.tree.leaves((layers, others)))
    of_states = 2 * 8 * (WIDTH + 1 + 1)  # the means and the losses of two microbatches
    assert sum(c.bytes * c.count for c in operations) <= of_params + of_states


@pytest.mark.exhaustive
def test_replicated_layer_inputs():
    """The gradient of learned queries is summed over the devices."""

    def functions(mean):
        return (
            lambda others, batch, key: jnp.broadcast_to(others["e"][0], (len(batch), WIDTH)),
            layer,
            lambda others, x, batch, key: mean(steps.row_losses(others, x, batch, key).mean()),
        )

    args = ADAMW, params(), steps.others(), [TOKENS]
    got = train((*functions(lambda a: lax.pmean(a, "i")), *args), "shard_map", P())
    want = reference.train(*functions(lambda a: a), *args)
    steps.assert_trained(*got, want, 1e-9)


def test_rejects_weight_of_one_device():
    def run_head(others, x, batch, key):
        losses = steps.row_losses(others, x, batch, key)
        return lax.psum(losses.sum(), "i"), batch.sum()

    args = steps.embed, layer, run_head, ADAMW, params(), steps.others(), [TOKENS]
    with pytest.raises(ValueError, match="`head` must sum the weight"):
        train(args, "shard_map", P(), weighted_loss=True)
