"""Learning rates of runs; `text/test_learner.py` and `images/test_steps.py` train with them."""

from typing import Any

import numpy as np
import pytest

from effjax.train.optimizers import make_schedule


def rates(schedule: Any, steps):
    return [float(schedule(step)) for step in steps]


def test_schedules():
    cosine = make_schedule("cosine", 1.0, 100)
    np.testing.assert_allclose(rates(cosine, (0, 50, 100)), [1, 0.5, 0], atol=1e-6)
    step = make_schedule("step", 1.0, 100)
    np.testing.assert_allclose(rates(step, (0, 50, 51, 76)), [1, 0.1, 0.1, 0.01], rtol=1e-6)


def test_warmup():
    schedule = make_schedule("cosine", 1.0, 100, warmup=0.1)
    np.testing.assert_allclose(rates(schedule, (0, 10, 100)), [0.1, 1, 0.1], atol=1e-6)
    assert rates(make_schedule("cosine", 1.0, 100, warmup=0.5), [50]) == pytest.approx([1])
    assert np.isfinite(rates(make_schedule("cosine", 1.0, 1, warmup=0.1), [0])).all()
