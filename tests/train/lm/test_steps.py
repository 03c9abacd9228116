from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from effjax.models import scan_layers
from effjax.train.lm.steps import compile_lm_step, lm_loss, lm_step, split_loss
from effjax.train.mesh import data_mesh, replicated
from tests.train.small import CachedTask, lm_task


@pytest.fixture(scope="module")
def one():
    return CachedTask(lm_task())


def test_loss_matches_float64(one):
    params = one.initial_state().params
    tokens = np.arange(24).reshape(2, 12)
    logits = np.asarray(nnx.merge(one.learner.graphdef, params)(tokens[:, :-1]), np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    want = -np.mean(np.take_along_axis(logs, tokens[:, 1:, None], -1))
    np.testing.assert_allclose(lm_loss(one.learner.graphdef, params, tokens, None), want, rtol=1e-5)


@pytest.mark.parametrize("abstract", [True, False])
def test_split_loss(abstract, one):
    params = one.initial_state().params
    model: Any = one.learner.model if abstract else nnx.merge(one.learner.graphdef, params)
    functions = split_loss(model)
    others = {name: value for name, value in params.items() if name != "blocks"}
    tokens, key = np.arange(26).reshape(2, 13), jax.random.key(3)
    x = scan_layers(functions.layer, params["blocks"], functions.embed(others, tokens, key), key)
    want = lm_loss(one.learner.graphdef, params, tokens, key)
    np.testing.assert_allclose(functions.head(others, x, tokens, key), want, rtol=1e-6)


def test_step_with_other_layers_and_devices(one):
    """Recomputed layers on two devices take the same step as scanned layers on one."""
    tokens, key = np.arange(52).reshape(4, 13) % 256, jax.random.key(3)
    seen = []

    def mine(layer, params, x, key):
        seen.append(x.shape)
        return lm_task(remat=True).learner.apply_layers(1)(layer, params, x, key)

    def step(devices, apply_layers):
        learner, mesh = one.learner, data_mesh(jax.devices()[:devices])
        step = lm_step(learner.graphdef, learner.optimizer, apply_layers, mesh=mesh)
        run = compile_lm_step(step, mesh)
        state, loss = run(jax.device_put(one.initial_state(), replicated(mesh)), tokens, key)
        assert int(state.step) == 1
        return jax.tree.map(np.asarray, (state.params, loss))

    got, want = step(2, mine), step(1, scan_layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    assert seen == [(4, 12, 16)]
