"""Losses of ten steps of TRL's `SFTTrainer`, and of effjax with the options of the guide.

A tiny model trains on the same rows in the same order. The learning rate is larger than TRL's
default, so that ten steps change the loss.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from effjax.train import FinetuneConfig, finetune
from effjax.train.text.task import prepare
from effjax.train.text.tiny import write_checkpoint

from .results import Result, Size, UnavailableError

STEPS, BATCH, LENGTH, RATE = 10, 8, 64, 1e-2
RANK, ALPHA = 4, 16
# The options of the guide.
OURS: dict[str, Any] = dict(
    learning_rate=RATE, schedule="linear", warmup=0, lowest_rate=0, beta2=0.999, packing=False,
    param_dtype="float32", order="file", validation=0, max_length=LENGTH,
    steps=STEPS, batch_size=BATCH,
)  # fmt: skip
THEIRS: dict[str, Any] = dict(
    learning_rate=RATE, train_sampling_strategy="sequential", max_length=LENGTH, max_steps=STEPS,
    per_device_train_batch_size=BATCH, logging_steps=1, report_to="none", save_strategy="no",
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
Rows = Sequence[dict[str, Any]]
# Two batches of each kind.
NUMBERS = range(2 * BATCH)
TEXTS = [{"text": f"class A{i}: return {'ab' * (i % 7)}"} for i in NUMBERS]
COMPLETIONS = [
    {"prompt": f"{i} + {i} =", "completion": f" {2 * i} is{' the sum' * (i % 4)}"} for i in NUMBERS
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": f"{i} + {i} = {2 * i}{'!' * (i % 5)}"},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "ok"},
        ]
    }
    for i in NUMBERS
]

PREFERENCES = [
    {
        "prompt": f"{i} + {i} =",
        "chosen": f" {2 * i} is{' the sum' * (i % 4)}",
        "rejected": f" {i}{' or more' * (i % 3)}",
    }
    for i in NUMBERS
]
CHAT_PREFERENCES = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
    }
    for row in PREFERENCES
]


class Case(NamedTuple):
    """Rows, and options of both that differ from `OURS` and `THEIRS`."""

    rows: Rows
    ours: dict[str, Any]
    theirs: dict[str, Any]
    lora: bool = False
    trainer: str = "SFT"  # of TRL


DPO = {"loss": "dpo"}  # the same beta by default
EXACT, EXACT_THEIRS = {"dtype": "float32"}, {"bf16": False}
CASES = {
    "`text`": Case(TEXTS, EXACT, EXACT_THEIRS),
    "`prompt` and `completion`": Case(COMPLETIONS, EXACT, EXACT_THEIRS),
    "`messages`, loss of the assistant": Case(
        CHATS, EXACT, EXACT_THEIRS | {"assistant_only_loss": True}
    ),
    "cosine with warmup": Case(
        TEXTS,
        EXACT | {"schedule": "cosine", "warmup": 0.25, "first_rate": 0},
        EXACT_THEIRS | {"lr_scheduler_type": "cosine", "warmup_steps": 0.25},
    ),
    "packed rows": Case(TEXTS, EXACT | {"packing": True, "order": "random"}, EXACT_THEIRS),
    "LoRA": Case(COMPLETIONS, EXACT, EXACT_THEIRS, lora=True),
    "computed in bfloat16": Case(COMPLETIONS, {"dtype": "bfloat16"}, {}),
    "DPO": Case(PREFERENCES, EXACT | DPO, EXACT_THEIRS, trainer="DPO"),
    "DPO of messages": Case(CHAT_PREFERENCES, EXACT | DPO, EXACT_THEIRS, trainer="DPO"),
    "DPO, LoRA": Case(PREFERENCES, EXACT | DPO, EXACT_THEIRS, lora=True, trainer="DPO"),
}


def run(size: Size) -> Iterator[Result]:
    """Yield the losses of both, the same for each size."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(f"{error.name} is missing; run pip install trl") from error
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "model"
        write_checkpoint(base, hidden_size=64, intermediate_size=128)
        (base / "chat_template.jinja").write_text(TEMPLATE)
        rows = []
        for number, (name, case) in enumerate(CASES.items()):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            rows.append({"name": name} | compare(base, folder, case))
    yield Result(
        "trl",
        "Losses of ten steps of TRL and of effjax",
        {**versions, "steps": STEPS, "batch_size": BATCH, "max_length": LENGTH, "rate": RATE},
        rows,
        notes=["max difference: the largest relative difference of the losses of a step"],
    )


def compare(base: Path, folder: Path, case: Case) -> dict[str, Any]:
    """Return the losses of both."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    options, model = OURS | case.ours, base
    config = FinetuneConfig(checkpoint=str(base), data=[str(file)], **options)
    theirs = dict(case.theirs)
    if config.packing:
        # A batch of all rows: their order differs.
        count = len(prepare(config, jax.devices()[:1]).data.train)
        config = dataclasses.replace(config, batch_size=count)
        theirs |= {"packing": True, "per_device_train_batch_size": count}
    if case.lora:
        model = write_adapter(base, folder / "adapter")
        config = dataclasses.replace(config, adapter=str(folder / "adapter"))
    want = train_theirs(case.trainer, model, case.rows, folder / "trl", base, **theirs)
    losses: list[float] = []

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "train_step":
            losses.append(record["loss"])

    finetune(config, folder / "run", devices=jax.devices()[:1], callbacks=[note])
    assert len(losses) == len(want) == STEPS, (losses, want)
    difference = float(np.abs(np.array(losses) / np.array(want) - 1).max())
    return {"loss": losses[-1], "losses": losses, "trl_losses": want, "difference": difference}


def train_theirs(
    kind: str, model: Any, rows: Rows, out: Path, tokenizer: Path, **options: Any
) -> Sequence[float]:
    """Return the loss of each step of TRL."""
    import datasets  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    trl: Any = importlib.import_module("trl")  # this file has the same name
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    trainer = getattr(trl, f"{kind}Trainer")(
        str(model) if isinstance(model, Path) else model,
        args=getattr(trl, f"{kind}Config")(output_dir=str(out), **THEIRS | options),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
    )
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each step
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def write_adapter(base: Path, folder: Path) -> Any:
    """Write a new adapter of all linear layers, and return PEFT's model with it."""
    import peft  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    model.save_pretrained(str(folder))
    return model
