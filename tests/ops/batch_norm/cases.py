"""Inputs of the batch norm tests."""

import numpy as np

from tests.contexts import DEVICES

C = 5


def make_batch(seed=0, shape=(32, 3, 3, C)):
    rng = np.random.default_rng(seed)
    mask = rng.random((shape[0], shape[1], 1, 1)) < 0.6
    mask[: shape[0] // DEVICES] = False  # the first device has nothing to count
    return {
        "x": rng.normal(3, 2, shape),
        "w": rng.normal(size=shape),
        "mask": mask,
        "residual": rng.normal(size=shape),
    }


PARAMS = {"scale": np.linspace(0.5, 1.5, C), "bias": np.linspace(-1, 1, C)}
