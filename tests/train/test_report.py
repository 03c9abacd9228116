"""The progress display on a terminal and elsewhere."""

import io
import itertools
import sys
from unittest import mock

import pytest

pytest.importorskip("rich")

from rich.console import Console

from effjax.train.errors import TrainError
from effjax.train.report import ConsoleProgress
from effjax.train.task import Progress
from effjax.train.text.config import FinetuneConfig
from effjax.train.trackers import TensorBoard, TrackedProgress, check_tracker, track
from tests.train.small import RecordedProgress, image_task, limited_files
from tests.train.text.small import text_task


@pytest.mark.parametrize(
    ("make", "train", "validation", "line", "bar"),
    [
        (
            image_task,
            {"loss": 1.5, "accuracy": 0.25},
            {"loss": 1.75, "accuracy": 0.5},
            "epoch 1/3  loss 1.5000  accuracy 25.00%  validation loss 1.7500  "
            "validation accuracy 50.00%  90 images/s\n",
            "epoch 1  loss 1.500  accuracy 25.0%  90 images/s",
        ),
        (
            text_task,
            {"loss": 1.5},
            {"loss": 1.75, "margin": 2.525},
            "step 2/5  loss 1.5000  validation loss 1.7500  validation margin 2.525  90 tokens/s\n",
            "loss 1.500  90 tokens/s",
        ),
    ],
)
def test_shows_the_progress(monkeypatch, make, train, validation, line, bar):
    """Evaluations, and the steps of a long epoch; a bar on a terminal."""
    task = make()

    def shown(terminal):
        console = Console(file=(file := io.StringIO()), force_terminal=terminal, width=150)
        progress = ConsoleProgress(console, task)
        progress.start(task.eval_steps[-1], 0)
        progress.step(1, train, 90.0)
        progress.report(task.record(task.eval_steps[0], train, validation, 90.0))
        progress.stop()
        return file.getvalue()

    assert shown(terminal=False) == f"compiling\n{line}"
    text = shown(terminal=True)
    assert line.rstrip() in text and bar in text
    assert "compiling" in text.partition(bar)[0] and "loss 0.000" not in text
    monkeypatch.setattr("time.monotonic", itertools.count(0, 100).__next__)
    text = shown(terminal=False)
    assert text.startswith("compiling\nstep 1/") and text.endswith(f"  {bar}\n{line}")


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


def test_tensorboard_shows_repeated_steps_once(tmp_path):
    """Those that a killed run took after its last checkpoint are withdrawn by the next one."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    for done, losses in (0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}), (2, {3: 3.5}):
        progress = TrackedProgress(Progress(), TensorBoard(tmp_path))
        progress.start(9, done)
        for step, loss in losses.items():
            progress.step(step, {"loss": loss}, 5.0)
        progress.stop()
    events = EventAccumulator(str(tmp_path)).Reload().Tensors("step/loss")
    read = [(event.step, event.tensor_proto.float_val[0]) for event in events]
    assert read == [(1, 1.0), (2, 2.0), (3, 3.5)]


@pytest.mark.parametrize("size", [10, 200])
def test_tensorboard_on_a_full_disk(tmp_path, size, capfd):
    """A warning, and no part of a record, also if there is no room for the first one."""
    pytest.importorskip("tensorboard")
    shown, folder = RecordedProgress(), tmp_path / "tensorboard"
    sizes = [0]
    with limited_files(size):
        progress = track(shown, FinetuneConfig(report_to="tensorboard"), tmp_path)
        progress.start(9, 0)
        for step in range(9):
            sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
            progress.step(step, {"loss": 1.0}, 5.0)
        progress.stop()
    (text,) = shown.texts
    assert text.startswith("warning: --report-to: ") and "File too large" in text
    assert shown.steps == [*range(9)] and capfd.readouterr() == ("", "")
    (file,) = folder.iterdir()
    assert file.stat().st_size == sizes[-1] == sizes[-2] <= size
    assert (sizes[-1] == 0) == (size == 10)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_online_runs(monkeypatch, tmp_path, name):
    """A resumed run has the same identity. An error is shown once, and ends no run."""
    package = mock.MagicMock()
    run = package.init.return_value
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "sums")
    config, shown = FinetuneConfig(report_to=name, lora=4), RecordedProgress()

    def report(*losses):
        progress = track(shown, config, tmp_path)
        progress.start(9, 0)
        for step, loss in enumerate(losses, 1):
            progress.step(step, {"loss": loss}, 5.0)
        progress.report({"kind": "step", "step": 1, "validation_loss": 1.5})
        progress.stop()

    report(2.0)
    report(2.0)
    one, again = package.init.call_args_list
    assert one == again and not shown.texts
    options = one.kwargs
    assert options["project"] == "sums" and options["resume"] == "allow"
    assert options["name"].startswith(tmp_path.name) and options["config"]["lora"] == 4
    assert run.mock_calls == 2 * [
        mock.call.log({"step/loss": 2.0}, step=1),
        mock.call.log({"validation/loss": 1.5}, step=1),
        mock.call.finish(),
    ]
    run.log.side_effect = ConnectionError("no network")
    report(2.0, 2.0)
    package.init.side_effect = ConnectionError("no network")
    report(2.0)
    assert len(shown.texts) == 2 and all("no network" in text for text in shown.texts)


def test_a_missing_tracker(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainError, match="`report_to`"):
        check_tracker("tensorboard")
