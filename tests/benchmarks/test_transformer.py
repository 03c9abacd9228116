import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.transformer import TransformerLM


def block_in_numpy(p, x, num_heads):
    """Compute the block in float64, one head and one position at a time."""
    n, t, width = x.shape
    d = width // num_heads

    def norm(x, p):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]

    def turn(v, place):  # pairs as complex numbers
        pairs = v[: d // 2] + 1j * v[d // 2 :]
        pairs = pairs * np.exp(1j * place * 10000.0 ** (-2 * np.arange(d // 2) / d))
        return np.concatenate([pairs.real, pairs.imag])

    qkv = norm(x, p["norm1"]) @ p["qkv"]["kernel"]
    q, k, v = (part.reshape(n, t, num_heads, d) for part in np.split(qkv, 3, -1))
    attended = np.zeros((n, t, num_heads, d))
    for i, place, h in np.ndindex(n, t, num_heads):
        query = turn(q[i, place, h], place)
        scores = [query @ turn(k[i, s, h], s) / np.sqrt(d) for s in range(place + 1)]
        weights = np.exp(np.array(scores) - max(scores))
        attended[i, place, h] = weights / weights.sum() @ v[i, : place + 1, h]
    x = x + attended.reshape(n, t, width) @ p["out"]["kernel"]
    h = norm(x, p["norm2"]) @ p["up"]["kernel"]
    h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
    return x + h @ p["down"]["kernel"]


@pytest.mark.exhaustive
def test_matches_numpy():
    model = TransformerLM(
        vocab_size=11, num_layers=2, width=12, num_heads=3, mlp_width=20, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype("f4"), params)
    tokens = rng.integers(0, 11, (2, 5))
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x = wide["embed"]["embedding"][tokens]
    for i in range(2):
        x = block_in_numpy(jax.tree.map(lambda p, i=i: p[i], wide["blocks"]), x, 3)
    normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * wide["norm"]["scale"]
    logits = normed @ wide["head"]["kernel"]
    got = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(tokens)))(params)
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-4)
