from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effjax.train.lm.config import LMConfig
from effjax.train.lm.recipe import build, make_lm_optimizer, make_lm_schedule


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
