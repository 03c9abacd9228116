"""Parameters of embed and head in host memory: the same results as on the device, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax import offload_train_step, to_host
from effjax.ops.offload import compiled, row_update
from effjax.optimizers import adamw_8bit, in_float32
from tests.ops.offload import reference, steps
from tests.ops.offload.stacks import KEY, LAYERS, WIDTH, assert_equal_bits, to_numpy
from tests.ops.offload.steps import ADAMW, OTHERS_ON_HOST, TOKENS, embed, every_row, head, others
from tests.tiers import vary

# XLA fuses and rewrites the update of whole arrays and that of chunks differently, which changes
# last bits. Without these passes, equal operations have equal results.
EXACT = {"xla_disable_hlo_passes": "fusion,algsimp"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Update the rows of both matrices in several chunks, for one of them with a rest."""
    monkeypatch.setattr(row_update, "CHUNK_BYTES", 700)


@pytest.fixture
def exact(monkeypatch):
    """Compile without passes that change bits."""
    monkeypatch.setattr(compiled, "_compile", lambda lowered, options: lowered.compile(EXACT))


def with_scalar(dtype="float32"):
    w = {**others(), "scale": jnp.ones(WIDTH), "unused": 0.1 * jnp.ones((30, WIDTH))}
    return jax.tree.map(lambda a: a.astype(dtype), w)


def shift(w, x, key):
    return x + w["c"]


def scaled_head(others, x, batch, key):
    return head(others, x * others["scale"], batch, key)


def train(
    where, tx=ADAMW, w=None, embed=embed, head=scaled_head, layers=shift, num_steps=3, **options
):  # fmt: skip
    """Return (losses, layers, others, state of the others, norm of the gradients)."""
    stack = {"c": 0.1 * jnp.ones((LAYERS, WIDTH))}
    if isinstance(layers, list):
        stack = reference.unstack(stack, LAYERS)
    args = embed, layers, head, tx, stack, with_scalar() if w is None else w, [TOKENS] * num_steps
    options = (OTHERS_ON_HOST if where == "host" else {}) | options
    if where == "device":
        options.pop("update_rows", None)
    losses, (state, *_) = steps.train(*args, **options)
    steps.assert_places(state, **options)
    return to_numpy((losses, state.layers, state.others, state.others_state, state.grad_norm))


def tied_head(others, x, batch, key):
    return head({"u": others["e"].T}, x, batch, key)


def deep_embed(others, batch, key):
    """Apply matrices that the gradients need."""
    return jnp.tanh(others["e"][batch] @ others["a"]) @ others["b"]


def wide():
    """Return parameters with 8-bit moments, also in the last row, which is a chunk of its own."""
    return {"e": jax.random.normal(KEY, (51, 24)), "u": jax.random.normal(KEY, (WIDTH, 19))}


def wide_embed(others, batch, key):
    return others["e"][batch, :WIDTH].astype(jnp.float32)


def deep():
    return others() | {"a": jnp.eye(WIDTH) * 0.7, "b": jnp.eye(WIDTH) * 0.5, "scale": jnp.ones(8)}


def summed_head(others, x, batch, key):
    """Return the sum of the losses and the number of rows of some tokens."""
    weight = (batch > 3).sum()
    return scaled_head(others, x, batch, key) * weight, weight


SGD = optax.sgd(0.5, momentum=0.9)  # unlike Adam, it depends on the size of the gradients
ADAM_8BIT = adamw_8bit(1e-2, block_size=3, min_size=30)
STEPS = {
    "tied clipped": {
        "w": {"e": others()["e"]}, "head": tied_head, "fuse_update": False, "clip_norm": 0.1,
        "num_microbatches": 2,
    },
    "clipped by layer, scaled": {
        "tx": SGD, "clip_norm": 0.05, "clip_by": "layer", "fuse_update": False, "loss_scale": 8.0
    },
    "weighted, clipped by previous": {
        "tx": SGD, "clip_norm": 0.1, "clip_by": "previous", "head": summed_head,
        "weighted_loss": True, "num_microbatches": 2,
    },
    "8-bit, clipped": {
        "tx": ADAM_8BIT, "w": wide(), "embed": wide_embed, "head": head, "clip_norm": 0.1,
        "clip_by": "layer", "num_microbatches": 2,
    },
    "bfloat16": {"tx": in_float32(ADAMW), "w": with_scalar("bfloat16"), "embed": wide_embed},
    "list clipped": {"layers": [shift] * LAYERS, "fuse_update": False, "clip_norm": 0.1},
    "deep embed, layers on the device": {
        "w": deep(), "embed": deep_embed, "num_microbatches": 2, "params_in": "device"
    },
    "accumulated": {"tx": optax.MultiSteps(ADAMW, 2)},
    "whole": {"tx": optax.lamb(1e-2), "update_rows": None},
    "some in rows": {"update_rows": lambda path, leaf: path[0].key == "u"},
    "array": {
        "w": others()["e"], "embed": lambda others, batch, key: others[batch],
        "head": lambda others, x, batch, key: jnp.mean(x**2),
    },
}  # fmt: skip


@vary("name", STEPS)
def test_training_equals_others_on_the_device(name, exact):
    assert_equal_bits(train("host", **STEPS[name]), train("device", **STEPS[name]))


def test_last_chunk_has_the_rest_of_the_rows():
    leaf = row_update.plan_rows(ADAMW, with_scalar(), every_row).large[0]
    assert leaf.num_rows // leaf.size >= 2 and leaf.num_rows % leaf.size
    assert leaf.in_rows


@pytest.mark.exhaustive
def test_noise_differs_between_chunks():
    """Each chunk has its own key, and the key of the state advances as on the device."""
    tx = optax.chain(optax.identity(), optax.add_noise(1.0, 0.0, 0), optax.sgd(1.0))
    w = {"e": jnp.zeros((13, WIDTH)), "u": jnp.zeros((WIDTH, 17))}
    options = {
        "w": w, "num_steps": 1, "embed": lambda others, batch, key: others["e"][batch],
        "head": lambda others, x, batch, key: 0.0 * jnp.sum(x),
    }  # fmt: skip
    assert len(row_update.plan_rows(tx, w, every_row).large) == 2
    got, expected = (train(where, tx, **options) for where in ("host", "device"))
    assert_equal_bits(got[3], expected[3])
    assert len(np.unique(got[2]["e"])) == got[2]["e"].size
    assert_equal_bits(got, train("host", tx, **options))


def test_rejects_shared_array():
    init, _ = offload_train_step(embed, shift, scaled_head, ADAMW, others_in="host")
    w = to_host(jnp.ones((LAYERS, WIDTH)))
    with pytest.raises(ValueError, match=r"`others\['e'\]` and `others\['f'\]` are the same array"):
        init({"c": w}, {"e": w, "f": w})
