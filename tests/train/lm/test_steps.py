from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.models import scan_layers
from effjax.train.lm.config import LMConfig
from effjax.train.lm.steps import build, lm_loss, make_lm_optimizer, make_lm_schedule, split_loss
from tests.train.small import CachedTask, lm_task


@pytest.fixture(scope="module")
def one():
    return CachedTask(lm_task(1))


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


def test_step_with_remat_and_two_devices(one):
    """Recomputed layers on two devices take the same step as stored ones on one device."""
    two, key = lm_task(2, remat=True), jax.random.key(3)

    def step(task):
        state, loss = task.make_step()(task.initial_state(), next(task.batches(0)), key)
        assert int(state.step) == 1
        return jax.tree.map(np.asarray, (state.params, loss))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), step(two), step(one))


def test_weight_decay_is_of_kernels_only():
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build(LMConfig(bias=True)))))
    ones = jax.tree.map(lambda p: jnp.ones(p.shape[:1]), params)
    optimizer = make_lm_optimizer(lambda _: 1.0, 0.5)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    leaves = jax.tree.leaves_with_path(updates)
    moved = {jax.tree_util.keystr(path): float(update[0]) for path, update in leaves}
    assert {v for k, v in moved.items() if "kernel" in k} == {-0.5}
    assert {v for k, v in moved.items() if "kernel" not in k} == {0.0}


def test_the_optimizer_works_leaf_by_leaf():
    """The update of a parameter does not depend on the others."""
    optimizer = make_lm_optimizer(optax.constant_schedule(0.1), 0.1)
    params = {"a": {"kernel": jnp.ones(3)}, "b": {"scale": jnp.ones(2)}}

    def first(params, grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    whole: Any = first(params, params)
    part: Any = first({"a": params["a"]}, {"a": params["a"]})
    np.testing.assert_array_equal(whole["a"]["kernel"], part["a"]["kernel"])


def test_schedule():
    schedule: Any = make_lm_schedule(1.0, 100)
    rates = [float(schedule(s)) for s in (0, 10, 100)]
    np.testing.assert_allclose(rates, [0.1, 1, 0.1], atol=1e-6)
    one_step: Any = make_lm_schedule(1.0, 1)
    assert np.isfinite(float(one_step(0)))
