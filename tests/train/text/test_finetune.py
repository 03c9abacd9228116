"""Fine-tuning from Python: the run of the command, with callbacks and a loss of one's own."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import optax
import pytest

import effjax.train
from effjax.train import FinetuneConfig, PreemptionError, TrainError

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")


@pytest.fixture
def config(base):
    return FinetuneConfig(
        checkpoint=str(base), data=[str(base / "rows.jsonl")], max_length=16, batch_size=4,
        steps=4, report_every=2, learning_rate=1e-2, dtype="float32", param_dtype="float32",
        date="2026-01-31",
    )  # fmt: skip


finetune = functools.partial(effjax.train.finetune, devices=jax.devices()[:1])


def test_callbacks_stop_a_run_that_resumes_to_the_same_end(config, tmp_path):
    records = []
    whole = finetune(config, tmp_path / "whole", callbacks=[records.append])
    assert [r["step"] for r in records if r["kind"] == "train_step"] == [1, 2, 3, 4]
    evaluations = [r for r in records if r["kind"] == "step"]
    assert evaluations[-1]["validation_loss"] == whole.result.validation_loss
    assert whole.exported == tmp_path / "whole" / "model" and whole.exported.is_dir()

    with pytest.raises(PreemptionError):
        finetune(config, tmp_path / "parts", callbacks=[lambda record: record["step"] == 2])
    with pytest.raises(TrainError, match="holds a run"):
        finetune(config, tmp_path / "parts")
    expected = (whole.exported / "model.safetensors").read_bytes()
    for _ in range(2):  # a run that has ended exports the same again
        parts = finetune(config, tmp_path / "parts", resume=True)
        assert (parts.exported / "model.safetensors").read_bytes() == expected
        shutil.rmtree(parts.exported)

    # AdamW takes nearly the same steps with half of the loss.
    def halved(logits, batch):
        labels, weights = batch["labels"], batch["weights"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (losses * weights).sum() / 2, weights.sum()

    other = finetune(config, tmp_path / "other", loss=halved)
    np.testing.assert_allclose(
        other.result.validation_loss, whole.result.validation_loss / 2, rtol=0.05
    )
    with pytest.raises(TrainError, match="cannot be combined with a function"):
        finetune(dataclasses.replace(config, loss="dpo"), tmp_path / "dpo", loss=halved)
