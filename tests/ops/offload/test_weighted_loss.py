"""Losses that are sums with weights, compared with the ratio of the sums of a whole batch."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, offload_train_step, to_device, to_host
from tests.contexts import mesh_of
from tests.ops.offload.clips import CLIPS
from tests.ops.offload.stacks import LAYERS, assert_equal_bits, layer, on, params
from tests.ops.offload.steps import close, layers_of, others, stack
from tests.tiers import exhaustive, product_cases

BATCH, LENGTH = 16, 4
SGD = optax.sgd(0.5, momentum=0.9)
NORM = 0.1
LENGTHS = [4, 1, 3, 2, 4, 4, 4, 4, 0, 0, 0, 0, 1, 0, 0, 2]  # a quarter of the rows has no tokens


def batch_of(lengths=LENGTHS):
    tokens = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, 11)
    return {"tokens": tokens, "mask": jnp.arange(LENGTH) < jnp.array(lengths)[:, None]}


def embed(others, batch, key):
    return jax.nn.one_hot(batch["tokens"], 11) @ others["e"]


def token_losses(others, x, batch):
    labels = jax.nn.one_hot((batch["tokens"] + 1) % 11, 11)
    return optax.softmax_cross_entropy(x @ others["u"], labels) * batch["mask"]


def head(others, x, batch, key):
    return token_losses(others, x, batch).sum(), batch["mask"].sum()


def embed_with_state(others, state, batch, key):
    return embed(others, batch, key), state


def head_with_state(others, state, x, batch, key):
    loss, weight = head(others, x, batch, key)
    state = {"tokens": state["tokens"] + weight, "top": jnp.maximum(state["top"], x.max())}
    return (loss, weight), state, {"rows": len(x), "weight": weight}


STATE = {"tokens": jnp.int32(0), "top": jnp.float32(-jnp.inf)}


def loss_of(model, batch):
    """Return the mean over all tokens of the batch."""
    x = embed(model["others"], batch, None)
    for w in model["layers"]:
        x = layer(w, x, None)
    return token_losses(model["others"], x, batch).sum() / batch["mask"].sum()


@functools.cache
def in_memory(clip_by=None, steps=2):
    """Return (losses, layers, others) in float64."""
    # Random numbers would be others in float64.
    model, batch = {"layers": layers_of(params()), "others": others()}, batch_of()
    with jax.enable_x64(True):
        model = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), model)
        tx = SGD if clip_by is None else optax.chain(CLIPS[clip_by](NORM), SGD)
        grad = jax.jit(jax.value_and_grad(loss_of))
        state, losses = tx.init(model), []
        for _ in range(steps):
            loss, grads = grad(model, batch)
            updates, state = tx.update(grads, state, model)
            model = optax.apply_updates(model, updates)
            losses.append(loss)
        return losses, stack(model["layers"]), model["others"]


def make(form="stack", **options):
    layers = layer if form == "stack" else [layer] * LAYERS
    ends = embed, layers, head
    if options.get("has_state"):
        ends = embed_with_state, layers, head_with_state
        options["head_has_aux"] = True
    return offload_train_step(*ends, SGD, weighted_loss=True, **options)


def train(init, step, form="stack", steps=2, batch=None, model_state=()):
    w = params() if form == "stack" else layers_of(params())
    state, run, losses, rest = init(to_host(w), others(), model_state), offload_jit(step), [], []
    for _ in range(steps):
        state, loss, *rest = run(state, batch_of() if batch is None else batch)
        losses.append(loss)
    if form == "list":
        state = state._replace(layers=stack(jax.tree.map(np.asarray, state.layers)))
    return losses, state, rest


@pytest.mark.parametrize(
    ("form", "m"),
    product_cases(["stack", "list"], [1, 4], plain=[("stack", 4)]),
)
def test_microbatches_match_whole_batch(form, m):
    """One microbatch has no tokens, and one has all of its tokens."""
    losses, state, _ = train(*make(form, num_microbatches=m), form)
    close((losses, state.layers, state.others), in_memory(), 5e-6)


def combinations():
    for fuse_update in (True, False):
        for clip_by in (None, "global", "previous", "layer"):
            for has_state in (False, True):
                for loss_scale in (None, 1024.0):
                    if not (fuse_update and (clip_by == "global" or loss_scale)):
                        yield fuse_update, clip_by, has_state, loss_scale


PLAIN = (True, "previous", True, None), (False, "layer", True, 1024.0)


@pytest.mark.parametrize(
    ("fuse_update", "clip_by", "has_state", "loss_scale"),
    [
        pytest.param(*case, marks=() if case in PLAIN else pytest.mark.exhaustive)
        for case in combinations()
    ],
)
def test_all_options(fuse_update, clip_by, has_state, loss_scale):
    options = {} if clip_by is None else {"clip_norm": NORM, "clip_by": clip_by}
    init, step = make(
        fuse_update=fuse_update, has_state=has_state, loss_scale=loss_scale, num_microbatches=4,
        num_slices=2, **options,
    )  # fmt: skip
    losses, state, rest = train(init, step, model_state=STATE if has_state else ())
    close((losses, state.layers, state.others), in_memory(clip_by), 5e-6)
    if has_state:
        assert state.model_state["tokens"] == 2 * sum(LENGTHS)
        (aux,) = rest
        np.testing.assert_array_equal(aux["weight"], np.sum(np.reshape(LENGTHS, (4, 4)), 1))


def test_one_microbatch_equals_head_that_divides_to_the_bit():
    def mean(others, x, batch, key):
        loss, weight = head(others, x, batch, key)
        return loss / weight

    want, want_state, _ = train(*offload_train_step(embed, layer, mean, SGD))
    losses, state, _ = train(*make())
    assert_equal_bits((losses, state), (want, want_state))


@pytest.mark.parametrize("m", [exhaustive(1), 4])
def test_no_weight(m):
    """The loss and the gradients are 0, and not NaN."""
    init, step = make(num_microbatches=m, fuse_update=False, skip_nonfinite=True)
    losses, state, _ = train(init, step, batch=batch_of([0] * BATCH))
    assert losses == [0, 0]
    close((state.layers, state.others), (params(), others()), 0)


def test_weight_is_not_differentiated():
    def learned(others, x, batch, key):
        weight = jnp.sum(jax.nn.sigmoid(x))
        return weight * jnp.sum(others["u"]), weight

    init, step = offload_train_step(
        embed, layer, learned, optax.sgd(1.0), weighted_loss=True, num_microbatches=2
    )
    losses, state, _ = train(init, step, steps=1)
    np.testing.assert_allclose(losses[0], others()["u"].sum(), rtol=1e-5)
    np.testing.assert_allclose(state.others["u"], others()["u"] - 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight", [3, exhaustive(3.0), exhaustive(np.float32(3)), jnp.bfloat16(3)])
def test_kinds_of_weights(weight):
    def constant(others, x, batch, key):
        return jnp.sum(x), weight

    init, step = offload_train_step(
        embed, layer, constant, SGD, weighted_loss=True, num_microbatches=2
    )
    state = init(to_host(params()), others())
    x = embed(others(), batch_of(), None)
    for w in layers_of(params()):
        x = layer(w, x, None)
    _, loss = jax.jit(step)(state, batch_of())
    np.testing.assert_allclose(loss, jnp.sum(x) / 6, rtol=1e-5)


@pytest.mark.parametrize("has_state", [False, exhaustive(True)])
def test_weights_do_not_cost_another_forward_pass(has_state):
    """XLA removes the logits from the loop that computes the weights."""

    def products(run_head):
        options = {"has_state": True, "head_has_aux": True} if has_state else {}
        run_embed = embed_with_state if has_state else embed
        init, step = offload_train_step(
            run_embed, layer, run_head, SGD, num_microbatches=4,
            weighted_loss=run_head in (head, head_with_state), **options,
        )  # fmt: skip
        state = init(to_host(params()), others(), STATE if has_state else ())
        text = jax.jit(step).lower(state, batch_of()).compile().as_text()
        return len(re.findall(r" dot\(|custom_call_target=\"[^\"]*(?:matmul|dot)", text))

    def plain(others, x, batch, key):
        return head(others, x, batch, key)[0]

    def plain_with_state(others, state, x, batch, key):
        (loss, _), state, aux = head_with_state(others, state, x, batch, key)
        return loss, state, aux

    weighted, unweighted = (head_with_state, plain_with_state) if has_state else (head, plain)
    assert products(weighted) == products(unweighted) > 0


SPECS = {"in_specs": (P(), P("i")), "out_specs": (P(), P())}


def sum_over_devices(others, x, batch, key):
    return lax.psum(head(others, x, batch, key), "i")


@pytest.mark.parametrize("check_vma", [True, exhaustive(False)])
def test_devices_with_unequal_weights(check_vma):
    """Without check_vma the optimizer averages the gradients of the devices."""
    mesh = mesh_of((8,), ("i",))
    average = optax.stateless(lambda grads, params: lax.pmean(grads, "i"))
    init, _ = offload_train_step(
        embed, layer, head, SGD if check_vma else optax.chain(optax.identity(), SGD)
    )
    _, step = offload_train_step(
        embed, layer, sum_over_devices, SGD if check_vma else optax.chain(average, SGD),
        weighted_loss=True, num_microbatches=2,
    )  # fmt: skip
    run = offload_jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **SPECS))
    state = init(
        jax.device_put(params(), on(mesh, P(), True)), jax.device_put(others(), on(mesh, P()))
    )
    batch, losses = jax.device_put(batch_of(), on(mesh, P("i"))), []
    for _ in range(2):
        state, loss = run(state, batch)
        losses.append(loss)
    close((losses, state.layers, state.others), in_memory(), 1e-5)


@pytest.mark.exhaustive
def test_pmap():
    average = optax.stateless(lambda grads, params: lax.pmean(grads, "i"))
    init, _ = offload_train_step(
        embed, layer, head, optax.chain(optax.identity(), SGD), params_in="device"
    )
    _, step = offload_train_step(
        embed, layer, sum_over_devices, optax.chain(average, SGD), weighted_loss=True,
        params_in="device",
    )  # fmt: skip
    state = init(params(), others())
    run = jax.pmap(step, "i", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:8])
    batch = jax.tree.map(lambda a: a.reshape(8, 2, LENGTH), batch_of())
    losses = []
    for _ in range(2):
        state, loss = run(state, batch)
        losses.append(loss)
    close((losses, state.layers, state.others), in_memory(), 1e-5)


def test_jit_over_explicit_mesh():
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    with jax.set_mesh(mesh):
        init, step = make(num_microbatches=2)
        state, losses = (
            init(
                jax.device_put(params(), on(mesh, P(), True)),
                jax.device_put(others(), on(mesh, P())),
            ),
            [],
        )
        batch, run = jax.device_put(batch_of(), on(mesh, P("i"))), offload_jit(step)
        for _ in range(2):
            state, loss = run(state, batch)
            losses.append(loss)
    close(to_device((losses, state.layers, state.others)), in_memory(), 1e-5)


WRONG = {
    "no pair": (lambda *a: head(*a)[0], r"`head` must return \(loss_sum, weight\) as its loss"),
    "three": (lambda *a: (*head(*a), 1), r"as its loss, not a tuple of 3"),
    "vector": (lambda *a: (head(*a)[0], jnp.ones(2)), "`head` must return a scalar weight, not"),
    "text": (lambda *a: (head(*a)[0], "1"), "`head` must return a scalar weight, not '1'"),
    "vector loss": (lambda *a: (jnp.ones(2), 1), "`head` must return a scalar loss, not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rejects_invalid_results(name):
    run_head, match = WRONG[name]
    init, step = offload_train_step(embed, layer, run_head, SGD, weighted_loss=True)
    with pytest.raises(TypeError, match=match):
        jax.eval_shape(step, init(to_host(params()), others()), batch_of())


def test_rejects_weight_of_one_device():
    mesh = mesh_of((8,), ("i",))

    def partly(others, x, batch, key):
        loss, weight = head(others, x, batch, key)
        return lax.psum(loss, "i"), weight

    init, step = offload_train_step(
        embed, layer, partly, SGD, weighted_loss=True, params_in="device"
    )
    state = jax.device_put(init(params(), others()), on(mesh, P()))
    with pytest.raises(ValueError, match=r"`head` must sum the weight over the devices"):
        jax.eval_shape(jax.shard_map(step, mesh=mesh, **SPECS), state, batch_of())
