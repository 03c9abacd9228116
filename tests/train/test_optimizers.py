"""Learning rates of runs; `text/test_learner.py` and `images/test_steps.py` train with them."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from effjax.models import DecoderConfig
from effjax.train.mesh import make_mesh
from effjax.train.optimizers import make_schedule
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.learner import make_learner
from effjax.train.text.tiny import SIZES


def rates(schedule: Any, steps):
    return [float(schedule(step)) for step in steps]


def test_schedules():
    cases: Any = (
        ("cosine", None, {0: 1, 50: 0.5, 100: 0}),
        ("cosine", 0.1, {0: 0.1, 10: 1, 100: 0.1}),
        ("cosine", 0.5, {50: 1}),
        ("step", None, {0: 1, 50: 0.1, 51: 0.1, 76: 0.01}),
    )
    for kind, warmup, expected in cases:
        schedule = make_schedule(kind, 1.0, 100, warmup)
        np.testing.assert_allclose(rates(schedule, expected), [*expected.values()], atol=1e-6)
    # The last step of a run that is shorter than its warmup has the whole rate.
    for kind in ("cosine", "linear", "constant"):
        assert rates(make_schedule(kind, 1.0, 1, warmup=0.1), [0]) == [1]
        assert rates(make_schedule(kind, 1.0, 3, warmup=0.9), range(3)) == pytest.approx(
            [0.1, 0.55, 1]
        )


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_linear_schedule_of_transformers(warmup):
    """The rate of `get_linear_schedule_with_warmup` at each step."""
    steps = 10
    schedule = make_schedule("linear", 2.0, steps, warmup, first=0.0, lowest=0.0)
    count = math.ceil(warmup * steps)
    expected = [
        2 * (i / count if i < count else (steps - i) / (steps - count)) for i in range(steps)
    ]
    np.testing.assert_allclose(rates(schedule, range(steps)), expected, rtol=1e-6)
    constant = make_schedule("constant", 2.0, steps, warmup, first=0.5)
    assert rates(constant, [0, 9]) == [1 if warmup else 2, 2]


def test_options_of_the_optimizer():
    model = DecoderConfig.from_json({"model_type": "llama", "vocab_size": 8, **SIZES})
    config = FinetuneConfig(
        learning_rate=0.1, schedule="constant", warmup=0, weight_decay=0, steps=9, beta1=0.8,
        param_dtype="float32", beta2=0.9, epsilon=0.01,
    ).resolve()  # fmt: skip
    optimizer: Any = make_learner(config, model, make_mesh(None)).optimizer
    expected: Any = optax.adam(0.1, 0.8, 0.9, 0.01)
    params = {"a_proj.weight": np.ones((2, 3), "f4")}
    states = [tx.init(params) for tx in (optimizer, expected)]
    for scale in 1, -0.1:
        grads = jax.tree.map(lambda a, scale=scale: scale * a, params)
        ours, states[0] = optimizer.update(grads, states[0], params)
        theirs, states[1] = expected.update(grads, states[1], params)
        np.testing.assert_allclose(ours["a_proj.weight"], theirs["a_proj.weight"], rtol=1e-6)
