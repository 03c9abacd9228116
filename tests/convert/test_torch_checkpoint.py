"""Checkpoints and adapters that transformers and PEFT write and read."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")

from effjax import convert  # noqa: E402
from effjax.models import DecoderConfig, decoder_shapes  # noqa: E402

SIZES = dict(
    vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6,
)  # fmt: skip
TOKENS = torch.arange(10)[None] * 5


def make_model(kind, dtype, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Phi3", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}),
    ],
)
def test_checkpoints(tmp_path, kind, options, dtype):
    model = make_model(kind, dtype, **options)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="15KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    config = DecoderConfig.from_json(model.config.to_dict())
    config = dataclasses.replace(config, dtype=str(dtype).removeprefix("torch."))
    layers, others = convert.load_checkpoint(tmp_path / "theirs", *decoder_shapes(config))
    want = model.state_dict()
    theirs = type(model).from_pretrained(tmp_path / "theirs", dtype="auto")
    for name, a in others.items():
        assert np.asarray(a).tobytes() == bits(want[name]), name
    for leaf, a in layers.items():
        for i, layer in enumerate(np.asarray(a)):
            assert layer.tobytes() == bits(want[f"model.layers.{i}.{leaf}"]), leaf
    for shard_bytes in (15_000, 10**9):
        folder = tmp_path / str(shard_bytes)
        convert.save_checkpoint(
            folder, layers, others, model.config.to_dict(), max_shard_bytes=shard_bytes
        )
        again, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        assert again.dtype == dtype
        for name, tensor in again.state_dict().items():
            assert bits(tensor) == bits(want[name]), name
        with torch.no_grad():
            assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters(tmp_path, use_rslora):
    peft = pytest.importorskip("peft", reason="requires PEFT")
    options = dict(r=4, lora_alpha=6, use_rslora=use_rslora, init_lora_weights=False)
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
    )
    adapted = peft.get_peft_model(make_model("Llama", torch.float32), config).eval()
    adapted.save_pretrained(tmp_path / "theirs")
    layers, scale = convert.load_adapter(tmp_path / "theirs")
    assert scale == (3 if use_rslora else 1.5)
    convert.save_adapter(tmp_path / "ours", layers, scale)
    again = peft.PeftModel.from_pretrained(make_model("Llama", torch.float32), tmp_path / "ours")
    with torch.no_grad():
        want = adapted(TOKENS).logits
        assert torch.equal(again.eval()(TOKENS).logits, want)
        assert not torch.allclose(make_model("Llama", torch.float32)(TOKENS).logits, want)
    # scale · B A is what PEFT adds to the weights.
    before = make_model("Llama", torch.float32).state_dict()
    after = adapted.merge_and_unload().state_dict()
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        a, b = (np.asarray(layers[f"{module}.lora_{ab}.weight"]) for ab in "AB")
        for i, delta in enumerate(scale * b @ a):
            name = f"model.layers.{i}.{module}.weight"
            np.testing.assert_allclose(after[name] - before[name], delta, atol=1e-6)
