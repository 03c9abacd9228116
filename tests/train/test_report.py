"""The progress display on a terminal and elsewhere."""

import io
import itertools
import sys
import types

import pytest

pytest.importorskip("rich")

from rich.console import Console

from effjax.train.errors import TrainError
from effjax.train.report import ConsoleProgress
from effjax.train.task import Progress
from effjax.train.text.config import LMConfig
from effjax.train.trackers import TensorBoard, TrackedProgress, check_tracker, track
from tests.train.small import RecordedProgress, image_task, lm_task

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
BARS = {
    "images": "epoch 1  loss 1.500  accuracy 25.0%  90 images/s",
    "lm": "loss 1.500  90 tokens/s",
}


def shown(name, terminal):
    """Return what is written in the first steps of a run."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150)
    task = TASKS[name]()
    progress = ConsoleProgress(console, task)
    progress.start(task.eval_steps[-1], 0)
    progress.step(1, TRAIN[name], 90.0)
    record = task.record(task.eval_steps[0], TRAIN[name], VALIDATION[name], 90.0)
    progress.report(record)
    progress.stop()
    return file.getvalue()


@pytest.mark.parametrize("name", TASKS)
def test_prints_lines_to_a_file(name):
    assert shown(name, terminal=False) == "compiling\n" + LINES[name]


def test_prints_steps_of_a_long_epoch_to_a_file(monkeypatch):
    monkeypatch.setattr("time.monotonic", itertools.count(0, 100).__next__)
    step = f"step 1/12  {BARS['images']}\n"
    assert shown("images", terminal=False) == "compiling\n" + step + LINES["images"]


@pytest.mark.parametrize("name", TASKS)
def test_shows_a_bar_on_a_terminal(name):
    text = shown(name, terminal=True)
    assert LINES[name].rstrip() in text and BARS[name] in text
    assert "compiling" in text.partition(BARS[name])[0] and "loss 0.000" not in text


def test_tensorboard(tmp_path):
    """The files have the metrics of each step and of each evaluation."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    progress = TrackedProgress(Progress(), TensorBoard(tmp_path / "tensorboard"))
    progress.step(1, {"loss": 2.0}, 5.0)
    progress.step(2, {"loss": 1.5}, 5.0)
    samples = [{"prompt": "2 + 3?", "text": "5"}]
    numbers = {"train_loss": 1.75, "learning_rate": 0.5}
    progress.report({"kind": "step", "step": 2, **numbers, "samples": samples})
    progress.stop()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("samples/1")
    assert text.tensor_proto.string_val[0].decode() == "> 2 + 3?\n\n5"
    read = {
        name: [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
        if name != "samples/1"
    }
    assert read == {
        "step/loss": [(1, 2), (2, 1.5)], "train/loss": [(2, 1.75)], "learning_rate": [(2, 0.5)]
    }  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_online_runs(monkeypatch, tmp_path, name):
    """A resumed run has the same identity. An error is shown once, and ends no run."""
    calls = []

    class Package(types.ModuleType):
        is_broken = False

        def init(self, **options):
            calls.append(options)
            return self

        def log(self, values, step):
            if self.is_broken:
                raise ConnectionError("no network")
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    package = Package(name)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "sums")
    config, shown = LMConfig(report_to=name), RecordedProgress()
    for _ in range(2):
        progress = track(shown, config, tmp_path)
        progress.step(1, {"loss": 2.0}, 5.0)
        progress.report({"kind": "step", "step": 1, "validation_loss": 1.5})
        progress.stop()
    assert calls[:4] == calls[4:] and not shown.texts
    assert calls[1:4] == [(1, {"step/loss": 2.0}), (1, {"validation/loss": 1.5}), "finished"]
    assert calls[0]["project"] == "sums" and calls[0]["resume"] == "allow"
    assert calls[0]["name"].startswith(tmp_path.name) and calls[0]["config"]["layers"] == 4

    package.is_broken = True
    progress = track(shown, config, tmp_path)
    for step in (1, 2):
        progress.step(step, {"loss": 2.0}, 5.0)
    progress.stop()
    package.init = lambda **_: package.log({}, 1)
    track(shown, config, tmp_path).step(1, {"loss": 2.0}, 5.0)
    assert len(shown.texts) == 2 and all("no network" in text for text in shown.texts)


def test_a_missing_tracker(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainError, match="`report_to` .=tensorboard. needs tensorboard"):
        check_tracker("tensorboard")
