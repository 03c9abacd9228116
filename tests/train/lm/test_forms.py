import jax
import numpy as np
import pytest

from effjax.train.lm.config import LMConfig
from effjax.train.lm.forms import LM_FORMS, lm_steps

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
