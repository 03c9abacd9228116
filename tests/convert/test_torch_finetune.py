"""Exports of fine-tuning runs in transformers and PEFT."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")
pytest.importorskip("tokenizers")

from effjax.ops.quantize import FORMATS, dequantize, quantize  # noqa: E402
from effjax.train.loop import fit  # noqa: E402
from tests.train.small import new_run  # noqa: E402
from tests.train.text.small import finetune_task, write_base  # noqa: E402


def mean_loss(model, task):
    """Return the loss of the validation rows, which are not packed."""
    (batch,) = task.data.eval_batches("validation", len(task.data.validation))
    arrays = {name: torch.from_numpy(batch[name]).long() for name in ("tokens", "labels")}
    with torch.no_grad():
        logits = model(input_ids=arrays["tokens"]).logits.float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), reduction="none"
    )
    weights = batch["weights"].ravel()
    return float((losses.numpy() * weights).sum() / weights.sum())


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("qwen3", {"tie_word_embeddings": True})],
    ids=["llama", "qwen3, tied"],
)
def test_model(tmp_path, family, options):
    task = finetune_task(write_base(tmp_path / "base", family, **options), packing=False, steps=4)
    run = new_run(tmp_path / "run", task)
    result = fit(task, run)
    folder = run.path / result.exported
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert mean_loss(model.eval(), task) == pytest.approx(result.validation_loss, rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    start = tokenizer(text, return_tensors="pt").input_ids
    assert model.generate(start, max_new_tokens=2, do_sample=False).shape == (1, start.size(1) + 2)


def test_bfloat16_model(tmp_path):
    base = write_base(tmp_path / "base")
    task = finetune_task(base, packing=False, steps=2, param_dtype="bfloat16")
    run = new_run(tmp_path / "run", task)
    result = fit(task, run)
    model = transformers.AutoModelForCausalLM.from_pretrained(run.path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    loss = mean_loss(model.float().eval(), task)
    assert loss == pytest.approx(result.validation_loss, rel=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter(tmp_path):
    peft = pytest.importorskip("peft", reason="requires PEFT")
    task = finetune_task(write_base(tmp_path / "base"), packing=False, steps=4, lora=2)
    run = new_run(tmp_path / "run", task)
    result = fit(task, run)
    config = peft.PeftConfig.from_pretrained(run.path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    before = mean_loss(base.eval(), task)
    adapted = peft.PeftModel.from_pretrained(base, run.path / "adapter").eval()
    assert mean_loss(adapted, task) == pytest.approx(result.validation_loss, rel=1e-5)
    assert not np.isclose(before, result.validation_loss, rtol=1e-3)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter_of_a_quantized_base(tmp_path, form):
    """PEFT has the same loss on a base whose weights are the dequantized ones."""
    peft = pytest.importorskip("peft", reason="requires PEFT")
    task = finetune_task(
        write_base(tmp_path / "base"), packing=False, steps=4, lora=2, quantize=form
    )
    run = new_run(tmp_path / "run", task)
    result = fit(task, run)
    config = peft.PeftConfig.from_pretrained(run.path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    adapted = peft.PeftModel.from_pretrained(base, run.path / "adapter").eval()
    before, changed = mean_loss(adapted, task), 0
    with torch.no_grad():
        for name, module in adapted.named_modules():
            if name.endswith("_proj.base_layer"):
                weight = jnp.asarray(module.weight.numpy())
                rounded = dequantize(quantize(weight, form), weight.shape[1], jnp.float32)
                module.weight.copy_(torch.from_numpy(np.array(rounded)))
                changed += 1
    assert changed == 14
    assert mean_loss(adapted, task) == pytest.approx(result.validation_loss, rel=1e-5)
    assert before != pytest.approx(result.validation_loss, rel=1e-5)
