"""What the loop does with any task: every test runs on images and on text."""

import json
import math
import shutil
import signal
from typing import Any

import jax
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import TrainError
from effjax.train.loop import Progress, fit
from effjax.train.run_directory import RunDirectory
from tests.train.small import CompiledOnce, image_task, lm_task

pytest.importorskip("matplotlib")

MAKE = {"images": image_task, "lm": lm_task}


@pytest.fixture(scope="module", params=MAKE)
def task(request):
    return CompiledOnce(MAKE[request.param]())


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """A run, and what it came to."""
    run = new_run(tmp_path_factory.mktemp("whole") / "run", task)
    return run, fit(task, run)


def new_run(path, task):
    return RunDirectory.create(path, task.describe(), overwrite=False)


class Interrupt(Progress):
    """Ctrl-C at a step."""

    def __init__(self, at):
        self.at = at
        self.stopped = False

    def step(self, step, measured, rate):
        if step == self.at:
            signal.raise_signal(signal.SIGINT)

    def stop(self):
        self.stopped = True


def after_first_test(task):
    """Ctrl-C between the first test and the second one."""
    return Interrupt(task.numbers[0] * task.steps_each + 1)


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def kinds(run):
    return [record["kind"] for record in lines(run)]


def without_timing(run):
    timing = {"seconds", "images_per_second", "tokens_per_second"}
    return [{k: v for k, v in record.items() if k not in timing} for record in lines(run)]


def checkpoints(run):
    return {int(path.name) for path in run.checkpoints.iterdir()}


def test_a_run_and_its_files(task, whole):
    run, result = whole
    records = lines(run)
    assert [r["kind"] for r in records] == [task.kind] * 3 + ["final"]
    assert records[-1] == {"kind": "final"} | vars(result)
    records = records[:3]
    assert [r[task.kind] for r in records] == list(task.numbers)
    assert [r["step"] for r in records] == [n * task.steps_each for n in task.numbers]
    assert records[2]["train_loss"] < records[0]["train_loss"]
    assert result.test_loss == records[2]["test_loss"]
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    best = max(records, key=task.score)[task.kind]
    assert checkpoints(run) == {task.numbers[-1], best}
    assert json.loads((run.path / "config.json").read_text()) == task.describe()
    names = {p.name for p in run.path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}


@pytest.mark.parametrize("task", ["images"], indirect=True)
def test_what_is_said_of_images(task, whole):
    run, result = whole
    records = lines(run)[:3]
    best = max(r["test_accuracy"] for r in records)
    assert result.best_test_accuracy == best
    assert records[result.best_epoch - 1]["test_accuracy"] == best
    assert result.best_epoch in checkpoints(run)
    config = json.loads((run.path / "config.json").read_text())
    assert config["options"]["batch_size"] == 16
    assert config["data"]["class_names"] == list("abcde")


@pytest.mark.parametrize("task", ["lm"], indirect=True)
def test_what_is_said_of_text(task, whole):
    run, result = whole
    records = lines(run)[:3]
    assert records[0]["train_loss"] < math.log(256) + 0.1
    np.testing.assert_allclose(result.test_bits_per_byte, result.test_loss / math.log(2))
    assert result.best_test_loss == min(r["test_loss"] for r in records)
    assert result.num_params == 2 * 256 * 16 + 16 + 2 * (12 * 16**2 + 2 * 16)
    assert 3 < result.unigram_bits < 5 and result.tokens_per_second > 0
    assert checkpoints(run) == {5, result.best_step}


def test_resuming_after_ctrl_c_ends_with_the_same_bits(tmp_path, task, whole):
    run = new_run(tmp_path / "run", task)
    progress = after_first_test(task)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, progress)
    assert progress.stopped
    assert kinds(run) == [task.kind, "interrupted"]
    assert (run.path / "curve.png").exists()
    assert checkpoints(run) == {task.numbers[0]}

    fit(task.task, RunDirectory.open(run.path), resume=True)  # compiled anew, as it would be
    assert without_timing(run) == without_timing(whole[0])
    like, last = task.initial_state(), task.numbers[-1]
    with Checkpoints(whole[0].checkpoints) as a, Checkpoints(run.checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(like, last)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_ctrl_c_before_the_first_test_leaves_a_run_to_resume(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, Interrupt(at=1))
    assert lines(run) == [{"kind": "interrupted"}]
    assert (run.path / "curve.png").exists()
    assert checkpoints(run) == {0}


def test_ctrl_c_before_the_first_checkpoint_leaves_a_run_to_resume(
    tmp_path, task, whole, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    run = new_run(tmp_path / "run", task)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CompiledOnce, "initial_state", interrupt)
        fit(task, run)
    assert list(run.checkpoints.iterdir()) == []
    fit(task, RunDirectory.open(run.path), resume=True)
    assert without_timing(run) == without_timing(whole[0])


def test_ctrl_c_on_a_full_disk(tmp_path, task, monkeypatch):
    run = new_run(tmp_path / "run", task)
    monkeypatch.setattr(RunDirectory, "append", full_disk)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, Interrupt(at=1))


def test_resuming_a_finished_run_without_its_metrics(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    last = task.numbers[1]
    with Checkpoints(run.checkpoints) as saved:
        saved.save(last, task.initial_state(), best=last)
    kind, first = task.kind, task.numbers[0]
    message = rf"metrics\.jsonl: {kind} {first} is missing, .*of {kind} {last}; .*start a new run"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
    assert not (run.path / "metrics.jsonl").exists()


def unreadable(*_, **__):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("damage", ["cut short", "unreadable"])
def test_a_damaged_checkpoint_is_named(tmp_path, task, monkeypatch, damage):
    run, number = new_run(tmp_path / "run", task), task.numbers[0]
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, after_first_test(task))
    with monkeypatch.context() as patch:
        if damage == "cut short":
            file = run.checkpoints / str(number) / "default" / "_METADATA"
            file.write_bytes(file.read_bytes()[:100])
        else:
            patch.setattr("orbax.checkpoint.CheckpointManager.restore", unreadable)
        message = rf"checkpoints/{number}: cannot be restored .*; delete this directory, then res"
        with pytest.raises(TrainError, match=message):
            fit(task, run, resume=True)
    shutil.rmtree(run.checkpoints / str(number))
    fit(task, run, resume=True)
    assert kinds(run) == [task.kind] * 3 + ["final"]


def test_resume_needs_the_same_data(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    (run.path / "config.json").write_text(json.dumps(task.describe() | {"data": {}}))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(task, run, resume=True)


class Poisoned(CompiledOnce):
    """From the first step on, nothing is a number."""

    def initial_state(self):
        state = self.task.initial_state()
        return jax.tree.map(
            lambda a: np.full_like(a, np.nan) if np.issubdtype(a.dtype, np.floating) else a, state
        )

    def make_step(self):
        return self.task.make_step()


def test_a_loss_that_is_not_a_number_is_said(tmp_path, task):
    poisoned: Any = Poisoned(task)
    message = "the train loss is nan (in epoch|at step) 1; use a learning_rate below 0.0"
    with pytest.raises(TrainError, match=message):
        fit(poisoned, new_run(tmp_path / "run", task))
    assert checkpoints(RunDirectory(tmp_path / "run")) == {0}


def diverges(kind, **options):
    """A task that does; of text only with --exhaustive."""
    marks = [pytest.mark.exhaustive] if kind == "lm" else []
    return pytest.param(MAKE[kind], {"devices": 1} | options, marks=marks, id=kind)


@pytest.mark.parametrize(
    ("make", "options"),
    [diverges("images", learning_rate=1e30), diverges("lm", learning_rate=1e38, steps=4)],
)
def test_a_train_loss_that_is_not_finite_is_said(tmp_path, make, options):
    wild = make(**options)
    message = r"the train loss is .* (in epoch|at step) \d; use a learning_rate below 1e"
    with pytest.raises(TrainError, match=message):
        fit(wild, new_run(tmp_path / "run", wild))


@pytest.mark.parametrize(
    ("make", "options"),  # tested after one step
    [
        diverges("images", learning_rate=1e38, batch_size=70),
        diverges("lm", learning_rate=1e38, report_every=1),
    ],
)
def test_a_test_loss_that_is_not_finite_is_said(tmp_path, make, options):
    wild = make(**options)
    message = "the test loss is .* (in epoch|at step) 1; use a learning_rate"
    with pytest.raises(TrainError, match=message):
        fit(wild, new_run(tmp_path / "run", wild))


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("writes", [(RunDirectory, "append"), (Checkpoints, "save")])
def test_a_full_disk_is_said(tmp_path, task, monkeypatch, writes):
    run = new_run(tmp_path / "run", task)
    monkeypatch.setattr(*writes, full_disk)
    with pytest.raises(TrainError, match=r"run: cannot be written to \(No space left.*then resume"):
        fit(task, run)
