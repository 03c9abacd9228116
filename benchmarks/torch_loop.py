"""Losses of a plain PyTorch loop that fine-tunes a real model, and of effjax finetune.

The model is SmolLM2-135M-Instruct in Hugging Face's layout, in the folder that the environment
variable SMOLLM2 names; without it, a tiny one. It trains on paragraphs of the documentation, in
float32 on the CPU: the loop is transformers' model, its loss, and torch.optim.AdamW.
"""

import importlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from effjax.train import FinetuneConfig, finetune
from effjax.train.text.tiny import write_checkpoint

from .results import Result, Size, UnavailableError

STEPS, BATCH, LENGTH, RATE = 20, 4, 128, 2e-5
DOCS = Path(__file__).parent.parent / "docs"
IGNORED = -100
# The two forms of effjax, with the state in device memory and with all of it on the host.
FORMS: dict[str, dict[str, Any]] = {
    "effjax": {},
    "effjax, offloaded": {"params_in": "host", "fuse_update": True},
}


def run(size: Size) -> Iterator[Result]:
    """Yield the losses of all, the same for each size."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            f"{error.name} is missing; run pip install torch transformers"
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        if given := os.environ.get("SMOLLM2"):
            model = Path(given)
        else:
            write_checkpoint(model := work / "tiny", hidden_size=64, intermediate_size=128)
        config = json.loads((model / "config.json").read_text())
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.disable_progress_bar()
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        texts = read_paragraphs(tokenizer)
        want = train_torch(model, tokenizer, texts)
        rows = [{"name": "PyTorch", "losses": want, "loss": want[-1]}]
        for name, options in FORMS.items():
            losses = train_effjax(model, texts, work / name, options)
            difference = float(np.abs(np.array(losses) / np.array(want) - 1).max())
            row = {"losses": losses, "loss": losses[-1], "difference": difference}
            rows.append({"name": name, **row})
    yield Result(
        "torch_loop",
        f"Losses of {STEPS} steps of a PyTorch loop and of effjax",
        {
            **versions,
            "config": config,
            "steps": STEPS,
            "batch_size": BATCH,
            "max_length": LENGTH,
            "rate": RATE,
        },
        rows,
        plot=None,
        notes=["max difference: the largest relative difference of the losses of a step"],
    )


def read_paragraphs(tokenizer: Any) -> list[str]:
    """Return the first paragraphs of the pages that are not longer than a sequence."""
    paragraphs = []
    for page in sorted(DOCS.glob("*.md")):
        for text in page.read_text().split("\n\n"):
            text = " ".join(text.split())
            words = text[:1].isalpha() and len(text) > 80
            if words and len(tokenizer(text).input_ids) < LENGTH:
                paragraphs.append(text)
    return paragraphs[: STEPS * BATCH]


def train_torch(model: Path, tokenizer: Any, texts: Sequence[str]) -> list[float]:
    """Return the loss of each step of the loop."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").train()
    adamw = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        rows = [
            [*tokenizer(text).input_ids, tokenizer.eos_token_id]
            for text in texts[step * BATCH : (step + 1) * BATCH]
        ]
        most = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (most - len(row)) for row in rows])
        real = torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows])
        labels = tokens.masked_fill(real == 0, IGNORED)
        loss = net(input_ids=tokens, attention_mask=real, labels=labels).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def train_effjax(
    model: Path, texts: Sequence[str], folder: Path, options: dict[str, Any]
) -> list[float]:
    """Return the loss of each step."""
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = FinetuneConfig(
        checkpoint=str(model), data=[str(data)], learning_rate=RATE, schedule="constant", warmup=0,
        beta2=0.999, weight_decay=0.0, clip_norm=0, packing=False, order="file", validation=0,
        param_dtype="float32", dtype="float32", max_length=LENGTH, steps=STEPS, batch_size=BATCH,
        **options,
    )  # fmt: skip
    losses: list[float] = []

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "train_step":
            losses.append(record["loss"])

    finetune(config, folder / "run", devices=jax.devices()[:1], callbacks=[note])
    assert len(losses) == STEPS, losses
    return losses
