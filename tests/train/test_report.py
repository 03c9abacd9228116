"""The progress display on a terminal and elsewhere."""

import io

import pytest

pytest.importorskip("rich")

from rich.console import Console

from effjax.train.images import report as images
from effjax.train.lm import report as lm
from effjax.train.report import ConsoleProgress
from tests.train.small import image_task, lm_task

TASKS = {"images": image_task, "lm": lm_task}
TRAIN = {"images": {"loss": 1.5, "accuracy": 0.25}, "lm": {"loss": 1.5}}
VALIDATION = {
    "images": {"loss": 1.75, "accuracy": 0.5},
    "lm": {"loss": 1.75, "bits_per_byte": 2.525},
}
LINES = {
    "images": "epoch 1/3  loss 1.5000  accuracy 25.00%  validation loss 1.7500  "
    "validation accuracy 50.00%  90 images/s\n",
    "lm": "step 2/5  loss 1.5000  validation loss 1.7500  validation bits/byte 2.525  "
    "90 tokens/s\n",
}
WITHOUT_VALIDATION = {
    "images": "epoch 1/3  loss 1.5000  accuracy 25.00%  90 images/s\n",
    "lm": "step 2/5  loss 1.5000  90 tokens/s\n",
}
BARS = {
    "images": "epoch 1  loss 1.500  accuracy 25.0%  90 images/s",
    "lm": "loss 1.500  90 tokens/s",
}


def shown(name, terminal, validation=VALIDATION):
    """Return what is written in the first steps of a run."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150)
    task = TASKS[name]()
    progress = ConsoleProgress(console, task)
    progress.start(task.eval_steps[-1], 0)
    progress.step(1, TRAIN[name], 90.0)
    record = task.record(task.eval_steps[0], TRAIN[name], validation.get(name, {}), 90.0)
    progress.report(record)
    progress.stop()
    return file.getvalue()


@pytest.mark.parametrize("name", TASKS)
def test_prints_lines_to_a_file(name):
    assert shown(name, terminal=False) == "compiling\n" + LINES[name]
    bare = shown(name, terminal=False, validation={})
    assert bare == "compiling\n" + WITHOUT_VALIDATION[name]


def test_prints_steps_of_a_long_epoch_to_a_file(monkeypatch):
    monkeypatch.setattr("effjax.train.report.PATIENCE", -1)
    step = f"step 1/12  {BARS['images']}\n"
    assert shown("images", terminal=False) == "compiling\n" + step + LINES["images"]


@pytest.mark.parametrize("name", TASKS)
def test_shows_a_bar_on_a_terminal(name):
    text = shown(name, terminal=True)
    assert LINES[name].rstrip() in text and BARS[name] in text
    assert "compiling" in text.partition(BARS[name])[0] and "loss 0.000" not in text


def test_describes_data_and_model():
    data, left_out, model = images.describe(image_task(batch_size=64))
    assert data == "small: 65 train, 5 validation and 37 test images of 8×8×1 in 5 classes"
    assert "is 1 step and leaves out 1 image that would not fill a batch, others" in left_out
    assert "batch 64, 3 epochs, jit over 2 devices" in model
    task = image_task(devices=1, batch_size=14, validation=0, epochs=1)
    data, model = images.describe(task)
    assert data.startswith("small: 70 train and 37 test images")
    assert "batch 14, 1 epoch, jit over 1 device:" in model
    data, model = lm.describe(lm_task(devices=1, steps=1, layers=1))
    assert data == "fox: 1440 train, 180 validation and 180 test bytes"
    assert "1 layer of width 16" in model and "batch 4 × 12, 1 step, 1 device:" in model
