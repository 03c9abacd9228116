"""LoRA adapters in PEFT's layout."""

import json
import os

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import convert
from effjax.convert.adapter import read_adapter_options
from tests.convert.decoders import WRONG_NUMBERS
from tests.convert.test_checkpoint import assert_same_bits, file_of, info, random_bits, shapes_of

LAYERS = {
    "self_attn.q_proj.lora_A.weight": random_bits((3, 2, 8), "bfloat16", 0),
    "self_attn.q_proj.lora_B.weight": random_bits((3, 16, 2), "bfloat16", 1),
    "mlp.up_proj.lora_A.weight": random_bits((3, 2, 8), "float32", 2),
    "mlp.up_proj.lora_B.weight": random_bits((3, 24, 2), "float32", 3),
    "mlp.experts.down_proj.lora_A.weight": random_bits((3, 4, 2, 8), "float32", 4),
    "mlp.experts.down_proj.lora_B.weight": random_bits((3, 4, 6, 2), "float32", 5),
}


def change_config(folder, **options):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.fixture
def saved(tmp_path):
    convert.save_adapter(tmp_path / "adapter", LAYERS, 1.5, base_model="base")
    return tmp_path / "adapter"


def test_round_trip(saved, mesh8):
    assert sorted(os.listdir(saved)) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded, scale = convert.load_adapter(saved)
    assert_same_bits(loaded, LAYERS)
    assert scale == 1.5
    place = NamedSharding(mesh8, P(None, None, None), memory_kind="pinned_host")
    loaded, _ = convert.load_adapter(saved, shapes_of(LAYERS, place))
    assert_same_bits(loaded, LAYERS)
    assert all(a.sharding == place for a in loaded.values())


def test_metadata(saved, tmp_path):
    """Texts for other programs are beside the format, which transformers needs."""
    assert read_adapter_options(saved).metadata == {"format": "pt"}
    convert.save_adapter(tmp_path / "a", LAYERS, 1.5, metadata={"base_in": "nf4 bfloat16"})
    assert read_adapter_options(tmp_path / "a").metadata["base_in"] == "nf4 bfloat16"
    assert_same_bits(convert.load_adapter(tmp_path / "a")[0], LAYERS)
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(tmp_path / "a" / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "base_in": "nf4 bfloat16"}


def test_layout(saved):
    names = convert.load_weights(saved / "adapter_model.safetensors").keys()
    leaves = {leaf for leaf in LAYERS if ".experts." not in leaf}
    leaves |= {f"mlp.experts.{e}.down_proj.lora_{x}.weight" for e in range(4) for x in "AB"}
    assert names == {
        f"base_model.model.model.layers.{i}.{leaf}" for leaf in leaves for i in range(3)
    }
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "mlp.up_proj", "self_attn.q_proj"]
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["base_model_name_or_path"] == "base"
    change_config(saved, lora_alpha=5)
    assert convert.load_adapter(saved)[1] == 2.5
    change_config(saved, use_rslora=True)
    assert convert.load_adapter(saved)[1] == 5 / 2**0.5


@pytest.mark.parametrize(
    ("rank", "alpha"), [(49, 1), (3, 1), (8, 16), (49, 0.3), (2, -3), (2, 0), (64, 1e-3)]
)
def test_scales_are_written_exactly(tmp_path, rank, alpha):
    layers = {"q.lora_A.weight": np.ones((1, rank, 4)), "q.lora_B.weight": np.ones((1, 4, rank))}
    convert.save_adapter(tmp_path / "a", layers, alpha / rank)
    assert convert.load_adapter(tmp_path / "a")[1] == alpha / rank
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert type(config["lora_alpha"]) is type(alpha)


def test_other_prefix(tmp_path):
    convert.save_adapter(tmp_path / "a", LAYERS, 1.0, layers_prefix="transformer.h")
    with pytest.raises(ValueError, match=r"left over: base_model\.model\.transformer\.h\.0\."):
        convert.load_adapter(tmp_path / "a")
    assert_same_bits(convert.load_adapter(tmp_path / "a", layers_prefix="transformer.h")[0], LAYERS)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True}, "adapters with use_dora=True are not"),
        ({"bias": "all", "alpha_pattern": {"q": 3}}, r"alpha_pattern=\{'q': 3\}, bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"rotates": 2, "future": None}, "adapters with rotates=2 are not"),
        ({"use_rslora": "false"}, "use_rslora"),
        ({"r": 4}, "r is 4, but the matrices have rank 2"),
        ({"r": None}, "`r` must be an integer"),
        ({"lora_dropout": 1}, r"`lora_dropout` \(=1\)"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_rejects_other_adapters(saved, options, match):
    change_config(saved, **options)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{match}"):
        convert.load_adapter(saved)


@pytest.mark.parametrize("name", ["r", "lora_alpha", "lora_dropout"])
@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_rejects_wrong_numbers(saved, name, value):
    if (name, value) != ("lora_alpha", -1):  # which subtracts the product
        change_config(saved, use_rslora=True, **{name: value})
        with pytest.raises(ValueError, match=f"adapter_config.json: .*`{name}`"):
            read_adapter_options(saved)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\xff"])
def test_rejects_damaged_configurations(saved, text):
    (saved / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"adapter_config\.json: not the configuration of LoRA"):
        convert.load_adapter(saved)


def test_rejects_unsupported_dtypes(saved):
    """F4 has the size of half a byte, and JAX cannot read it."""
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    content = file_of({name: info("F4", (2, 8), (0, 8))})
    (saved / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} has the dtype F4"):
        convert.load_adapter(saved)


def test_rejects_missing_layers(saved, tmp_path):
    path = saved / "adapter_model.safetensors"
    weights = convert.load_weights(path)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    del weights[name]
    convert.save_weights(path, weights | {"base_model.model.lm_head.lora_A.weight": np.ones(2)})
    with pytest.raises(ValueError) as error:
        convert.load_adapter(saved)
    assert f"- missing: {name}" in str(error.value)
    assert "- left over: base_model.model.lm_head.lora_A.weight" in str(error.value)


A, B = np.ones((3, 2, 8)), np.ones((3, 4, 2))
PAIR = {"x.lora_A.weight": A, "x.lora_B.weight": B}


@pytest.mark.parametrize(
    ("error", "match", "layers", "scale"),
    [
        (ValueError, "Others: q.lora_A", {"q.lora_A.weight": A}, 1.0),
        (ValueError, "Others: q.weight", {"q.weight": A} | PAIR, 1.0),
        (ValueError, "Others: x.lora_B", PAIR | {"x.lora_B.weight": B[0]}, 1.0),
        (ValueError, r"Ranks: \[2, 8\]", PAIR | {"x.lora_B.weight": A}, 1.0),
        (ValueError, "Ranks", {}, 1.0),
        (ValueError, "`scale`", PAIR, np.nan),
        (ValueError, "`scale`", PAIR, np.inf),
        (TypeError, "`scale`", PAIR, "x"),
    ],
)
def test_rejects_arrays_and_scales_that_cannot_be_loaded(tmp_path, error, match, layers, scale):
    with pytest.raises(error, match=match):
        convert.save_adapter(tmp_path / "a", layers, scale)
    assert os.listdir(tmp_path) == []
