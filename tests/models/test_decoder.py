"""Decoders: Hugging Face's results, packing, chunks, offload and configurations."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax
from effjax.models import (
    Decoder,
    DecoderConfig,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
    decoder,
    decoder_functions,
    decoder_shapes,
    init_decoder,
)
from tests.contexts import assert_trees_close, mesh_of
from tests.convert import decoders
from tests.convert.decoders import (
    CONFIGS,
    INPUTS,
    LABELS,
    WRONG_NUMBERS,
    config_of,
    make_decoder,
    mean_loss,
)
from tests.tiers import vary

LENGTHS = 5, 1, 9, 4  # of the documents of a packed sequence; the last is padding


def packed():
    """Return a batch of two packed sequences, and what tells their documents apart."""
    rng = np.random.default_rng(3)
    lengths = [[*rng.permutation(LENGTHS[:-1]), LENGTHS[-1]] for _ in range(2)]
    tokens, labels = rng.integers(0, 37, (2, 2, sum(LENGTHS)))
    named = {
        "positions": np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths]),
        "segment_ids": np.array([np.repeat(np.arange(4), row) for row in lengths]),
    }
    weights = (named["segment_ids"] < 3) * rng.choice([0, 0.5, 1], tokens.shape)
    labels[weights == 0] = -100  # not a token
    batch = {"tokens": tokens, "labels": labels, "weights": weights}
    named = {name: jnp.asarray(a) for name, a in named.items()}
    return {name: jnp.asarray(a) for name, a in batch.items()} | named, named


def packed_config(name):
    """Return a configuration of which some documents have long factors, if it has such."""
    config = config_of(name, dtype="float64")
    if not isinstance(config.rope_scaling, LongRopeScaling):
        return config
    scaling = dataclasses.replace(config.rope_scaling, original_max_position_embeddings=5)
    return dataclasses.replace(config, rope_scaling=scaling)


# Their settings are those of other families: all heads, biases, a window, fused projections.
SIMILAR = "llama2", "llama_biases", "phi3"


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SIMILAR])
def test_matches_recorded_results_of_transformers(name):
    decoders.check(config_of(name), decoders.load_results(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIMILAR)
def test_similar_families_match_transformers(name):
    decoders.check(config_of(name), decoders.load_results(name))


@vary("name", ["gemma3", "llama3", "mistral", "qwen3", "smollm3"])
def test_packed_documents_are_independent(name, x64):
    decoder, (batch, named) = make_decoder(config_of(name, dtype="float64")), packed()
    run = nnx.jit(lambda decoder, tokens, **named: decoder(tokens, **named))
    together = run(decoder, batch["tokens"], **named)
    (at,) = np.nonzero(batch["segment_ids"][1] == 1)  # between others
    assert len(at) >= 5
    alone = run(decoder, batch["tokens"][1:, at])
    np.testing.assert_allclose(together[1, at], alone[0], rtol=0, atol=1e-12)


@nnx.jit
def logits_and_loss(decoder, batch):
    named = {name: batch[name] for name in ("positions", "segment_ids") if name in batch}
    return decoder(batch["tokens"], **named), decoder.loss(batch)[0]


def test_documents_have_the_factors_of_their_own_length(x64):
    """Packed or padded; logits and losses are those of each document with its factors only."""
    config, (batch, _) = packed_config("phi4_mini"), packed()
    scaling = config.rope_scaling
    both = make_decoder(config)
    row = {name: a[1:] for name, a in batch.items()}
    together, loss = logits_and_loss(both, row)
    total = 0
    for segment in range(3):  # of 5, 1 and 9 tokens
        (at,) = np.nonzero(row["segment_ids"][0] == segment)
        factors = scaling.long_factor if len(at) > 5 else scaling.short_factor
        fixed = dataclasses.replace(scaling, short_factor=factors, long_factor=factors)
        # The length of the row does not matter, only that of the document.
        padded = {n: jnp.zeros_like(a).at[:, : len(at)].set(a[:, at]) for n, a in row.items()}
        del padded["segment_ids"]
        for other in (both, make_decoder(dataclasses.replace(config, rope_scaling=fixed))):
            alone, one = logits_and_loss(other, padded)
            np.testing.assert_allclose(together[0, at], alone[0, : len(at)], rtol=0, atol=1e-12)
        total += one
    np.testing.assert_allclose(loss, total, rtol=1e-12)


def test_lengths_of_segments():
    """Their ids are any integers, in any order."""
    positions = jnp.array([[0, 1, 2, 0, 1, 7], [3, 0, 0, 0, 1, 2]])
    ids = jnp.array([[9, 9, -3, 5, 5, 9], [0, 1, 1, 0, 0, 2]])
    want = [[8, 8, 3, 2, 2, 8], [4, 1, 1, 4, 4, 3]]
    np.testing.assert_array_equal(decoder._segment_lengths(positions, ids), want)


def test_lengths_of_segments_need_no_large_array():
    """Pairs of tokens are not compared."""
    ids = jax.ShapeDtypeStruct((1, 4096), "int32")
    compiled = jax.jit(decoder._segment_lengths).lower(ids, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096**2 / 16


def test_loss_is_that_of_the_logits(x64):
    """Labels that are not tokens make it NaN, unless their weight is 0."""
    decoder, (batch, named) = make_decoder(config_of("qwen2", dtype="float64")), packed()

    @nnx.jit
    def run(decoder, weights):
        logits = decoder(batch["tokens"], **named)
        return logits, *decoder.loss({**batch, "weights": weights})

    logits, loss, weight = run(decoder, batch["weights"])
    labels = jnp.maximum(batch["labels"], 0)
    want = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * batch["weights"]
    np.testing.assert_allclose(loss, want.sum(), rtol=1e-12)
    assert weight == batch["weights"].sum()
    assert jnp.isnan(run(decoder, jnp.ones_like(batch["weights"]))[1])
    counted = {**batch, "weights": batch["weights"] > 0}  # booleans count tokens
    assert nnx.jit(lambda decoder: decoder.loss(counted)[1])(decoder) == counted["weights"].sum()


@vary("size", [6, 19, 100])
def test_chunks_of_the_mlp(size, x64):
    """The hidden channels of all positions never exist; sizes need not divide the length."""
    config, (batch, _) = config_of("llama_biases", dtype="float64"), packed()
    gradients = nnx.jit(nnx.value_and_grad(mean_loss))
    want = gradients(make_decoder(config), batch)
    chunked = make_decoder(config, mlp_chunk_size=size)
    got = gradients(chunked, batch)
    assert_trees_close(got, want, 1e-12)
    arrays = nnx.split(chunked)
    program = jax.make_jaxpr(lambda s: nnx.grad(mean_loss)(nnx.merge(arrays[0], s), batch))
    assert ("f64[2,19,24]" in str(program(arrays[1]))) == (size >= 19)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def dropped(rate, key, shape, name="mlp.down_proj"):
    """Return what the adapter of a linear layer gets of an array of ones."""
    ones, eye = jnp.ones(shape), jnp.eye(shape[-1])
    params = {f"{name}.{end}": eye for end in ("lora_A.weight", "lora_B.weight")}
    params |= {f"{name}.weight": jnp.zeros_like(eye)}
    return decoder._linear(params, decoder.LinearOptions(1.0, rate), name, ones, key)


def test_dropout_of_adapters(x64):
    """As torch.nn.Dropout on the input of A, with other numbers in each layer and for each key."""
    keys, rate, shape = jax.random.split(jax.random.key(0)), 0.25, (2, 40, 50)
    mask = dropped(rate, keys[0], shape)
    np.testing.assert_allclose(np.unique(mask), [0, 1 / (1 - rate)])
    assert abs(float((mask == 0).mean()) - rate) < 0.03
    others = dropped(rate, keys[1], shape), dropped(rate, keys[0], shape, "mlp.up_proj")
    for other in others:
        kept = float((mask != 0)[other != 0].mean())
        assert abs(kept - (1 - rate)) < 0.03  # independent
    np.testing.assert_array_equal(dropped(rate, None, shape), np.ones(shape))


@vary(("activation", "rate"), [("silu", 0.5), ("silu", 0.0), ("gelu_pytorch_tanh", 0.5)])
def test_gradient_of_the_mlp(x64, activation, rate):
    """It equals that of the formula, of all parameters of the last layer."""
    key = jax.random.key(1)
    mask = dropped(rate, key, (2, 3, 6))
    rng = np.random.default_rng(0)
    sizes = (4, 6), (4,), (2, 6), (4, 2), (2, 3, 6), (2, 3, 6), (2, 3, 4)
    *arrays, dy = (jnp.asarray(rng.normal(size=size)) for size in sizes)
    names = "weight", "bias", "lora_A.weight", "lora_B.weight"

    def apply(*arrays):
        *params, gate, up = arrays
        params = {f"mlp.down_proj.{name}": a for name, a in zip(names, params, strict=True)}
        return decoder._apply_gated(
            decoder.LinearOptions(0.5, rate), activation, params, gate, up, key
        )

    def formula(weight, bias, a, b, gate, up):
        f = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}[activation]
        h = f(gate) * up
        return h @ weight.T + bias + 0.5 * (mask * h) @ a.T @ b.T

    @jax.jit
    def gradients(*arrays):
        return [jax.vjp(f, *arrays)[1](dy) for f in (apply, formula)]

    assert_trees_close(*gradients(*arrays), 1e-12)


def test_8_bit_products():
    """Those of the seven matrices of a layer, forward and backward, and no others."""
    config = config_of("qwen3", dtype="float32")
    layers, others = decoder_shapes(config)
    layer = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in layers.items()}
    for name in [name for name in layer if name.endswith("proj.weight")]:
        outputs, inputs = layer[name].shape
        lora = name.removesuffix("weight") + "lora_"
        layer[f"{lora}A.weight"] = jax.ShapeDtypeStruct((2, inputs), "float32")
        layer[f"{lora}B.weight"] = jax.ShapeDtypeStruct((outputs, 2), "float32")
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    batch = {"tokens": tokens, "labels": tokens}

    def loss(params, batch, matmul):
        functions = decoder_functions(config, matmul=matmul)
        x = functions.layer(params[0], functions.embed(params[1], batch))
        return functions.head(params[1], x, batch)[0]

    def count(matmul):
        step = jax.jit(jax.grad(loss), static_argnums=2).lower((layer, others), batch, matmul)
        products = re.findall(r"dot_general .*: \((\S+), (\S+)\)", step.as_text())
        return sum("f8" in a and "f8" in b for a, b in products)

    assert (count(None), count("fp8")) == (0, 7 * 3)
    with pytest.raises(ValueError, match='`matmul` .*must be None or "fp8"'):
        decoder_functions(config, matmul="int8")
    layer["mlp.up_proj.weight.codes"] = layer["mlp.up_proj.weight"]
    with pytest.raises(ValueError, match="`matmul` .*must be None for quantized weights"):
        count("fp8")


def test_gradient_of_the_mlp_in_8_bits():
    rng = np.random.default_rng(0)
    sizes = (4, 6), (2, 3, 6), (2, 3, 6), (2, 3, 4)
    *arrays, dy = (jnp.asarray(rng.normal(size=size), "float32") for size in sizes)
    lora = decoder.LinearOptions(matmul="fp8")

    def apply(weight, gate, up):
        params = {"mlp.down_proj.weight": weight}
        return decoder._apply_gated(lora, "silu", params, gate, up)

    def formula(weight, gate, up):
        return effjax.fp8_linear(jax.nn.silu(gate) * up, weight, transposed=True)

    got, want = (jax.vjp(f, *arrays)[1](dy) for f in (apply, formula))
    assert_trees_close(got, want, 1e-6)


def test_narrow_embeddings_sum_their_gradient_in_float32():
    rng = np.random.default_rng(0)
    tokens, dy = jnp.asarray(rng.integers(0, 3, (1, 300))), jnp.ones((1, 300, 4), "bfloat16")
    weight = jnp.zeros((7, 4), "bfloat16")
    (dweight,) = jax.jit(jax.vjp(lambda weight: decoder._take_rows(weight, tokens), weight)[1])(dy)
    counts = np.bincount(tokens[0], minlength=7)
    assert counts.max() > 2**8 / 3  # a sum in bfloat16 would round
    np.testing.assert_array_equal(dweight[:, 0], jnp.asarray(counts, "bfloat16"))


def test_no_large_arrays():
    """No scores of all positions and no logits exist in a loss."""
    config = config_of("qwen3", vocab_size=5000)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(decoder)
    tokens = jax.ShapeDtypeStruct((2, 2048), "int32")

    def gradients(state, tokens):
        batch = {"tokens": tokens, "labels": tokens}
        return nnx.grad(mean_loss)(nnx.merge(graph, state), batch)

    program = str(jax.make_jaxpr(gradients)(state, tokens))
    assert "2048,2048" not in program and "2048,5000" not in program


def test_dtypes():
    """Parameters and computation have separate dtypes; logits and losses are float32."""
    config = config_of("llama3")
    decoder = make_decoder(config, dtype="bfloat16")
    run = nnx.jit(lambda decoder: decoder(INPUTS))
    got = run(decoder)
    loss = nnx.eval_shape(lambda d: d.loss({"tokens": INPUTS, "labels": LABELS})[0], decoder)
    assert got.dtype == loss.dtype == jnp.float32
    assert_trees_close(got, run(make_decoder(config)), 0.05)
    program = str(jax.make_jaxpr(lambda tokens: decoder(tokens))(jnp.asarray(INPUTS)))
    dots = [line for line in program.splitlines() if "dot_general" in line]
    assert dots and not any("preferred_element_type=float32] f" in line for line in dots)
    half = dataclasses.replace(config, dtype="bfloat16")
    state = nnx.state(nnx.eval_shape(lambda: Decoder(half, rngs=nnx.Rngs(0))))
    assert {str(a.dtype) for a in jax.tree.leaves(state)} == {"bfloat16"}


@pytest.mark.parametrize(("initializer_range", "std"), [(0.1, 0.1), (None, 0.02)])
def test_initial_parameters(initializer_range, std):
    settings = dict(num_hidden_layers=64, initializer_range=initializer_range)
    config = DecoderConfig.from_json(CONFIGS["llama_biases"] | settings)
    layers, others = jax.jit(init_decoder, static_argnums=0)(config, jax.random.key(0))
    for tree, shapes in zip((layers, others), decoder_shapes(config), strict=True):
        assert jax.tree.map(jax.typeof, tree) == jax.tree.map(
            lambda s: jax.typeof(jnp.zeros(s.shape, s.dtype)), shapes
        )
    assert (layers["input_layernorm.weight"] == 1).all() and not layers["mlp.up_proj.bias"].any()
    weight = layers["mlp.up_proj.weight"]
    np.testing.assert_allclose([weight.mean(), weight.std()], [0, std], atol=std / 50)
    assert not (weight[0] == weight[1]).any()
    assert not (layers["mlp.gate_proj.weight"] == weight).any()


@vary(
    ("name", "options"),
    [
        ("gemma2", {"num_microbatches": 2}),
        ("phi4_mini", {"num_microbatches": 2}),
        ("qwen2", {"num_microbatches": 2}),
        ("llama3", {}),
        ("phi3", {}),
        ("mistral", {"params_in": "device"}),
    ],
)
def test_offload_train_step_is_the_step_of_the_module(name, options, x64):
    """Two steps with packed documents and weighted tokens."""
    config = packed_config(name)
    decoder, (batch, _), tx = make_decoder(config), packed(), optax.sgd(0.5, momentum=0.9)
    init, step = effjax.offload_train_step(
        *decoder_functions(config), tx, weighted_loss=True, **options
    )
    params = [{n: p[...] for n, p in d.items()} for d in (decoder.layers, decoder.others)]
    layers = params[0] if "params_in" in options else effjax.to_host(params[0])
    state = init(layers, params[1])
    step = effjax.offload_jit(step)

    @nnx.jit
    def plain_step(decoder, optimizer, batch):
        loss, gradients = nnx.value_and_grad(mean_loss)(decoder, batch)
        optimizer.update(decoder, gradients)
        return loss

    optimizer = nnx.Optimizer(decoder, tx, wrt=nnx.Param)
    for _ in range(2):
        want = plain_step(decoder, optimizer, batch)
        state, loss, *_ = step(state, batch)
        np.testing.assert_allclose(loss, want, rtol=1e-12)
    for ours, theirs in ((state.layers, decoder.layers), (state.others, decoder.others)):
        assert_trees_close(ours, {n: p[...] for n, p in theirs.items()}, 1e-11)


def test_layers_can_be_applied_by_offload_scan(x64):
    config = config_of("llama3", dtype="float64")
    decoder = make_decoder(config)

    def offload(layer, params, x, key):
        options = dict(params_in="device", activations_in="host")
        return effjax.offload_scan(layer, params, x, key=key, **options)

    want = nnx.jit(lambda decoder: decoder(INPUTS))(decoder)
    got = nnx.jit(lambda decoder: decoder(INPUTS, apply_layers=offload))(decoder)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma3", AxisType.Explicit),
        ("phi4_mini", AxisType.Explicit),
        ("phi4_mini", AxisType.Auto),
        ("qwen3", AxisType.Auto),
    ],
)
def test_data_parallel_gradients(name, kind, x64):
    """A batch that is sharded over devices has the same loss and gradients."""
    config = packed_config(name)
    embed, layer, head = decoder_functions(config, mlp_chunk_size=4)
    batch = jax.tree.map(lambda a: jnp.tile(a, (4, 1)), packed()[0])

    def mean(params, batch):
        layers, others = params
        x, _ = lax.scan(lambda x, p: (layer(p, x), None), embed(others, batch), layers)
        loss, weight = head(others, x, batch)
        return loss / weight

    params = decoders.make_params(config)
    want = jax.jit(jax.value_and_grad(mean))(params, batch)
    mesh = mesh_of((8,), ("data",), kind)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        got = jax.jit(jax.value_and_grad(mean))(params, batch)
    assert_trees_close(got, want, 1e-12)


# Configurations.

QWEN_3 = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", head_dim=128,
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_hidden_layers=36,
    num_key_value_heads=8, rms_norm_eps=1e-6, dtype="bfloat16", vocab_size=151936,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000}, tie_word_embeddings=False,
    sliding_window=None, use_sliding_window=False, attention_bias=False, attention_dropout=0.0,
    layer_types=["full_attention"] * 36,
)  # fmt: skip


def count_parameters(config):
    return sum(np.prod(a.shape) for tree in decoder_shapes(config) for a in tree.values())


PHI_4_MINI = dict(
    architectures=["Phi3ForCausalLM"], model_type="phi3", hidden_size=3072, hidden_act="silu",
    intermediate_size=8192, max_position_embeddings=131072, num_attention_heads=24,
    num_hidden_layers=32, num_key_value_heads=8, original_max_position_embeddings=4096,
    partial_rotary_factor=0.75, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=262144,
    rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1.5] * 48),
    tie_word_embeddings=True, torch_dtype="bfloat16", vocab_size=200064,
)  # fmt: skip


def test_published_configurations():
    qwen = DecoderConfig.from_json(QWEN_3)
    assert count_parameters(qwen) == 8_190_735_360
    assert (qwen.rope_theta, qwen.dtype, qwen.rope_scaling) == (1e6, "bfloat16", None)
    assert hash(qwen) == hash(DecoderConfig.from_json(QWEN_3))
    phi = DecoderConfig.from_json(PHI_4_MINI)
    assert count_parameters(phi) == 3_836_021_760
    assert phi.rope_scaling.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))


@pytest.mark.parametrize("settings", [QWEN_3, PHI_4_MINI, *CONFIGS.values()])
def test_configurations_survive_writing(settings, tmp_path):
    config = DecoderConfig.from_json(settings)
    written = config.to_json()
    (tmp_path / "config.json").write_text(json.dumps(written))
    for place in (tmp_path, tmp_path / "config.json"):
        assert DecoderConfig.from_json(place) == config
    assert written["torch_dtype"] == config.dtype
    kept = {n: v for n, v in settings.items() if n in written and n != "rope_scaling"}
    assert all(written[name] == value for name, value in kept.items())
    assert "layer_types" in written or "layer_types" not in settings
    assert DecoderConfig.from_json(written) == config


def test_defaults_of_alternating_layers():
    """They are those of transformers if config.json lacks the lists."""
    sizes = decoders.SIZES | {"num_hidden_layers": 8}
    read = DecoderConfig.from_json
    smol = read({"model_type": "smollm3", **sizes})
    assert smol.no_rope_layers == (1, 1, 1, 0) * 2
    assert (smol.windows, smol.layers_differ) == ((None,) * 8, True)
    second = read({"model_type": "gemma2", **sizes})
    assert second.windows == (4096, None) * 4 and second.embedding_scale == 4
    assert second.attention_scale == 1 / 16 and second.tie_word_embeddings
    gemma = read({"model_type": "gemma3_text", **sizes, "sliding_window": 5})
    assert gemma.windows == (5,) * 5 + (None,) + (5,) * 2
    every = read({"model_type": "gemma3_text", **sizes, "sliding_window_pattern": 2})
    assert every.windows == (4096, None) * 4


def test_forms_of_rope_parameters():
    """`rope_parameters` hold what were `rope_theta` and `rope_scaling`, or one for each type."""
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    flat = decoders.LLAMA3_ROPE | {"rope_theta": 500.0}
    for name, parameters in (("gemma3", nested), ("llama3", flat)):
        others = {n: v for n, v in CONFIGS[name].items() if not n.startswith("rope")}
        assert DecoderConfig.from_json(others | {"rope_parameters": parameters}) == config_of(name)
    assert config_of("llama3").rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 16)


def abstract_layer(config, length=5):
    """Return the function of a layer, and the shapes of its arguments."""
    layers, others = decoder_shapes(config)
    params = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in layers.items()}
    embed, layer, _ = decoder_functions(config)
    tokens = jax.ShapeDtypeStruct((1, length), "int32")
    return layer, params, jax.eval_shape(embed, others, {"tokens": tokens})


def test_windows_of_layers_run_one_kernel_each():
    """Layers with a window skip the pairs outside of it, in a branch; short rows have none."""
    config = config_of("gemma3", num_key_value_heads=4)
    for length, has_branch in ((6, True), (5, False)):
        layer, *args = abstract_layer(config, length)
        assert ("cond[" in str(jax.make_jaxpr(layer)(*args))) == has_branch


def test_lengths_select_the_factors_of_long_rows():
    """Rows of more than the original positions have the long factors, as in transformers."""
    config = config_of("phi4_mini")
    for length, factors in ((20, [1.0, 1.5, 2.0]), (21, [1.0, 3.0, 8.0])):
        want = 10000.0 ** -(np.arange(3) / 3) / factors
        positions = jnp.arange(length)[None]
        x = {"positions": positions, "lengths": decoder._segment_lengths(positions, None)}
        cos, _ = decoder._rotation(config, x, "float32")
        want = config.rope_scaling.attention_factor * np.cos(np.arange(length)[:, None] * want)
        np.testing.assert_allclose(cos[0, :, 0], want, 0, 1e-5)


QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn():
    """Qwen's: recorded from the formulas of the paper in float64."""
    settings = dict(
        model_type="llama", **decoders.SIZES, head_dim=16, rope_theta=1e6, rope_scaling=QWEN_YARN
    )
    config = DecoderConfig.from_json(settings)
    want = [
        1.0, 0.1778279410038923, 0.03162277660168379, 0.004217559938927618,
        0.0005, 4.445698525097307e-05, 7.905694150420949e-06, 1.4058533129758728e-06,
    ]  # fmt: skip
    np.testing.assert_allclose(decoder._rotary_frequencies(config), [want], 1e-12)
    factor = config.rope_scaling.attention_factor
    assert config.rope_scaling == YarnRopeScaling(4.0, 32768, attention_factor=factor)
    assert DecoderConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"attention_factor": 2.0}, 2.0),
        ({"attention_factor": None}, 1.138629436111989),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factors_of_yarn(changes, want):
    settings = CONFIGS["qwen2"] | {"rope_scaling": QWEN_YARN | changes}
    config = DecoderConfig.from_json(settings | {"max_position_embeddings": 131072})
    np.testing.assert_allclose(config.rope_scaling.attention_factor, want, 1e-12)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": "auto"}, "float32"),
        ({}, "float32"),
    ],
)
def test_forms_of_the_dtype(settings, want):
    config = DecoderConfig.from_json(CONFIGS["llama2"] | settings)
    assert config.dtype == want
    assert dataclasses.replace(config, dtype=jnp.dtype(want)) == config


def test_experts_have_no_chunks_and_no_dropout_of_adapters():
    config = DecoderConfig.from_json(CONFIGS["mixtral"])
    with pytest.raises(ValueError, match=r"`mlp_chunk_size` \(=4\) must be None for mixtral"):
        decoder_functions(config, mlp_chunk_size=4)
    layer = decoder_functions(config, lora_dropout=0.5).layer
    _, params, x = abstract_layer(config)
    a = {"block_sparse_moe.experts.w1.lora_A.weight": jax.ShapeDtypeStruct((6, 2, 16), "float32")}
    with pytest.raises(ValueError, match=r"`lora_dropout` \(=0.5\) must be 0"):
        jax.eval_shape(layer, params | a, x, jax.random.key(0))


@vary("dtype, tolerance", [("float64", 1e-12), ("bfloat16", 3e-2)])
def test_adapters_of_experts(dtype, tolerance, x64):
    """As in the sum of each matrix and its adapter, in float64."""
    config = config_of("qwen3_moe", dtype=dtype)
    rng = np.random.default_rng(0)
    shapes = decoder_shapes(config)[0]
    params = {name: jnp.asarray(rng.normal(size=a.shape[1:]), dtype) for name, a in shapes.items()}
    wide = {name: jnp.asarray(a, "float64") for name, a in params.items()}
    pairs, sums = {}, {}
    for name in ("gate_proj", "down_proj"):  # up has none
        e, outputs, inputs = params[f"mlp.experts.{name}.weight"].shape
        a, b = rng.normal(size=(e, 2, inputs)), rng.normal(size=(e, outputs, 2))
        pairs |= {f"mlp.experts.{name}.lora_A.weight": a, f"mlp.experts.{name}.lora_B.weight": b}
        sums[f"mlp.experts.{name}.weight"] = wide[f"mlp.experts.{name}.weight"] + 0.5 * b @ a
    hidden = jnp.asarray(rng.normal(size=(2, 9, config.hidden_size)), dtype)

    def apply(params, hidden):
        options = decoder.LinearOptions(0.5)
        return decoder._apply_experts(config, options, params, hidden, {}, None)[0]

    got = apply(params | pairs, hidden)
    assert_trees_close(got, apply(wide | sums, jnp.asarray(hidden, "float64")), tolerance)


def test_dropout_of_config_json_is_refused_in_training():
    config = DecoderConfig.from_json(CONFIGS["llama2"] | {"attention_dropout": 0.1})
    layer, params, x = abstract_layer(config)
    assert jax.eval_shape(layer, params, x) == x  # nothing is dropped without a key
    with pytest.raises(ValueError, match=r"`attention_dropout` \(=0.1\) .* Set it to 0"):
        jax.eval_shape(layer, params, x, jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama2", {"model_type": "gemma"}, r"`model_type` \(='gemma'\) .* \"llama\", \"mistral\""),
        ("gemma3", {"model_type": "gemma3"}, "only its text model"),
        ("llama2", {"hidden_size": None}, "`hidden_size`"),
        ("llama2", {"hidden_act": "gelu"}, "`hidden_act` .*'silu'"),
        ("llama2", {"attention_dropout": 1}, "`attention_dropout`"),
        ("llama2", {"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ("llama2", {"num_key_value_heads": 3}, "`num_key_value_heads` .* divide"),
        ("llama2", {"head_dim": 5}, "`head_dim` .* even"),
        ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "`rope_type`"),
        ("llama2", {"rope_scaling": {"type": "linear"}}, "`factor`"),
        ("qwen2", {"rope_scaling": QWEN_YARN | {"beta_fast": 0.5}}, "`beta_fast` .* at least"),
        ("qwen2", {"rope_scaling": QWEN_YARN | {"truncate": 1}}, "`truncate` must be a bool"),
        ("qwen2", {"rope_scaling": QWEN_YARN | {"factor": 0}}, "`factor`"),
        ("qwen2", {"rope_scaling": QWEN_YARN | {"factor": None}}, "lacks `factor`"),
        ("qwen2", {"rope_scaling": QWEN_YARN | {"mscale": 0.7}}, "`mscale` .* not supported"),
        ("phi4_mini", {"original_max_position_embeddings": 1}, "invalid"),
        (
            "phi4_mini",
            {"rope_scaling": QWEN_YARN | {"attention_factor": 1.0}},
            "The longrope scaling .* `short_factor`",  # which transformers reads of Phi's, too
        ),
        ("phi4_mini", {"partial_rotary_factor": 0.4}, "`partial_rotary_factor`"),
        ("phi4_mini", {"partial_rotary_factor": 0.5}, "`short_factor` must have 2 numbers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "`no_rope_layers`"),
        ("gemma2", {"layer_types": ["full_attention"]}, "`layer_types`"),
        ("gemma3", {"use_bidirectional_attention": True}, "`use_bidirectional_attention`"),
        ("gemma2", {"hidden_activation": "silu"}, "`hidden_activation`"),
        ("smollm3", {"num_hidden_layers": 10**9}, "`num_hidden_layers` .* at most"),
        ("llama2", {"rope_parameters": {"full_attention": {}}}, "one for each type of layer"),
        ("qwen2", {"use_sliding_window": True}, "`use_sliding_window`"),
        # Any content of a file is a ValueError.
        ("llama2", {"model_type": ["llama"]}, "`model_type`"),
        ("llama2", {"num_key_value_heads": 0}, "`num_key_value_heads` .* at least 1"),
        ("llama2", {"rms_norm_eps": "1e-6"}, "`rms_norm_eps` must be a number"),
        ("llama2", {"rms_norm_eps": 10**400}, "`rms_norm_eps` .* between 1e-38 and 1e\\+38"),
        ("llama2", {"tie_word_embeddings": "false"}, "`tie_word_embeddings` must be a bool"),
        ("llama2", {"torch_dtype": "int8"}, "`dtype`"),
        ("llama2", {"rope_theta": float("nan")}, "`rope_theta`"),
        ("llama2", {"rope_scaling": "linear"}, "`rope_scaling`"),
        ("llama3", {"rope_scaling": decoders.LLAMA3_ROPE | {"low_freq_factor": 4}}, "larger than"),
        ("mistral", {"sliding_window": 0}, "`sliding_window`"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"`decoder_sparse_step` \(=2\) .* must be 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"`mlp_only_layers` \(=\[0\]\) .* must be \[\]"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "`num_experts_per_tok` .* `num_experts`"),
        ("olmoe", {"clip_qkv": 8.0}, "`clip_qkv`"),
        ("olmoe", {"router_aux_loss_coef": -0.1}, "`router_aux_loss_coef` .* at least 0"),
    ],
)
def test_unsupported_configurations_are_refused(name, changes, match):
    settings = {n: v for n, v in (CONFIGS[name] | changes).items() if v is not None}
    with pytest.raises(ValueError, match=match):
        DecoderConfig.from_json(settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_numbers_are_refused_by_name(name):
    settings = config_of(name).to_json()
    unused = json.loads(config_of(name).other_settings).keys() - {"max_position_embeddings"}
    scaling = settings.get("rope_scaling") or {}
    for key, value in [*settings.items(), *scaling.items()]:
        if type(value) not in (int, float) or key in unused:
            continue
        # transformers prefers this key to that of the scaling.
        parts = [part for part in (settings, scaling) if key in part]
        for wrong in WRONG_NUMBERS:
            for part in parts:
                part[key] = wrong
            with pytest.raises(ValueError, match=f"`{key}`"):
                DecoderConfig.from_json(settings)
        for part in parts:
            part[key] = value
    assert DecoderConfig.from_json(settings) == config_of(name)


@pytest.mark.parametrize("content", [b"[]", b'{"a": ' * 100_000, b'{"model_type": "\xff"}'])
def test_damaged_files_are_refused(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json"):
        DecoderConfig.from_json(tmp_path)
    with pytest.raises(FileNotFoundError):
        DecoderConfig.from_json(tmp_path / "missing.json")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_are_utf_8(encoding, tmp_path):
    """With or without a byte order mark; the encoding of the locale does not matter."""
    text = json.dumps(CONFIGS["llama2"] | {"_name_or_path": "Ω"}, ensure_ascii=False)
    (tmp_path / "config.json").write_bytes(text.encode(encoding))
    config = DecoderConfig.from_json(tmp_path)
    assert json.loads(config.other_settings)["_name_or_path"] == "Ω"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2", {"other_settings": "oops"}),
        ("llama2", {"other_settings": "[]"}),
        ("llama2", {"other_settings": None}),
        # Those that config.json of the family cannot hold. `to_json` would drop them.
        ("qwen2", {"sliding_window": 128}),
        ("olmo2", {"residual_multiplier": 0.5}),
        ("qwen2", {"attention_bias": True}),
    ],
)
def test_wrong_settings_are_refused(name, changes):
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}`"):
        config_of(name, **changes)


def test_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="`attention` .='flash'"):
        decoder_functions(config_of("llama2"), attention="flash")
