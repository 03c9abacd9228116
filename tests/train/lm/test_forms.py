import jax
import numpy as np
import pytest

from effjax.memory import plan
from effjax.train.lm.config import LMConfig
from effjax.train.lm.forms import (
    LM_FORMS,
    kept_bytes,
    lm_steps,
    lm_training_step,
    with_memory_options,
)
from tests.programs import needs_gpu_compiler

TINY = LMConfig(layers=2, width=16, heads=2, context=12, offload="all", num_microbatches=2)


@pytest.fixture(scope="module")
def steps():
    return lm_steps(TINY, num_devices=1)(4)


def test_every_form_has_a_step(steps):
    assert tuple(steps) == tuple(LM_FORMS)


@pytest.mark.parametrize("name", LM_FORMS)
def test_a_step_of_each_form(steps, name):
    step, state, tokens, key = steps[name]
    assert tokens.shape == (4, 13) and tokens.dtype == np.int32
    new_state, (loss,) = step.trace(state, tokens, key).out_info
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert loss.shape == ()
    leaves = jax.tree.leaves_with_path(state)
    kinds = {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}
    on_host = {path for path, kind in kinds.items() if kind == "pinned_host"}
    assert bool(on_host) is (LM_FORMS[name].get("offload") in ("params", "all"))
    assert all("layers" in path for path in on_host)


def test_memory_options_of_several_devices():
    config = LMConfig(layers=2, width=16, heads=2, context=12)
    places = dict(policy="recompute", activations="device", params="host")
    chosen = with_memory_options(config, 2, **places, num_microbatches=1)
    assert chosen is not None and chosen.fuse_update and chosen.offload == "params"
    _, state, *_ = lm_training_step(chosen, 2)
    assert {a.sharding.mesh.size for a in jax.tree.leaves(state)} == {2}
    assert with_memory_options(config, 2, **places, num_microbatches=2) is None
    assert with_memory_options(config, 1, **places, num_microbatches=2) is not None


def test_kept_bytes():
    config = LMConfig(layers=4, width=64, heads=2, context=32, batch_size=8)
    places = dict(activations="device", params="host")
    kept = [
        kept_bytes(config, policy=policy, **places)[0]
        for policy in ("everything", "dots", "recompute")
    ]
    inputs = 4 * 8 * 32 * 64 * 4  # of the layers
    assert inputs / 2 < kept[2] <= inputs < 2 * inputs < kept[1] < kept[0]
    assert kept_bytes(config, 4, policy="dots", **places) == (kept[1] // 4, 0)
    assert kept_bytes(config, 4, policy="dots", activations="host") == (0, kept[1])


@pytest.mark.exhaustive
@needs_gpu_compiler
@pytest.mark.parametrize("policy", ["everything", "dots", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_bytes_are_a_lower_bound(policy, dtype):
    config = LMConfig(layers=4, width=64, heads=2, context=64, batch_size=16, dtype=dtype)
    chosen = with_memory_options(
        config, policy=policy, activations="device", params="device", num_microbatches=1
    )
    kept, _ = kept_bytes(config, policy=policy, activations="device")
    planned = plan(*lm_training_step(chosen), target="l4")
    assert kept <= planned.device.temporaries < 16 * kept
