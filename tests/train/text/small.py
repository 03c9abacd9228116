"""A small fine-tuning task, of two steps an epoch."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from effjax.models import DecoderConfig
from effjax.train.errors import PreemptionError
from effjax.train.loop import fit
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.task import TextTask, prepare
from effjax.train.text.tiny import SIZES, write_checkpoint
from tests.train.small import assert_same_parameters, new_run

# Rows of different lengths, so that microbatches have different numbers of tokens with loss.
ROWS = [{"prompt": f"{i}:", "completion": "ab" * (1 + i % 7)} for i in range(24)]
ROWS += [{"text": f"class A{i}: pass"} for i in range(16)]


def write_config(folder, family="llama", **config):
    """Write the config.json of a checkpoint, which suffices for a plan; return the file."""
    settings = {"model_type": family, "vocab_size": 384, **SIZES, **config}
    file = folder / "config.json"
    file.write_text(json.dumps(DecoderConfig.from_json(settings).to_json()))
    return file


def write_base(folder, family="llama", **config):
    """Write a checkpoint and rows; return the folder."""
    write_checkpoint(folder, family, **config)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@functools.cache
def tiny_base() -> Path:
    """Write a checkpoint and rows for tests that have no fixtures; return the folder."""
    pytest.importorskip("tokenizers")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return write_base(folder, num_hidden_layers=1)


def text_task(devices=2, **options) -> TextTask:
    """Return a task of five steps, evaluated after the second, the fourth and the last one."""
    return finetune_task(tiny_base(), devices, **{"steps": 5, "learning_rate": 3e-3} | options)


def finetune_task(folder, devices=1, resume=False, **options) -> TextTask:
    """Return a task of six steps, evaluated after every second one."""
    small: dict[str, Any] = dict(
        checkpoint=str(folder), data=str(folder / "rows.jsonl"), max_length=16, batch_size=4,
        steps=6, report_every=2, learning_rate=1e-2, dtype="float32", param_dtype="float32",
        date="2026-01-31",
    )  # fmt: skip
    return prepare(FinetuneConfig(**small | options), jax.devices()[:devices], resume=resume)


def check_resume(task, tmp_path, before_resume=lambda: None):
    """Check that a run of two parts has the bits of a whole one; return this and its result."""
    whole, parts = (new_run(tmp_path / name, task) for name in ("whole", "parts"))
    result = fit(task, whole)
    with pytest.raises(PreemptionError):
        fit(task, parts, stop=lambda step: step == 1)
    before_resume()
    fit(task, parts, resume=True)
    assert_same_parameters(task, whole, parts)
    return whole, result
