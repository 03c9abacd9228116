"""Generation: tokens of the whole forward pass, sampling, stop tokens, padding and host memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import effjax
from effjax.models import decoder_functions, decoder_logits, decoder_shapes, generate
from effjax.models.generate import attend_to_cache, check_options, sample
from tests.convert import decoders
from tests.convert.decoders import CONFIGS, config_of, make_params
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

TOKENS = np.random.default_rng(1).integers(0, 37, (3, 7))
LENGTHS = np.array([7, 1, 5])
NEW = 8


@functools.partial(jax.jit, static_argnums=0)
def whole_logits(config, layers, others, tokens, positions=None):
    """Return the logits of all positions, without a cache."""
    embed, layer, _ = decoder_functions(config)
    x = embed(others, {"tokens": tokens, "positions": positions})
    x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, layers)
    return decoder_logits(config, others, x["hidden"])


def whole_sequences(tokens, lengths, new):
    """Return prompts followed by new tokens, padded at the end."""
    rows = np.zeros((len(tokens), tokens.shape[1] + new.shape[1]), int)
    for row, prompt, length, more in zip(rows, tokens, lengths, np.asarray(new), strict=True):
        row[: length + len(more)] = [*prompt[:length], *more]
    return rows


@vary("name", ["gemma2", *(name for name in CONFIGS if name != "gemma2")])
def test_greedy_tokens_are_those_of_the_whole_forward_pass(name, x64):
    """Each token has the largest logit given the tokens before it; prompts differ in length."""
    config = config_of(name, dtype="float64")
    params = make_params(config)
    options = dict(lengths=LENGTHS, max_new_tokens=NEW)
    tokens, lengths = generate(config, *params, TOKENS, **options)
    assert (lengths == NEW).all() and tokens.shape == (3, NEW)
    logits = whole_logits(config, *params, whole_sequences(TOKENS, LENGTHS, tokens))
    for row, length, new in zip(logits, LENGTHS, tokens, strict=True):
        np.testing.assert_array_equal(row[length - 1 :][:NEW].argmax(-1), new)
    assert len(np.unique(tokens)) > 3


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 0.5)])
def test_attention_over_the_cache(window, softcap, x64):
    """A query attends to the slots up to its position, or to the last ones of a window."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, t, heads, 6)) for t, heads in ((2, 4), (9, 2), (9, 2)))
    positions = np.array([[4, 5], [0, 8]])
    arrays = map(jnp.asarray, (q, k, v, positions))
    got = attend_to_cache(*arrays, window=window, scale=6**-0.5, softcap=softcap)
    for n, t, head in np.ndindex(2, 2, 4):
        last = positions[n, t] + 1
        slots = slice(0 if window is None else max(last - window, 0), last)
        scores = k[n, slots, head // 2] @ q[n, t, head] / np.sqrt(6)
        weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
        want = weights @ v[n, slots, head // 2] / weights.sum()
        np.testing.assert_allclose(got[n, t, head], want, 1e-12)


# Sampling

LOGITS = np.log([0.05, 0.4, 0.03, 0.22, 0.3])


def distribution(temperature, top_k, top_p):
    """Return the probabilities of the tokens, computed token by token."""
    p = np.exp(LOGITS / temperature)
    order = np.argsort(-p)[:top_k]
    p /= p[order].sum()
    kept, total = [], 0
    for token in order:
        if top_p is None or total < top_p:
            kept.append(token)
        total += p[token]
    return np.array([p[i] / p[kept].sum() if i in kept else 0 for i in range(len(p))])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "support"),
    [
        (2.5, None, None, {0, 1, 2, 3, 4}),
        (1, 2, None, {1, 4}),
        (1, 100, None, {0, 1, 2, 3, 4}),
        (1, None, 0.69, {1, 4}),  # 0.4 + 0.3
        (1, None, 0.71, {1, 4, 3}),
        (0.5, 3, 0.55, {1, 4}),  # of 0.54, 0.30, 0.16
        (1, None, 1e-9, {1}),
    ],
)
def test_distribution_of_samples(temperature, top_k, top_p, support):
    count = 20_000
    options = check_options(
        config_of("llama2"), max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p
    )
    keys = jax.random.split(jax.random.key(0), count)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (count, len(LOGITS)))
    seen = np.bincount(sample(options, logits, keys), minlength=len(LOGITS))
    want = distribution(temperature, top_k, top_p)
    assert {*np.flatnonzero(seen)} == {*np.flatnonzero(want)} == support
    expected = count * want[want > 0]
    chi_square = ((seen[want > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 20  # of at most 4 degrees of freedom: exceeded once in 2000 keys


@pytest.mark.parametrize("temperature", [1e-36, 1e-39, 5e-324])
def test_tiny_temperature_is_greedy(temperature):
    """Divided by them, the logits would be infinite, or NaN."""
    options = check_options(config_of("llama2"), max_new_tokens=1, temperature=temperature)
    keys = jax.random.split(jax.random.key(0), 8)
    logits = jnp.broadcast_to(40 + jnp.float32(LOGITS), (8, len(LOGITS)))
    assert (sample(options, logits, keys) == 1).all()


def test_keys():
    """A row depends on its prompt, the key and its number, not on the other rows."""
    config = config_of("llama3")
    layers, others = make_params(config)
    params = layers, {name: 0.3 * a for name, a in others.items()}  # all tokens are likely
    generate_all = functools.partial(generate, config, *params, max_new_tokens=NEW, temperature=1.0)

    def run(tokens, lengths, seed):
        return generate_all(tokens, lengths=lengths, key=jax.random.key(seed)).tokens

    tokens = run(TOKENS, LENGTHS, 0)
    np.testing.assert_array_equal(run(TOKENS, LENGTHS, 0), tokens)
    assert (run(TOKENS, LENGTHS, 1) != tokens).sum() > NEW
    others = np.concatenate([TOKENS[:1], TOKENS[1:] + 1])
    changed = run(others % 37, np.array([7, 2, 7]), 0)
    np.testing.assert_array_equal(changed[0], tokens[0])
    same_prompt = run(TOKENS[[0, 0, 0]], np.array([7, 7, 7]), 0)
    assert (same_prompt[0] != same_prompt[1]).any()


@vary("name", ["gemma3", "mistral"])
def test_stop_tokens_end_rows(name):
    """Of layers in host memory and of the same layers on the device."""
    config = config_of(name)
    layers, others = make_params(config)
    run = functools.partial(generate, config, max_new_tokens=NEW, lengths=LENGTHS)
    want = np.array(jax.jit(run)(layers, others, TOKENS).tokens)
    stops = int(want[0, 2]), int(want[1, 0])
    lengths = []
    for row in want:
        hits = np.flatnonzero(np.isin(row, stops))
        lengths.append(hits[0] + 1 if len(hits) else NEW)
        row[lengths[-1] :] = 0
    assert lengths[1] == 1 and lengths[0] <= 3
    tokens, got = run(effjax.to_host(layers), others, TOKENS, stop_tokens=stops)
    np.testing.assert_array_equal(got, lengths)
    np.testing.assert_array_equal(tokens, want)


@vary("place", ["device", "host"])
def test_rows_have_the_factors_of_their_own_length(place, x64):
    """Each token is that of a whole pass over its row so far, whatever the other rows are."""
    scaling = dataclasses.replace(
        config_of("phi4_mini").rope_scaling, original_max_position_embeddings=10
    )
    config = config_of("phi4_mini", dtype="float64", rope_scaling=scaling)
    layers, others = make_params(config)
    run = functools.partial(
        generate, config, effjax.to_host(layers) if place == "host" else layers, others
    )
    # Rows that grow from 10 to 11 tokens at the second new one, at another one, and never.
    prompts = np.random.default_rng(4).integers(0, 37, (5, 12))
    lengths = np.array([12, 10, 7, 1, 11])
    tokens, _ = run(prompts, lengths=lengths, max_new_tokens=NEW)
    rows = whole_sequences(prompts, lengths, tokens)
    numbers = np.arange(NEW) + lengths[:, None]  # of the tokens before each new one
    is_before = np.arange(rows.shape[1]) < numbers.reshape(-1, 1)
    prefixes = np.where(is_before, np.repeat(rows, NEW, 0), 0)
    positions = np.where(is_before, np.arange(rows.shape[1]), 0)
    logits = whole_logits(config, layers, others, prefixes, positions)
    logits = logits[np.arange(len(logits)), numbers.ravel() - 1]
    np.testing.assert_array_equal(logits.argmax(-1), np.ravel(tokens))
    alone, _ = run(prompts[2:3, :7], max_new_tokens=5)
    np.testing.assert_array_equal(alone[0], tokens[2, :5])
    stop = int(tokens[2, 1])  # a row that has ended does not change its caches
    assert stop not in tokens[2, :1]
    stopped, ends = run(prompts[2:3, :7], max_new_tokens=NEW, stop_tokens=[stop])
    assert ends == 2 and (stopped[0, :2] == tokens[2, :2]).all()


@vary(
    ("family", "names"),
    [
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj")),
        ("llama3", ("self_attn.q_proj", "mlp.down_proj")),
    ],
)
def test_adapters(family, names, x64):
    """A LoRA adapter generates the tokens of the weights ``W + scale * B A``."""
    config = config_of(family, dtype="float64")
    layers, others = make_params(config)
    run = functools.partial(generate, config, others=others, tokens=TOKENS, max_new_tokens=NEW)
    adapters, merged = {}, dict(layers)
    for name in names:
        weight = layers[f"{name}.weight"]
        a = decoders.random_array(f"{name}.A", (2, 3, weight.shape[2]))
        b = decoders.random_array(f"{name}.B", (2, weight.shape[1], 3))
        adapters |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        merged[f"{name}.weight"] = weight + 0.5 * b @ a
    want = run(layers=merged).tokens
    got = run(layers={**layers, **jax.tree.map(jnp.asarray, adapters)}, lora_scale=0.5).tokens
    np.testing.assert_array_equal(got, want)
    assert (want != run(layers=layers).tokens).any()


@needs_gpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["device", "host"])
def test_memory_on_a_gpu(place):
    """Caches are updated in place, and of layers in host memory few are on the device."""
    config = config_of(
        "qwen3", num_hidden_layers=32, hidden_size=512, intermediate_size=1024, head_dim=64
    )
    layers, others = decoder_shapes(config)
    if place == "host":
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        layers = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for name, a in layers.items()
        }
    run = effjax.offload_jit(functools.partial(generate, config, max_new_tokens=512), donate=False)
    tokens = jax.ShapeDtypeStruct((2, 512), "int32")
    plan = effjax.memory.plan(run, layers, others, tokens, target="h100")
    size = sum(a.size * a.dtype.itemsize for a in layers.values())
    caches = 2 * 32 * 2 * 1024 * 2 * 64 * 4
    assert plan.device.temporaries < caches + 4 * size / 32 + 20e6
    assert (plan.peak_host_bytes >= size) == (place == "host")


@pytest.mark.parametrize(
    "options",
    [
        dict(max_new_tokens=0), dict(temperature=-1), dict(top_k=0), dict(top_p=0),
        dict(stop_tokens=[-1]), dict(lengths=LENGTHS[:2]), dict(tokens=TOKENS[0]),
        dict(tokens=TOKENS[:, :0]), dict(dtype="int32"), dict(key=None, temperature=0.5),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(options):
    arguments = dict(tokens=TOKENS, max_new_tokens=NEW) | options
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        generate(config_of("llama2"), {}, {}, **arguments)
