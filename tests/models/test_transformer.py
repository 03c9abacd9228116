import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effjax.models import TransformerBlock, TransformerLM, scan_layers
from effjax.models.nnx.transformer import rotary
from tests.tiers import exhaustive

SIZES: dict[str, Any] = dict(vocab_size=11, num_layers=2, width=8, num_heads=2)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))
KEY = jax.random.key(7)
remat_layers = functools.partial(scan_layers, remat=True)


def make(**options) -> TransformerLM:
    return TransformerLM(**SIZES | options, rngs=nnx.Rngs(0))


@functools.cache
def network(**options):
    """Return the graphdef of a model and random parameters, without compilation."""
    graphdef, shapes = split(nnx.eval_shape(lambda: make(**options)))
    rng = np.random.default_rng(0)

    def draw(path, a):
        scale = {"head": 0.02, "embed": 1.0}.get(path[0].key, 0.3)
        values = scale * rng.normal(size=a.shape).astype(a.dtype)
        return values + (path[-1].key == "scale")

    return graphdef, jax.tree_util.tree_map_with_path(draw, shapes)


def apply(**options):
    """Return the model as a compiled function of tokens and a key."""
    graphdef, params = network(**options)
    run = jax.jit(lambda params, tokens, key: nnx.merge(graphdef, params)(tokens, key=key))
    return lambda tokens, key=None: run(params, tokens, key)


def split(model):
    return nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))


def loss_and_gradients(apply_layers=scan_layers, key=None, **options):
    graphdef, params = network(**options)

    def loss(params):
        logits = nnx.merge(graphdef, params)(TOKENS, key=key, apply_layers=apply_layers)
        return jnp.mean(jnp.sin(logits))

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_close(got, want, tolerance=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), got, want)


def test_later_tokens_do_not_change_earlier_logits():
    model = apply()
    logits = model(TOKENS)
    for place in (0, 3, 5):
        changed = TOKENS.copy()
        changed[:, place] = (changed[:, place] + 1) % 11
        other = model(changed)
        np.testing.assert_array_equal(other[:, :place], logits[:, :place])
        assert np.all(np.any(other[:, place] != logits[:, place], axis=-1))
        assert np.all(np.any(other[:, -1] != logits[:, -1], axis=-1))


def test_rotary_products_depend_on_the_distance():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 5, 2, 6)).astype(np.float32)
    near, far = jnp.arange(5), jnp.arange(5) + 100

    def products(at):
        return jnp.einsum("nqhd,nkhd->nhqk", rotary(q, at), rotary(k, at))

    np.testing.assert_allclose(products(near), products(far), atol=1e-4)
    assert np.abs(products(near) - jnp.einsum("nqhd,nkhd->nhqk", q, k)).max() > 0.1
    np.testing.assert_array_equal(rotary(q, jnp.zeros(5, jnp.int32)), q)
    lengths = [np.linalg.norm(a, axis=-1) for a in (rotary(q, far), q)]
    np.testing.assert_allclose(*lengths, rtol=1e-6)


def block_in_numpy(p, x, num_heads):
    """Compute the block in float64, one head and one position at a time."""
    n, t, width = x.shape
    d = width // num_heads

    def norm(x, p):
        if "bias" not in p:
            return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0)

    def turn(v, place):  # pairs as complex numbers
        pairs = v[: d // 2] + 1j * v[d // 2 :]
        pairs = pairs * np.exp(1j * place * 10000.0 ** (-2 * np.arange(d // 2) / d))
        return np.concatenate([pairs.real, pairs.imag])

    qkv = linear(norm(x, p["norm1"]), p["qkv"])
    q, k, v = (part.reshape(n, t, num_heads, d) for part in np.split(qkv, 3, -1))
    attended = np.zeros((n, t, num_heads, d))
    for i, place, h in np.ndindex(n, t, num_heads):
        query = turn(q[i, place, h], place)
        scores = [query @ turn(k[i, s, h], s) / np.sqrt(d) for s in range(place + 1)]
        weights = np.exp(np.array(scores) - max(scores))
        attended[i, place, h] = weights / weights.sum() @ v[i, : place + 1, h]
    x = x + linear(attended.reshape(n, t, width), p["out"])
    h = linear(norm(x, p["norm2"]), p["up"])
    h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
    return x + linear(h, p["down"])


@pytest.mark.parametrize("use_bias", [exhaustive(False), True])
def test_block_matches_numpy(use_bias):
    block = TransformerBlock(12, 3, mlp_width=20, use_bias=use_bias, rngs=nnx.Rngs(0))
    graphdef, params = split(block)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype("f4"), params)
    assert ("bias" in params["qkv"]) is use_bias
    x = rng.normal(size=(2, 5, 12))
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    got = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, x.astype("f4"))
    np.testing.assert_allclose(got, block_in_numpy(wide, x, 3), rtol=2e-5, atol=2e-5)


def python_loop(layer, params, x, key):
    for i in range(SIZES["num_layers"]):
        one = jax.tree.map(lambda p, i=i: p[i], params)
        k = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), 0)
        x = layer(one, x, k)
    return x


def test_scan_and_remat_match_a_loop_over_layers():
    want = loss_and_gradients(python_loop, KEY, dropout_rate=0.3)
    for apply_layers in (scan_layers, remat_layers):
        assert_close(loss_and_gradients(apply_layers, KEY, dropout_rate=0.3), want)
    for leaf in jax.tree.leaves(want[1]["blocks"]):
        assert np.all(np.abs(leaf).max(tuple(range(1, leaf.ndim))) > 0)  # every layer learns


def test_remat_keeps_less():
    from effjax.memory import residual_bytes

    graphdef, params = network(num_layers=8)

    def kept(apply_layers):
        run = lambda p: nnx.merge(graphdef, p)(TOKENS, apply_layers=apply_layers).sum()  # noqa: E731
        return residual_bytes(run, params).bytes

    assert kept(remat_layers) < 0.3 * kept(scan_layers)


def test_dropout_is_a_function_of_the_key():
    model = apply(dropout_rate=0.3)
    dropped = model(TOKENS, KEY)
    np.testing.assert_array_equal(dropped, model(TOKENS, KEY))
    assert np.any(dropped != model(TOKENS, jax.random.key(8)))
    np.testing.assert_array_equal(model(TOKENS), apply()(TOKENS, KEY))


def test_dropout_keeps_the_expected_share():
    x = jax.random.normal(KEY, (4, 16, 64))

    def added(key):
        block = TransformerBlock(64, 2, dropout_rate=0.25, rngs=nnx.Rngs(0))
        block.down.kernel[...] = jnp.zeros_like(block.down.kernel[...])
        return block(x, key) - x

    full, dropped = jax.jit(lambda: (added(None), added(KEY)))()
    kept = np.abs(dropped) > 1e-6
    np.testing.assert_allclose(kept.mean(), 0.75, atol=0.03)
    np.testing.assert_allclose(dropped[kept], full[kept] / 0.75, atol=1e-5)


@pytest.mark.parametrize("use_bias", [False, True])
def test_parameters(use_bias):
    """The parameters of `blocks` are stacked on the first axis, and all are float32."""
    params = network(use_bias=use_bias, dtype=jnp.bfloat16)[1]
    assert set(params) == {"embed", "blocks", "norm", "head"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["blocks"])} == {2}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    w, v, layers = 8, 11, 2
    count = 2 * v * w + w + layers * (12 * w * w + 2 * w)
    if use_bias:
        count += v + w + layers * (3 * w + w + 4 * w + w + 2 * w)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_initial_values():
    abstract = nnx.eval_shape(lambda: make(width=64, vocab_size=99))
    keys = abstract.layer_keys(nnx.Rngs(0).params())

    @jax.jit
    def init():
        return split(make(width=64, vocab_size=99))[1], abstract.init_layer(keys[1])

    params, layer = init()
    blocks = params["blocks"]
    for name, fan_in, scale in (("qkv", 64, 1), ("up", 64, 1), ("down", 256, 4**-0.5)):
        std = blocks[name]["kernel"].std((1, 2))
        np.testing.assert_allclose(std, scale * fan_in**-0.5, rtol=0.05)
    kernel = blocks["qkv"]["kernel"]
    assert np.all(kernel[0] != kernel[1])
    np.testing.assert_allclose(params["embed"]["embedding"].std(), 1, rtol=0.05)
    np.testing.assert_allclose(params["head"]["kernel"].std(), 0.02, rtol=0.05)
    assert_close(layer, jax.tree.map(lambda p: p[1], blocks))
    deeper = nnx.eval_shape(lambda: make(num_layers=3)).layer_keys(nnx.Rngs(0).params())
    assert (deeper[:2] == keys).all()  # the first layers do not depend on the depth


def test_bfloat16_returns_float32_logits_and_gradients():
    graphdef, params = network(dtype=jnp.bfloat16)
    logits = apply(dtype=jnp.bfloat16)(TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, apply()(TOKENS), atol=0.02)
    jaxpr = str(jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(TOKENS))(params))
    assert "bf16[2,6,32]" in jaxpr  # inside the MLP
    loss = lambda p: nnx.merge(graphdef, p)(TOKENS).sum()  # noqa: E731
    grads = jax.eval_shape(jax.grad(loss), params)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize(
    ("use_bias", "dtype"), [(True, jnp.float32), exhaustive(False, jnp.bfloat16)]
)
def test_losses_match_the_logits(use_bias, dtype):
    graphdef, params = network(use_bias=use_bias, dtype=dtype)
    labels = (TOKENS + 1) % 11

    def whole(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS), labels)

    def sliced(model, chunk_size=4):
        return model.losses(model.features(TOKENS), labels, chunk_size=chunk_size)

    def run(losses):
        weighted = lambda params: jnp.sum(losses(nnx.merge(graphdef, params)) * TOKENS)  # noqa: E731
        return jax.jit(jax.value_and_grad(weighted))(params)

    assert_close(run(sliced), run(whole), 1e-4 if dtype == jnp.float32 else 0.5)
    jaxpr = str(jax.make_jaxpr(lambda params: sliced(nnx.merge(graphdef, params)))(params))
    assert "[2,6,4]" in jaxpr and "[2,6,11]" not in jaxpr


@pytest.mark.parametrize("dtype", [jnp.float32, exhaustive(jnp.bfloat16)])
def test_low_rank_matrices(dtype):
    """The product of the LoRA matrices adds to every kernel of the layers."""
    params = network(lora_rank=2, use_bias=True, dtype=dtype)[1]
    blocks, merged = {}, {}
    for name, module in params["blocks"].items():
        half = {kind: array for kind, array in module.items() if kind != "lora"}
        low = module.get("lora")
        if low is None:
            blocks[name] = merged[name] = half
            continue
        assert name in ("qkv", "out", "up", "down")
        a, b = low["lora_a"], 0.1 * low["lora_b"]
        assert a.shape[2] == b.shape[1] == 2
        blocks[name] = half | {"lora": {"lora_a": a, "lora_b": b}}
        merged[name] = half | {"kernel": half["kernel"] + a @ b}
    assert sum("lora" in half for half in blocks.values()) == 4
    got = nnx.merge(
        network(lora_rank=2, use_bias=True, dtype=dtype)[0], params | {"blocks": blocks}
    )
    want = nnx.merge(network(use_bias=True, dtype=dtype)[0], params | {"blocks": merged})
    logits = jax.jit(lambda model: model(TOKENS))
    assert_close(logits(got), logits(want), 1e-5 if dtype == jnp.float32 else 0.02)


def test_dtype_of_a_block():
    x = jnp.ones((1, 3, 8), jnp.bfloat16)
    for dtype, after in ((jnp.bfloat16, jnp.bfloat16), (None, jnp.float32)):
        y = jax.eval_shape(lambda d=dtype: TransformerBlock(8, 2, dtype=d, rngs=nnx.Rngs(0))(x))
        assert y.dtype == after


def test_tabulate():
    table = nnx.tabulate(make(), TOKENS, console_kwargs={"width": 200, "force_terminal": False})
    assert "blocks/qkv" in table and "float32[2,8,24]" in table


def test_rejects_bad_arguments():
    with pytest.raises(ValueError, match=r"2 · `num_heads` \(=3\) must divide `width` \(=8\)"):
        make(num_heads=3)
    with pytest.raises(ValueError, match=r"`dropout_rate` \(=1.0\) must be in \[0, 1\)"):
        make(dropout_rate=1.0)
    model = nnx.eval_shape(make)
    with pytest.raises(TypeError, match="`tokens` must be integer"):
        model(np.zeros((2, 3)))
    with pytest.raises(TypeError, match="^`key`"):
        model(TOKENS, key=jax.random.split(KEY, 2))
