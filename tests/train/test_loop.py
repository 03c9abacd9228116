"""The training loop with any task: files, resuming, errors."""

import json
import math
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import PreemptionError, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress
from tests.tiers import vary
from tests.train.small import (
    CachedTask,
    InterruptAt,
    RecordedProgress,
    assert_same_parameters,
    image_task,
    lines_without_times,
    lm_task,
    new_run,
)
from tests.train.test_checkpoint import flip_bit

pytest.importorskip("matplotlib")

MAKE = {"images": image_task, "lm": lm_task}
both_kinds = pytest.mark.parametrize("task", MAKE, indirect=True)
vary_kind = vary("task", MAKE, indirect=True)


@pytest.fixture(scope="module", params=["images"])
def task(request):
    return CachedTask(MAKE[request.param]())


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """Train a run without interruption; return it and its result."""
    run = new_run(tmp_path_factory.mktemp("whole") / "run", task)
    return run, fit(task, run)


class FirstIsBest(CachedTask):
    """A task whose first evaluation has the highest score; records what is evaluated."""

    def __init__(self, task):
        super().__init__(task)
        self.evaluated = []

    def score(self, record):
        return (-record["step"],)

    def make_eval(self):
        evaluate = self.task.make_eval()

        def evaluate_and_record(state, part):
            self.evaluated.append((part, int(state.step)))
            return evaluate(state, part)

        return evaluate_and_record


@pytest.fixture(scope="module")
def first_is_best(task, tmp_path_factory):
    """Train a run that keeps two checkpoints, the first and the last one."""
    first: Any = FirstIsBest(task)
    run = new_run(tmp_path_factory.mktemp("first") / "run", first)
    return first, run, fit(first, run)


def copy_of(run, path):
    return RunDirectory.open(shutil.copytree(run.path, path))


def kinds(run):
    return [line["kind"] for line in run.read_metrics()]


def checkpoints(run):
    return {path.name for path in run.checkpoints.iterdir()}


@both_kinds
def test_files_of_a_run(task, whole):
    run, result = whole
    lines = run.read_metrics()
    assert kinds(run) == [task.unit] * 3 + ["final"]
    assert lines[-1] == {"kind": "final"} | vars(result)
    records = lines[:3]
    assert [record["step"] for record in records] == list(task.eval_steps)
    assert records[2]["train_loss"] < records[0]["train_loss"]
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    best = max(records, key=task.score)
    assert result.validation_loss == best["validation_loss"]
    assert checkpoints(run) == {str(task.eval_steps[-1]), str(best["step"])}
    assert json.loads((run.path / "config.json").read_text()) == task.describe()
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}


def test_result_of_images(whole):
    run, result = whole
    records = run.read_metrics()[:3]
    assert [record["epoch"] for record in records] == [1, 2, 3]
    best = max(record["validation_accuracy"] for record in records)
    assert result.validation_accuracy == best
    assert records[result.best_epoch - 1]["validation_accuracy"] == best
    config = run.read_config()
    assert config["options"]["batch_size"] == 16
    assert config["data"]["class_names"] == list("abcde")
    assert (config["data"]["train_images"], config["data"]["validation_images"]) == (65, 5)


@pytest.mark.parametrize("task", ["lm"], indirect=True)
def test_result_of_text(task, whole):
    run, result = whole
    records = run.read_metrics()[:3]
    assert records[0]["train_loss"] < math.log(256) + 0.6
    np.testing.assert_allclose(result.test_bits_per_byte, result.test_loss / math.log(2))
    assert result.validation_loss == min(record["validation_loss"] for record in records)
    assert result.num_params == 2 * 256 * 16 + 16 + 2 * (4 * 16**2 + 3 * 16 * 48 + 2 * 16)
    assert 3 < result.unigram_bits < 5 and result.tokens_per_second > 0


def test_tests_the_best_parameters_once(task, whole, first_is_best):
    first, run, result = first_is_best
    steps = list(task.eval_steps)
    assert first.evaluated[:4] == [*(("validation", s) for s in steps), ("test", steps[0])]
    assert run.read_metrics()[-1][f"best_{task.unit}"] == run.read_metrics()[0][task.unit]
    assert checkpoints(run) == {str(steps[0]), str(steps[-1])}
    assert not any(name.startswith("test") for line in run.read_metrics()[:3] for name in line)
    assert result.test_loss > whole[1].test_loss  # the small models learn to the end


def test_stops_without_improvement(tmp_path, task):
    """After the second validation, and a resumed run takes no further step."""
    first = FirstIsBest(CachedTask(task, patience=1))
    run, (best, last, _) = new_run(tmp_path / "run", first), task.eval_steps
    result = fit(first, run)
    assert kinds(run) == [task.unit] * 2 + ["final"] and checkpoints(run) == {str(best), str(last)}
    assert first.evaluated[-1] == ("test", best)
    again = fit(first, run, resume=True)
    assert again.test_loss == result.test_loss and checkpoints(run) == {str(best), str(last)}


@vary_kind
def test_resumes_exactly_after_ctrl_c(tmp_path, task, whole):
    run, progress = new_run(tmp_path / "run", task), InterruptAt(task.eval_steps[0] + 1)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, progress)
    assert progress.stopped
    assert kinds(run) == [task.unit, "interrupted"]
    assert (run.path / "curve.png").exists()
    assert checkpoints(run) == {str(task.eval_steps[0])}

    fit(task.task, RunDirectory.open(run.path), resume=True)  # compiled anew
    assert lines_without_times(run) == lines_without_times(whole[0])
    assert_same_parameters(task, whole[0], run)


@vary("task, at", [("images", 2), ("images", 4), ("lm", 1), ("lm", 4)], indirect=["task"])
def test_resumes_exactly_after_a_stop(tmp_path, task, whole, at):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(PreemptionError, match=r"(in epoch|at step) \d"):
        fit(task, run, stop=lambda step: step >= at)
    assert kinds(run)[-1] == "interrupted" and "final" not in kinds(run)
    assert str(at) in checkpoints(run)
    fit(task, RunDirectory.open(run.path), resume=True)
    assert lines_without_times(run) == lines_without_times(whole[0])
    assert_same_parameters(task, whole[0], run)


class Start(Progress):
    """The number of steps that a run starts with."""

    def start(self, steps, done):
        self.done = done


def test_resumes_exactly_from_the_last_checkpoint(tmp_path, task, whole):
    """After an interruption that nothing announced, of a run with a checkpoint after each step."""
    often: Any = CachedTask(task.task, checkpoint_every=1)
    often._programs, often._initial_state = task._programs, task._initial_state
    run, step = new_run(tmp_path / "run", often), task.eval_steps[0] + 2
    with pytest.raises(KeyboardInterrupt):
        fit(often, run, InterruptAt(step))
    last = max(map(int, checkpoints(run)))
    assert last >= step - 1
    started = Start()
    fit(task, RunDirectory.open(run.path), started, resume=True)  # the option may change
    assert started.done == last
    assert lines_without_times(run) == lines_without_times(whole[0])
    assert_same_parameters(task, whole[0], run)


def test_ctrl_c_before_the_first_evaluation(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, InterruptAt(1))
    assert kinds(run) == ["interrupted"]
    assert (run.path / "curve.png").exists()
    assert checkpoints(run) == {"0"}


def test_ctrl_c_before_the_first_checkpoint(tmp_path, task, whole, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    run = new_run(tmp_path / "run", task)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CachedTask, "initial_state", interrupt)
        fit(task, run)
    assert checkpoints(run) == set()
    fit(task, RunDirectory.open(run.path), resume=True)
    assert lines_without_times(run) == lines_without_times(whole[0])


def test_a_damaged_last_checkpoint(tmp_path, task, first_is_best):
    first, finished, _ = first_is_best
    run, steps = copy_of(finished, tmp_path / "run"), task.eval_steps
    flip_bit(run.checkpoints / str(steps[-1]))
    progress = RecordedProgress()
    fit(first, run, progress, resume=True)
    (message,) = progress.texts
    assert f"checkpoints/{steps[-1]} is damaged (" in message
    assert message.endswith(f"Using {run.checkpoints}/{steps[0]}")
    assert progress.steps[0] == steps[0] + 1
    assert lines_without_times(run) == lines_without_times(finished)
    assert_same_parameters(task, run, finished)


def test_a_damaged_best_checkpoint(tmp_path, first_is_best, whole):
    """The next best parameters are tested, here those of the last step."""
    first, finished, _ = first_is_best
    run, steps = copy_of(finished, tmp_path / "run"), first.eval_steps
    flip_bit(run.checkpoints / str(steps[0]))
    progress = RecordedProgress()
    result = fit(first, run, progress, resume=True)
    assert f"checkpoints/{steps[0]} is damaged" in progress.texts[0]
    assert result.test_loss == whole[1].test_loss
    assert checkpoints(run) == {f"damaged-{steps[0]}", str(steps[-1])}


def test_checkpoints_without_metrics(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    last = task.eval_steps[1]
    with Checkpoints(run.checkpoints) as saved:
        saved.save(last, task.initial_state(), score=(1.0,), records=[{"step": last}])
    message = rf"jsonl was changed after the checkpoint of step {last} was saved\. .* a new run"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
    assert not (run.path / "metrics.jsonl").exists()


def test_a_changed_digit_of_metrics(tmp_path, first_is_best):
    first, finished, _ = first_is_best
    run = copy_of(finished, tmp_path / "run")
    file = run.path / "metrics.jsonl"
    text = file.read_text()
    loss = repr(run.read_metrics()[0]["validation_loss"])
    file.write_text(text.replace(loss, loss[:5] + str(9 - int(loss[5])) + loss[6:], 1))
    with pytest.raises(TrainError, match=r"metrics\.jsonl was changed after the checkpoint of"):
        fit(first, run, resume=True)
    file.write_text(text)
    fit(first, run, resume=True)
    assert lines_without_times(run) == lines_without_times(finished)


def test_a_copy_in_place_of_the_last_checkpoint(tmp_path, first_is_best):
    first, finished, _ = first_is_best
    run, steps = copy_of(finished, tmp_path / "run"), first.eval_steps
    shutil.rmtree(run.checkpoints / str(steps[-1]))
    shutil.copytree(run.checkpoints / str(steps[0]), run.checkpoints / str(steps[-1]))
    progress = RecordedProgress()
    fit(first, run, progress, resume=True)
    assert f"is damaged (its files are those of step {steps[0]})" in progress.texts[0]
    assert lines_without_times(run) == lines_without_times(finished)
    assert_same_parameters(first, run, finished)


def test_a_locked_run(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with run.locked(), pytest.raises(TrainError, match="run: another process is training in it"):
        fit(task, RunDirectory.open(run.path), resume=True)
    assert run.read_metrics() == []


def of_length(task, length, **options):
    """Return a similar task of another length."""
    make = MAKE["images" if task.unit == "epoch" else "lm"]
    return make(**{f"{task.unit}s": length}, **options)


def length_of(task):
    return task.describe()["options"][f"{task.unit}s"]


@vary_kind
def test_a_longer_run(tmp_path, task, whole):
    """All further steps follow the schedule of the longer run; the earlier lines stay."""
    run, length = copy_of(whole[0], tmp_path / "run"), length_of(task) + 1
    longer = of_length(task, length, data="elsewhere")  # the same data
    fit(longer, run, resume=True)
    lines = run.read_metrics()
    assert lines[:3] == whole[0].read_metrics()[:3]
    end = longer.eval_steps[-1]
    assert [line["step"] for line in lines[:-1]] == [*task.eval_steps, end]
    assert lines[-1]["kind"] == "final"
    before = task.task.record(end, {"loss": 0, "accuracy": 0}, {}, 0.0)["learning_rate"]
    assert lines[3]["learning_rate"] > before
    assert run.read_config() == longer.describe()

    message = rf"`{task.unit}s` \(=1\) must be at least {length}: .*run has taken {end} steps"
    with pytest.raises(TrainError, match=message):
        fit(of_length(task, 1), run, resume=True)
    assert run.read_metrics() == lines and run.read_config() == longer.describe()


@pytest.mark.parametrize("change", ["data", "seed", "edited seed", "edited length"])
def test_a_run_of_other_options_or_data(tmp_path, task, whole, change):
    run, resumed = copy_of(whole[0], tmp_path / "run"), task
    config, file = task.describe(), run.path / "config.json"
    if change == "data":
        file.write_text(json.dumps(config | {"data": {}}))
        message = "was trained on other data"
    elif change == "seed":
        resumed = of_length(task, length_of(task), seed=1)
        message = r"run was trained with `seed` \(=0\), not with 1\. Resume"
    else:
        config["options"]["seed" if change == "edited seed" else f"{task.unit}s"] += 8
        file.write_text(json.dumps(config))
        message = r"config\.json: its options were changed.*start a new run"
    with pytest.raises(TrainError, match=message):
        fit(resumed, run, resume=True)
    assert run.read_metrics() == whole[0].read_metrics()
    assert checkpoints(run) == checkpoints(whole[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MAKE)
def test_without_validation_the_last_step_is_the_best(tmp_path, kind):
    one: Any = CachedTask(MAKE[kind](validation=0))
    run = new_run(tmp_path / "run", one)
    with pytest.raises(KeyboardInterrupt):
        fit(one, run, InterruptAt(one.eval_steps[0] + 1))
    result = fit(one, RunDirectory.open(run.path), resume=True)
    assert vars(result)[f"best_{one.unit}"] == length_of(one)
    assert result.validation_loss is None
    assert checkpoints(run) == {str(one.eval_steps[-1])}


class Delete(Progress):
    """Delete a folder after the first evaluation."""

    def __init__(self, path):
        self.path = path

    def report(self, record):
        shutil.rmtree(self.path, ignore_errors=True)


# The background save of Orbax fails a second time, where no code can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_is_deleted_during_training(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(TrainError, match=r"run was deleted during training\. Start a new run"):
        fit(task, run, Delete(run.path))


def test_a_run_that_is_deleted_at_its_start(tmp_path, task, monkeypatch):
    """Orbax makes the directory again."""

    def delete(*_):
        shutil.rmtree(run.path)
        return state()

    run, state = new_run(tmp_path / "run", task), task.initial_state
    monkeypatch.setattr(task, "initial_state", delete, raising=False)
    with pytest.raises(TrainError, match=r"run was deleted during training\. Start a new run"):
        fit(task, run)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_is_deleted_before_it_is_stopped(tmp_path, task):
    """The checkpoint that was just written cannot be resumed."""

    def delete_and_stop(step):
        shutil.rmtree(run.path, ignore_errors=True)  # Orbax writes into it
        return True

    run = new_run(tmp_path / "run", task)
    with pytest.raises(TrainError, match=r"run was deleted during training\. Start a new run"):
        fit(task, run, stop=delete_and_stop)


class NanState(CachedTask):
    """A task whose parameters are NaN."""

    def initial_state(self):
        return jax.tree.map(
            lambda a: a.at[...].set(np.nan) if np.issubdtype(a.dtype, np.floating) else a,
            self.task.initial_state(),
        )

    def make_step(self):
        return self.task.make_step()


def test_stops_at_a_train_loss_that_is_nan(tmp_path, task):
    nan: Any = NanState(task)
    message = "the loss or a gradient is not finite (in epoch|at step) 1. This is the first step: "
    with pytest.raises(TrainError, match=message):
        fit(nan, new_run(tmp_path / "run", task))
    assert checkpoints(RunDirectory(tmp_path / "run")) == {"0"}


@pytest.mark.parametrize("part", ["validation", "test"])
def test_stops_at_an_evaluation_that_is_not_finite(tmp_path, task, part, monkeypatch):
    evaluate = task.make_eval()

    def diverge(state, of):
        return dict(evaluate(state, of)) | ({"loss": math.inf} if of == part else {})

    monkeypatch.setattr(task, "make_eval", lambda: diverge, raising=False)
    message = rf"the {part} loss is not finite (in epoch|at step) \d. Use a `learning_rate` below"
    with pytest.raises(TrainError, match=message):
        fit(task, new_run(tmp_path / "run", task))


def full_disk(*_, **__):
    raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [OS error 28]")


def file_limit_in_orbax(*_, **__):
    raise ValueError("NOT_FOUND: Error writing: File too large [OS error 27: EFBIG]")


def failure_in_orbax(*_, **__):
    raise ValueError("a zarr metadata file is missing\nand so on")


@pytest.mark.parametrize(
    ("method", "failure", "message"),
    [
        ("save", full_disk, "No space .* Make room"),
        ("wait_until_finished", full_disk, "No space .* Make room"),  # in the background
        ("save", failure_in_orbax, "ValueError in Orbax.* Correct"),
        ("save", file_limit_in_orbax, "File too large, see ulimit -f.* Correct"),
    ],
)
def test_files_that_cannot_be_written(tmp_path, task, monkeypatch, method, failure, message):
    run = new_run(tmp_path / "run", task)
    monkeypatch.setattr(f"orbax.checkpoint.CheckpointManager.{method}", failure)
    with pytest.raises(TrainError, match=rf"run.* cannot be written to \({message}.*then resume"):
        fit(task, run)
