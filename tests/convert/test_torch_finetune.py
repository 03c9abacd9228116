"""Exports of fine-tuning runs in transformers and PEFT."""

import datetime

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")
pytest.importorskip("tokenizers")

from effjax.ops.quantize import FORMATS, dequantize, quantize  # noqa: E402
from effjax.train.loop import fit  # noqa: E402
from effjax.train.text.merge import merge  # noqa: E402
from effjax.train.text.model import find_model  # noqa: E402
from effjax.train.text.packing import eval_batches  # noqa: E402
from tests.train.small import new_run  # noqa: E402
from tests.train.text.small import finetune_task, write_base  # noqa: E402

EXPERTS = dict(num_experts=4, num_experts_per_tok=2)


def finetune(folder, family="llama", tied=False, **options):
    """Return the task, the folder of the result, and its loss on the validation rows."""
    model = EXPERTS if family in ("qwen3_moe", "mixtral", "olmoe") else {}
    model |= {"tie_word_embeddings": True} if tied else {}
    base = write_base(folder / "base", family, **model)
    task = finetune_task(base, packing=False, **options)
    run = new_run(folder / "run", task)
    result = fit(task, run)
    return task, run.path / result.exported, result.validation_loss


def mean_loss(model, task):
    """Return the loss of the validation rows, which are not packed."""
    (batch,) = eval_batches(task.data.validation, len(task.data.validation))
    arrays = {name: torch.from_numpy(batch[name]).long() for name in ("tokens", "labels")}
    with torch.no_grad():
        logits = model(input_ids=arrays["tokens"]).logits.float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), reduction="none"
    )
    weights = batch["weights"].ravel()
    return float((losses.numpy() * weights).sum() / weights.sum())


@pytest.mark.parametrize(
    ("family", "options", "tolerance"),
    [
        ("llama", dict(steps=4), 1e-5),
        ("qwen3", dict(steps=4, tied=True), 1e-5),
        ("llama", dict(steps=2, param_dtype="bfloat16"), 1e-3),
        ("mixtral", dict(steps=4, optimizer="muon"), 1e-5),
    ],
    ids=["llama", "qwen3, tied", "bfloat16", "mixtral"],
)
def test_model(tmp_path, family, options, tolerance):
    task, folder, loss = finetune(tmp_path, family, **options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == getattr(torch, options.get("param_dtype", "float32"))
    assert mean_loss(model.float().eval(), task) == pytest.approx(loss, rel=tolerance)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    start = tokenizer(text, return_tensors="pt").input_ids
    end, length = tokenizer.convert_tokens_to_ids("<|im_end|>"), start.size(1) + 2

    def force(ids, scores):
        scores[:, :4] = -torch.inf  # the special tokens
        scores[:, end] = torch.inf if ids.size(1) == length else -torch.inf
        return scores

    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [force]}
    assert model.generate(start, **options)[0, length:].tolist() == [end]  # it ends there


@pytest.mark.parametrize("form", [None, *FORMATS])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter(tmp_path, form):
    """PEFT has the same loss, with `form` on a base whose weights are the dequantized ones."""
    peft = pytest.importorskip("peft", reason="requires PEFT")
    task, folder, loss = finetune(tmp_path, steps=4, lora=2, quantize=form)
    config = peft.PeftConfig.from_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    untrained = mean_loss(base.eval(), task)
    assert not np.isclose(untrained, loss, rtol=1e-3)
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    before = mean_loss(adapted, task)
    if form is not None:
        layers = [m for n, m in adapted.named_modules() if n.endswith("_proj.base_layer")]
        assert len(layers) == 14
        for layer in layers:
            weight = jnp.asarray(layer.weight.detach().numpy())
            rounded = dequantize(quantize(weight, form), weight.shape[1], jnp.float32)
            layer.weight.data.copy_(torch.from_numpy(np.array(rounded)))
    after = mean_loss(adapted, task)
    assert after == pytest.approx(loss, rel=1e-5)
    assert form is None or 4 * abs(after - loss) < abs(before - loss)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter_of_experts(tmp_path, family):
    """A merged model has the same loss in transformers, and so has the adapter in PEFT."""
    peft = pytest.importorskip("peft", reason="requires PEFT")
    task, folder, loss = finetune(tmp_path, family, steps=4, lora=2, report_every=4)
    merge(find_model(tmp_path / "run", None, datetime.date.today()), tmp_path / "merged")
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert mean_loss(load(tmp_path / "merged").eval(), task) == pytest.approx(loss, rel=1e-5)
    base = load(tmp_path / "base").eval()
    assert not np.isclose(mean_loss(base, task), loss, rtol=1e-3)
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    assert mean_loss(adapted, task) == pytest.approx(loss, rel=1e-5)
