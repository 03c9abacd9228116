"""Steps in float16 compared with ``flax.training.dynamic_scale.DynamicScale`` and optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import offload_jit, offload_train_step, to_host
from effjax.ops.offload.train_state import GROWTH_INTERVAL, LossScale, next_loss_scale
from tests.contexts import mesh_of
from tests.ops.offload.stacks import (
    KEY,
    LAYERS,
    WIDTH,
    assert_equal_bits,
    key_of,
    layer,
    params,
)
from tests.ops.offload.steps import TOKENS, close, head, layers_of, loss_in_memory, others, stack
from tests.tiers import exhaustive

FIRST = 2.0**24  # too large for the gradients of `half`, several times over
ADAM = optax.adam(1e-2)


def half(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float16), tree)


def embed(others, batch, key):
    return half(others["e"])[batch]


def half_layer(w, x, key):
    return layer(half(w), x, key)


def half_head(others, x, batch, key):
    return head(half(others), x.astype(jnp.float16), batch, key).astype(jnp.float32)


ENDS = (
    lambda others, state, batch, key: (embed(others, batch, key), state),
    lambda others, state, x, batch, key: (half_head(others, x, batch, key), state, ()),
)


def in_memory(tx, steps, kind=jnp.float32):
    """Return (scale after the step, loss, layers, others) of each step."""

    @jax.jit
    def step(scaling, model, state, key):
        def loss(model):
            return loss_in_memory(model, (), TOKENS, key, ends=ENDS, layer=half_layer)[0]

        scaling, finite, value, grads = scaling.value_and_grad(loss)(model)
        updates, new = tx.update(grads, state, model)
        keep = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
        return scaling, *keep((optax.apply_updates(model, updates), new), (model, state)), value

    as_kind = functools.partial(jax.tree.map, lambda a: a.astype(kind))
    model = as_kind({"layers": layers_of(params()), "others": others()})
    state, scaling, results = tx.init(model), DynamicScale(scale=FIRST, minimum_scale=1.0), []
    for i in range(steps):
        key = jax.random.fold_in(KEY, i)
        scaling, model, state, value = step(scaling, model, state, key)
        results.append((scaling.scale, value, stack(model["layers"]), model["others"]))
    return results


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        exhaustive(jnp.float32, {"compute_dtype": jnp.float16}),
        exhaustive(jnp.float32, {"clip_norm": 0.05, "num_slices": 2, "params_in": "device"}),
        (jnp.float16, {}),
    ],
    ids=["compute_dtype", "clipped", "float16 parameters"],
)
def test_train_step_matches_dynamic_scale(kind, options):
    clip_norm = options.get("clip_norm")
    tx = ADAM if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), ADAM)
    want = in_memory(tx, 12, kind)
    init, step = offload_train_step(
        embed, half_layer, half_head, ADAM, fuse_update=False, loss_scale=FIRST, **options
    )
    as_kind = functools.partial(jax.tree.map, lambda a: a.astype(kind))
    w = as_kind(params())
    state = init(w if options.get("params_in") == "device" else to_host(w), as_kind(others()))
    step, skipped = offload_jit(step), 0
    for i, expected in enumerate(want):
        before = jax.tree.map(np.asarray, state)
        state, loss = step(state, TOKENS, jax.random.fold_in(KEY, i))
        assert float(state.loss_scale.scale) == float(expected[0])
        close((loss, state.layers, state.others), expected[1:], 2e-3)
        if state.loss_scale.scale < before.loss_scale.scale:
            assert_equal_bits(state[:4], before[:4])
            skipped += 1
        else:
            assert np.any(np.asarray(state.layers["a"]) != before.layers["a"])
    assert 2 <= skipped <= 10


@pytest.mark.parametrize(
    ("scale", "steps", "finite"),
    [
        (2.0**16, 0, True),
        (2.0**16, GROWTH_INTERVAL - 1, True),
        (2.0**16, GROWTH_INTERVAL, False),
        (1.5, GROWTH_INTERVAL, True),
        (1.5, 0, False),
        (1.0, 0, False),
        (2.0**127, GROWTH_INTERVAL, True),
        (2.0**127, GROWTH_INTERVAL - 1, False),
    ],
)
def test_next_loss_scale_matches_flax(scale, steps, finite):
    p = jnp.float32(1 if finite else np.inf)
    # An array, as in training: a Python float would overflow when Flax doubles it.
    scale = jnp.float32(scale)
    flax = DynamicScale(scale=scale, fin_steps=steps, minimum_scale=1.0)
    want, is_finite, *_ = flax.value_and_grad(lambda p: 1e-38 * p * p)(p)
    got = next_loss_scale(LossScale(scale, jnp.int32(steps)), jnp.bool_(finite))
    assert bool(is_finite) == finite
    assert got.scale == want.scale and got.finite_steps == want.fin_steps
    assert got.scale.dtype == jnp.float32 and got.finite_steps.dtype == jnp.int32


def make(mean=lambda x: x, **options):
    """Make a step whose gradients overflow if a row of the batch does."""

    def run_embed(others, model_state, batch, key):
        return batch @ others, {"sum": model_state["sum"] + mean(jnp.abs(batch).mean())}

    def run_head(others, model_state, x, batch, key):
        return mean((jnp.sin(x) * jnp.abs(batch).max()).mean()), model_state

    return offload_train_step(
        run_embed, layer, run_head, ADAM, fuse_update=False, has_state=True, num_microbatches=2,
        **{"loss_scale": 4.0} | options,
    )  # fmt: skip


def test_overflow_in_one_microbatch_skips_the_step():
    """The model state is updated all the same, as for batch statistics."""
    init, step = make(clip_norm=1.0)
    batch = jnp.ones((4, WIDTH)).at[3, 0].set(3e38)
    state = init(to_host(params()), jnp.eye(WIDTH), {"sum": jnp.float32(0)})
    before = jax.tree.map(np.asarray, state)
    state, _ = offload_jit(step)(state, batch)
    assert_equal_bits(state[:4], before[:4])
    assert (float(state.loss_scale.scale), int(state.loss_scale.finite_steps)) == (2, 0)
    assert float(state.model_state["sum"]) > 1


def test_skip_nonfinite_keeps_the_whole_state():
    init, step = make(loss_scale=None, skip_nonfinite=True)
    state = init(to_host(params()), jnp.eye(WIDTH), {"sum": jnp.float32(0)})
    run, batch = offload_jit(step), jnp.ones((4, WIDTH))
    for bad in (3e38, jnp.inf, jnp.nan):
        before = jax.tree.map(np.asarray, state)
        state, loss = run(state, batch.at[3, 0].set(bad))
        assert jnp.isnan(loss)
        assert_equal_bits(state, before)
    state, loss = run(state, batch)
    assert jnp.isfinite(loss) and float(state.model_state["sum"]) == 2
    assert np.any(np.asarray(state.layers["a"]) != before.layers["a"])


def test_overflow_on_one_device_skips_the_step_on_all():
    mesh = mesh_of((8,), ("i",))
    init, step = make(lambda x: lax.pmean(x, "i"))
    on_host, here = NamedSharding(mesh, P(), memory_kind="pinned_host"), NamedSharding(mesh, P())
    state = init(
        jax.device_put(params(), on_host),
        *jax.device_put((jnp.eye(WIDTH), {"sum": jnp.float32(0)}), here),
    )
    run = offload_jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P())))
    batch, taken = jnp.ones((16, WIDTH)), []
    for big in (1.0, 3e38, 1.0):
        before = jax.tree.map(np.asarray, state)
        state, _ = run(state, batch.at[3, 0].set(big))
        taken.append(bool(np.any(np.asarray(state.layers["a"]) != before.layers["a"])))
        for a in jax.tree.leaves(state.layers):
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(shard.data, a.addressable_shards[0].data)
    assert taken == [True, False, True]
    np.testing.assert_array_equal(state.layers_state[0].count, [2] * LAYERS)
    assert (float(state.loss_scale.scale), int(state.loss_scale.finite_steps)) == (2, 1)


def test_rejects_loss_scale_with_fused_update():
    with pytest.raises(ValueError, match=r"`loss_scale` \(=4.0\) needs fuse_update=False"):
        offload_train_step(embed, layer, head, ADAM, loss_scale=4.0)
    with pytest.raises(ValueError, match=r"`skip_nonfinite` \(=True\) needs fuse_update=False"):
        offload_train_step(embed, layer, head, ADAM, skip_nonfinite=True)


def test_rejects_state_without_loss_scale():
    init, _ = offload_train_step(embed, layer, head, ADAM)
    _, step = offload_train_step(embed, layer, head, ADAM, loss_scale=4.0, fuse_update=False)
    with pytest.raises(
        ValueError, match="`state.loss_scale` must have the structure of the result of init"
    ):
        step(init(to_host(params()), others()), TOKENS, key_of(KEY, 0, 0))
