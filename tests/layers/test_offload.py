"""OffloadModel of linen and nnx compared with the unwrapped layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers import offload_linen, offload_nnx
from tests.layers.offload_linen import IMAGES, X, assert_same, joined
from tests.ops.offload.stacks import assert_close, kinds
from tests.tiers import vary

FLAVOURS = {"linen": offload_linen, "nnx": offload_nnx}


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return FLAVOURS[request.param]


@vary(
    ("flavour", "options"),
    [
        ("linen", {"num_slices": 2}),
        ("nnx", {"num_slices": 2}),
        ("nnx", {"activations_in": "device"}),
        ("linen", {"policy": jax.checkpoint_policies.everything_saveable}),
    ],
    indirect=["flavour"],
    ids=["recomputed", "recomputed in nnx", "on device", "saved"],
)
def test_blocks_with_dropout_match_unwrapped(flavour, options):
    model = flavour.offloaded(flavour.mlp, **options)
    results = flavour.run(model, X)
    assert_same(results, flavour.unwrapped(flavour.mlp))
    assert kinds(results[1]) == {"pinned_host"}
    assert kinds(results[2]) == {"device"}
    flavour.check_trained(model, results)


@vary(
    ("flavour", "norm"),
    [("linen", "cnn"), ("nnx", "cnn"), ("linen", "effjax_norm"), ("nnx", "effjax_norm")],
    indirect=["flavour"],
)
def test_cnn_with_batch_norm_matches_unwrapped(flavour, norm):
    make, policy = getattr(flavour, norm), jax.checkpoint_policies.dots_saveable
    model = flavour.offloaded(make, num_slices=3, policy=policy)
    results = flavour.run(model, IMAGES)
    assert_same(results, flavour.unwrapped(make))
    stats = flavour.stats(results, 1)
    assert np.any(stats["mean"] != 0) and np.all(stats.get("num_batches", 1) == 1)
    flavour.check_trained(model, results)


@vary(
    ("flavour", "name"),
    [("nnx", "mlp"), ("linen", "mlp"), ("nnx", "cnn"), ("linen", "effjax_norm")],
    indirect=["flavour"],
)
def test_microbatches(flavour, name):
    """They have their own dropout keys, and running statistics are the mean of theirs."""
    make, x = getattr(flavour, name), X if name == "mlp" else IMAGES
    model = flavour.offloaded(make, num_slices=2, num_microbatches=2)
    results = flavour.run(model, x)
    flavour.check_trained(model, results)  # each stream advances once
    parts = [flavour.run_microbatch(make, part, m) for m, part in enumerate(np.split(x, 2))]
    if name == "mlp":
        want, _ = joined([(*part[:3], {}) for part in parts])
        assert_same(results[:3], want)
    else:
        want, stats = joined([(*part[:3], flavour.stats(part, 1)) for part in parts])
        assert_close(results[:3], want, rtol=1e-4, atol=1e-5)
        assert_close(flavour.stats(results, 1), stats, rtol=1e-4, atol=1e-6)


@vary("flavour", ["nnx", "linen"], indirect=True)
def test_compute_dtype(flavour):
    x = jnp.asarray(X, jnp.bfloat16)
    model = flavour.offloaded(flavour.mlp, compute_dtype=jnp.bfloat16)
    y, grads, dx, _ = flavour.run(model, x)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_tuples_and_dicts(flavour):
    layers = [lambda a, b: (a, a * b), lambda a, b: {"x": a + b}, lambda x: 2 * x]
    y = flavour.function_of(layers)(X, 2 * X)
    np.testing.assert_allclose(y, 2 * (X + 2 * X * X), rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "match", "options", "flags"),
    [
        (ValueError, r"`num_microbatches` \(=5\) must divide", {"num_microbatches": 5}, {}),
        (ValueError, r"`num_slices` \(=5\)", {"num_slices": 5}, {}),
        (TypeError, "accepts `train`", {}, {"train": True}),
    ],
)
def test_rejects_invalid_call(flavour, error, match, options, flags):
    with pytest.raises(error, match=match):
        flavour.call(flavour.mlp, X, options, flags)


def test_rejects_wrong_option_or_input(flavour):
    for name, value in ("num_slices", 0), ("num_microbatches", 2.0), ("compute_dtype", "int8"):
        with pytest.raises((TypeError, ValueError), match=f"^`{name}"):
            flavour.OffloadModel([jnp.tanh], **{name: value})
    with pytest.raises(TypeError, match="^`x"):
        flavour.function_of([jnp.tanh])("x")
