"""Comparison of decoders with Hugging Face's: configurations, logits and gradients."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")

from effjax.models import DecoderConfig  # noqa: E402
from tests.convert import decoders  # noqa: E402


def without_others(config):
    return dataclasses.replace(config, other_settings="{}")


@pytest.mark.parametrize("name", decoders.CONFIGS)
def test_matches_transformers(name, tmp_path):
    settings = decoders.CONFIGS[name]
    want, theirs = decoders.run_transformers(settings)
    theirs.save_pretrained(tmp_path)
    config = DecoderConfig.from_json(tmp_path)
    assert without_others(config) == without_others(DecoderConfig.from_json(settings))
    decoders.check(config, want)
    recorded = decoders.load(name)
    assert recorded.keys() == want.keys()
    for key, array in recorded.items():
        np.testing.assert_allclose(array, want[key], 0, 1e-5, err_msg=key)


@pytest.mark.parametrize("name", decoders.CONFIGS)
def test_transformers_reads_our_configuration(name, tmp_path):
    config = DecoderConfig.from_json(decoders.CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert without_others(DecoderConfig.from_json(theirs.to_dict())) == without_others(config)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert config.to_json()["architectures"] == [type(model).__name__]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == decoders.checkpoint_shapes(config)


@pytest.mark.parametrize("model_type", sorted({c["model_type"] for c in decoders.CONFIGS.values()}))
def test_defaults_of_missing_keys(model_type):
    """A config.json without optional keys has the defaults of transformers."""
    sizes = dict(decoders.SIZES, num_attention_heads=32, hidden_size=64)
    theirs = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    assert without_others(DecoderConfig.from_json(theirs)) == without_others(
        DecoderConfig.from_json({"model_type": model_type, **sizes})
    )
