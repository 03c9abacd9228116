"""Comparison of decoders with Hugging Face's: configurations, logits, gradients and tokens."""

import dataclasses
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")

from effjax.models import DecoderConfig, decoder, generate  # noqa: E402
from tests.convert import decoders  # noqa: E402
from tests.convert.decoders import CONFIGS  # noqa: E402

families = pytest.mark.parametrize("name", CONFIGS)


def read(settings):
    """Return a configuration without the settings that effjax does not use."""
    return dataclasses.replace(DecoderConfig.from_json(settings), other_settings="{}")


@families
def test_matches_transformers(name, tmp_path):
    want, theirs = decoders.run_transformers(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    assert read(tmp_path) == read(CONFIGS[name])
    decoders.check(DecoderConfig.from_json(tmp_path), want)
    recorded = decoders.load_results(name)
    assert recorded.keys() == want.keys()
    for key, array in recorded.items():
        np.testing.assert_allclose(array, want[key], 0, 1e-5, err_msg=key)


@families
def test_transformers_reads_our_configuration(name, tmp_path):
    config = DecoderConfig.from_json(CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read(theirs.to_dict()) == read(CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert config.to_json()["architectures"] == [type(model).__name__]
    decoders.check_shapes(dict(model.named_parameters()), decoders.checkpoint_shapes(config))


@pytest.mark.parametrize("model_type", sorted({c["model_type"] for c in CONFIGS.values()}))
def test_defaults_of_missing_keys(model_type):
    """A config.json without optional keys has the defaults of transformers."""
    sizes = dict(decoders.SIZES, num_attention_heads=32, hidden_size=64)
    theirs = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    assert read(theirs) == read({"model_type": model_type, **sizes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"factor": 40.0},
        {"original_max_position_embeddings": 4},  # all frequencies are low
    ],
)
def test_yarn_is_that_of_transformers(changes):
    scaling = decoders.YARN_ROPE | changes
    settings = CONFIGS["qwen3"] | {"head_dim": 32, "rope_scaling": scaling}
    theirs = transformers.AutoConfig.for_model(**settings | {"max_position_embeddings": 256})
    want, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    config = DecoderConfig.from_json(settings)
    np.testing.assert_allclose(decoder._rotary_frequencies(config)[0], want, 1e-6)
    np.testing.assert_allclose(config.rope_scaling.attention_factor, factor, 1e-12)


@pytest.mark.parametrize("length", [15, 20, 21])
def test_generation_crosses_the_original_length(length):
    """Of 20 positions. transformers computes its cache anew there, and so does effjax."""
    model = decoders.make_transformers(CONFIGS["phi4_mini"]).eval()
    prompts = np.random.default_rng(5).integers(1, 37, (1, length))
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    want = model.generate(input_ids=torch.from_numpy(prompts), **options)[:, length:]
    config = DecoderConfig.from_json(CONFIGS["phi4_mini"])
    tokens, _ = generate(config, *decoders.make_params(config), prompts, max_new_tokens=12)
    np.testing.assert_array_equal(tokens, want)


@families
def test_greedy_tokens_are_those_of_transformers(name):
    """Prompts of different lengths, padded at the start there and at the end here."""
    model = decoders.make_transformers(CONFIGS[name]).eval()
    lengths = np.array([9, 4, 6])
    prompts = np.random.default_rng(2).integers(1, 37, (3, 9))
    mask = np.arange(9) >= 9 - lengths[:, None]
    padded = np.zeros_like(prompts)
    padded[mask] = np.concatenate([row[:n] for row, n in zip(prompts, lengths, strict=True)])
    inputs = dict(input_ids=torch.from_numpy(padded), attention_mask=torch.from_numpy(mask))
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    free = model.generate(**inputs, **options, eos_token_id=None)[:, 9:].numpy()
    stop = int(free[0, 4])
    want = model.generate(**inputs, **options, eos_token_id=stop)[:, 9:].numpy()

    config = DecoderConfig.from_json(CONFIGS[name])
    options = dict(lengths=lengths, max_new_tokens=10, stop_tokens=[stop])
    tokens, ends = generate(config, *decoders.make_params(config), prompts, **options)
    assert ends[0] <= 5
    # Their result is shorter if all rows have stopped.
    np.testing.assert_array_equal(tokens[:, : want.shape[1]], want)
    assert not np.asarray(tokens)[:, want.shape[1] :].any()
