import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.transformer import TransformerLM


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block_in_numpy(p, x, num_heads):
    """Compute the block in float64."""
    n, t, width = x.shape
    d = width // num_heads

    def turn(v):  # pairs as complex numbers
        angles = np.arange(t)[:, None, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
        pairs = (v[..., : d // 2] + 1j * v[..., d // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)

    qkv = norm(x, p["norm1"]["scale"]) @ p["qkv"]["kernel"]
    q, k, v = (part.reshape(n, t, num_heads, d) for part in np.split(qkv, 3, -1))
    scores = np.einsum("nqhd,nkhd->nhqk", turn(q), turn(k)) / np.sqrt(d)
    weights = np.exp(scores) * np.tri(t)
    attended = np.einsum("nhqk,nkhd->nqhd", weights / weights.sum(-1, keepdims=True), v)
    x = x + attended.reshape(n, t, width) @ p["out"]["kernel"]
    h = norm(x, p["norm2"]["scale"]) @ p["up"]["kernel"]
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
    logits = norm(x, wide["norm"]["scale"]) @ wide["head"]["kernel"]
    got = jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(tokens)))(params)
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-4)
