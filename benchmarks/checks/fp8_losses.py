"""Losses of fine-tuning in float32, in bfloat16, and with `--matmul fp8`, for several seeds.

`python -m benchmarks.checks.fp8_losses CHECKPOINT --json DIR` trains SmolLM2-135M-Instruct on the
help texts of Python, and writes DIR/fp8_losses.json. Runs that the file has are not repeated.
"""

import argparse
import json
import pydoc_data.topics
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from effjax.train import FinetuneConfig, finetune

from ..results import Result, write_json

MODEL = "SmolLM2-135M-Instruct"
SEEDS, STEPS, BATCH, LENGTH, RATE = 3, 100, 4, 64, 1e-4
LAST = 10  # steps, of the loss at the end
# The default dtypes, and everything in float32. Nothing is recomputed, to save time.
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "param_dtype": "float32"},
    "bfloat16": {},
    "fp8": {"matmul": "fp8"},
}
HELD_OUT = 10  # one of so many topics
VALIDATION_ROWS = 64


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write the paragraphs of the topics as rows for training and for validation."""
    train, validation = [], []
    for number, name in enumerate(sorted(pydoc_data.topics.topics)):
        rows = train if number % HELD_OUT else validation
        paragraphs = re.split(r"\n\s*\n", pydoc_data.topics.topics[name])
        rows += [{"text": " ".join(text.split())} for text in paragraphs if len(text) > LENGTH]
    files = folder / "train.jsonl", folder / "validation.jsonl"
    for file, rows in zip(files, (train, validation[:VALIDATION_ROWS]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def train(checkpoint: str, form: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the losses of a run."""
    losses: list[float] = []

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "train_step":
            losses.append(round(record["loss"], 5))

    with tempfile.TemporaryDirectory() as temporary:
        data, validation_data = map(str, write_rows(Path(temporary)))
        config = FinetuneConfig(
            checkpoint=checkpoint, data=[data], validation_data=[validation_data], seed=seed,
            steps=steps, report_every=steps, batch_size=BATCH, max_length=LENGTH,
            learning_rate=RATE, policy="everything", **FORMS[form],
        )  # fmt: skip
        run = finetune(config, Path(temporary) / "run", callbacks=[note], devices=jax.devices()[:1])
    return {
        "name": f"{form}, seed {seed}",
        "dtype": form,
        "seed": seed,
        "last_loss": float(np.mean(losses[-LAST:])),
        "validation_loss": run.result.validation_loss,
        "losses": losses,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train in all forms with all seeds, and write the losses."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", help=f"{MODEL} in Hugging Face's layout.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, required=True, help="Folder for fp8_losses.json.")
    options = parser.parse_args(argv)
    file = options.json / "fp8_losses.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    config = {
        "model": MODEL, "steps": options.steps, "batch_size": BATCH, "length": LENGTH,
        "learning_rate": RATE, "last": LAST,
    }  # fmt: skip
    command = f"python -m benchmarks.checks.fp8_losses CHECKPOINT --json {options.json}"
    for seed in range(options.seeds):
        for form in FORMS:
            if any((row["dtype"], row["seed"]) == (form, seed) for row in rows):
                continue
            rows.append(train(options.checkpoint, form, seed, options.steps))
            print(*(f"{key} {rows[-1][key]:.4f}" for key in ("last_loss", "validation_loss")))
            result = Result("fp8_losses", f"losses of fine-tuning {MODEL}", config, rows)
            write_json(result, options.json, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
