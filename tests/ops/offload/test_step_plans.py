"""Memory of training steps compiled for a GPU, compared with the same steps in memory."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from effjax import OffloadState, offload_jit, offload_scan, offload_train_step
from effjax.memory import plan
from tests.ops.offload.stacks import key_of, layer, loss
from tests.ops.offload.test_plans import BATCH, BOUNDARY_BYTES, LAYER_BYTES, WIDTH, shape, stacked
from tests.programs import needs_gpu_compiler

pytestmark = [needs_gpu_compiler, pytest.mark.exhaustive]
ADAM, SGD = optax.adam(1e-3), optax.sgd(1e-3)
KEY = jax.random.key(0)


def embed(others, batch, key):
    return batch @ others


def head(others, x, batch, key):
    return loss(x)


def on_device(tree):
    return jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), tree)


def state_of(tx, w, others, trained=None):
    """Return the shapes of a state; moments are in the memory of the layers."""
    trained = w if trained is None else trained
    host = {a.sharding.memory_kind for a in jax.tree.leaves(w)} == {"pinned_host"}
    layers_state = jax.tree.map(
        lambda a: shape(*a.shape, host=host and a.ndim > 1, dtype=a.dtype),
        jax.eval_shape(jax.vmap(tx.init), trained),
    )
    return OffloadState(w, others, layers_state, on_device(jax.eval_shape(tx.init, others)))


def planned(tx, w, others, batch, embed=embed, layer=layer, head=head, trained=None, **options):
    _, step = offload_train_step(embed, layer, head, tx, **options)
    return plan(offload_jit(step), state_of(tx, w, others, trained), batch, KEY)


def updated_at_the_end(tx, num_layers):
    """Plan ``jax.value_and_grad`` of checkpointed layers, followed by optax."""
    one = jax.checkpoint(layer, prevent_cse=False)

    def step(state, batch, key):
        def total(model):
            def body(x, at):
                w, i = at
                return one(w, x, key_of(key, i, 0)), None

            x = embed(model[1], batch, key)
            return loss(jax.lax.scan(body, x, (model[0], jnp.arange(num_layers)))[0])

        model, moments = state
        value, grads = jax.value_and_grad(total)(model)
        updates, moments = tx.update(grads, moments, model)
        return (optax.apply_updates(model, updates), moments), value

    model = on_device(stacked(num_layers)), shape(8, WIDTH)
    state = model, on_device(jax.eval_shape(tx.init, model))
    return plan(offload_jit(step), state, shape(BATCH, 8), KEY)


def test_fused_update_on_the_device_saves_the_gradients():
    """Only the state, the inputs of the layers and a few layers remain."""
    others, batch = shape(8, WIDTH), shape(BATCH, 8)
    ours = planned(ADAM, on_device(stacked(32)), others, batch, params_in="device")
    plain = updated_at_the_end(ADAM, 32)
    assert plain.peak_device_bytes - ours.peak_device_bytes >= (32 - 3) * LAYER_BYTES
    assert ours.host.total == 0
    state_bytes = 3 * 32 * LAYER_BYTES  # parameters and two moments
    assert ours.device.aliased >= state_bytes
    rest = 32 * BOUNDARY_BYTES + 8 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert ours.peak_device_bytes <= state_bytes + rest


def test_no_copies_without_prefetch():
    found = planned(ADAM, stacked(24), shape(8, WIDTH), shape(BATCH, 8), prefetch=0)
    assert found.device.temporaries <= 8 * LAYER_BYTES + 16 * BOUNDARY_BYTES
    assert found.host.temporaries <= 1.01 * 24 * BOUNDARY_BYTES


VOCABULARY = 32 * WIDTH


def test_microbatches_reduce_memory_of_large_head():

    def large(others, x, batch, key):
        logits = x @ others["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    rows = 8 * BATCH
    others = {"in": shape(8, WIDTH), "head": shape(WIDTH, VOCABULARY)}
    batch = {"x": shape(rows, 8), "labels": shape(rows, dtype="int32")}
    one, four = (
        planned(
            SGD, stacked(4), others, batch, num_microbatches=m, head=large,
            embed=lambda others, batch, key: batch["x"] @ others["in"],
        )
        for m in (1, 4)
    )  # fmt: skip
    logits = 4 * rows * VOCABULARY
    assert one.peak_device_bytes - four.peak_device_bytes >= 0.7 * logits


def low_rank(w, x, key):
    """Apply an int8 kernel with its scales, and low-rank matrices."""
    kernel = w["kernel"].astype(x.dtype) * w["scale"]
    return x + jnp.tanh(x @ kernel + x @ w["low"]["a"] @ w["low"]["b"]) @ w["out"].astype(x.dtype)


def is_low(path, leaf):
    return path[0].key == "low"


def quantized(num_layers):
    here = functools.partial(shape, host=True)
    return {
        "kernel": here(num_layers, WIDTH, 2 * WIDTH, dtype="int8"),
        "scale": here(num_layers, 1, 2 * WIDTH),
        "out": here(num_layers, 2 * WIDTH, WIDTH, dtype="bfloat16"),
        "low": {"a": here(num_layers, WIDTH, 8), "b": here(num_layers, 8, 2 * WIDTH)},
    }


def bytes_of(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("fuse_update", [True, False])
def test_frozen_parameters_have_no_gradients_moments_or_copies(fuse_update):
    w = quantized(16)
    found = planned(
        ADAM, w, shape(8, WIDTH), shape(BATCH, 8), layer=low_rank, fuse_update=fuse_update,
        trained={**jax.tree.map(lambda a: None, w), "low": w["low"]}, trainable=is_low,
    )  # fmt: skip
    low, inputs = bytes_of(w["low"]), 16 * BOUNDARY_BYTES
    assert found.host.total <= bytes_of(w) + 4 * low + inputs  # moments and gradients, and a spare
    assert found.device.temporaries <= 3 * bytes_of(w) / 16 + 16 * BOUNDARY_BYTES + LAYER_BYTES


def test_frozen_parameters_have_no_gradients_in_scan():
    w, x = quantized(16), shape(BATCH, WIDTH)

    def run(low, w, x):
        return loss(offload_scan(low_rank, {**w, "low": low}, x, trainable=is_low))

    found = plan(offload_jit(jax.grad(run), donate=False), w["low"], w, x)
    assert found.host.total <= bytes_of(w) + 3 * bytes_of(w["low"]) + 16 * BOUNDARY_BYTES
