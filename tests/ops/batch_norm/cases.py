"""Inputs of the batch norm tests, and the results that they compare."""

import jax
import jax.numpy as jnp
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


def results(norm, x, params=(), w=1.0, **arrays):
    """Return the gradients of the sum of y * w by x and params, and ``(y, statistics)``."""

    @jax.jit
    def run(x, params, w, arrays):
        def loss(x, params):
            y, statistics = norm(x, *params, **arrays)
            return jnp.sum(y.astype(jnp.promote_types(y.dtype, jnp.float32)) * w), (y, statistics)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)

    return run(x, params, w, arrays)
