"""`scan_layers` against a Python loop over the layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from effjax.memory import residual_bytes
from effjax.models.scan import scan_layers
from tests.tiers import vary

KEY = jax.random.key(7)
RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.normal(size=(3, 4, 6)).astype(np.float32),
    "down": RNG.normal(size=(3, 6, 4)).astype(np.float32),
}
X = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), "calls": 0}


def layer(params, state, key):
    y = jnp.tanh(state["x"] @ params["up"])
    if key is not None:
        y = jnp.where(jax.random.bernoulli(key, 0.7, y.shape), y, 0)
    return {"x": state["x"] + y @ params["down"], "calls": state["calls"] + 1}


def python_loop(layer, params, x, key):
    for i in range(3):
        k = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), 0)
        x = layer(jax.tree.map(lambda p, i=i: p[i], params), x, k)
    return x


@vary("key", [KEY, None])
def test_matches_a_loop_over_layers(key):
    def run(apply_layers):
        def loss(params):
            out = apply_layers(layer, params, X, key)
            return jnp.sum(jnp.sin(out["x"])), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS)

    want = run(python_loop)
    for apply_layers in (scan_layers, functools.partial(scan_layers, remat=True)):
        got = run(apply_layers)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
        assert got[0][1]["calls"] == 3


def test_remat_keeps_only_inputs():
    def kept(remat):
        def run(params):
            return scan_layers(layer, params, X, None, remat=remat)["x"].sum()

        return residual_bytes(run, PARAMS).bytes

    hidden = 3 * 2 * 6 * 4  # bytes of the results of tanh
    assert kept(False) - kept(True) >= hidden
