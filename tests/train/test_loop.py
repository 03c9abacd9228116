"""The training loop with any task: files, resuming, errors."""

import json
import math
import shutil
from typing import Any
from unittest import mock

import pytest

from effjax.train.errors import PreemptionError, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress
from tests.tiers import vary
from tests.train.small import (
    CachedTask,
    InterruptAt,
    RecordedProgress,
    assert_same_run,
    image_task,
    new_run,
)
from tests.train.test_checkpoint import flip_bit
from tests.train.text.small import text_task

pytest.importorskip("matplotlib")

MAKE = {"images": image_task, "text": text_task}
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


def read_config(run):
    """Return the content of config.json that the task describes."""
    config = run.read_config()
    config.get("base", {}).pop("weights_sha256", None)  # added when the run starts
    return config


def checkpoints(run):
    return {path.name for path in run.checkpoints.iterdir()}


@pytest.mark.parametrize("task", MAKE, indirect=True)
def test_files_of_a_run(task, whole):
    run, result = whole
    *records, final = run.read_metrics()
    assert kinds(run) == [task.unit] * 3 + ["final"] and final == {"kind": "final"} | vars(result)
    assert [record["step"] for record in records] == list(task.eval_steps)
    assert records[2]["train_loss"] < records[0]["train_loss"]
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    best = max(records, key=task.score)
    assert result.validation_loss == best["validation_loss"]
    assert checkpoints(run) == {str(task.eval_steps[-1]), str(best["step"])}
    assert read_config(run) == task.describe()
    digest = task.digest_base()
    assert run.read_config().get("base", {}).get("weights_sha256") == digest
    exported = {"model"} if digest else set()
    names = {path.name for path in run.path.iterdir()} - exported
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}


def test_result_of_images(whole):
    run, result = whole
    records = run.read_metrics()[:3]
    assert [record["epoch"] for record in records] == [1, 2, 3]
    best = max(record["validation_accuracy"] for record in records)
    assert result.validation_accuracy == best
    assert records[result.best_epoch - 1]["validation_accuracy"] == best
    data = run.read_config()["data"]
    assert data["class_names"] == list("abcde")
    assert (data["train_images"], data["validation_images"]) == (65, 5)


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
@pytest.mark.parametrize("evaluations", [1, 0])
def test_resumes_exactly_after_ctrl_c(tmp_path, task, whole, evaluations):
    """In the step after an evaluation, or in the first one."""
    saved = [0, *task.eval_steps][evaluations]
    run, progress = new_run(tmp_path / "run", task), InterruptAt(saved + 1)
    with pytest.raises(KeyboardInterrupt):
        fit(task, run, progress)
    assert progress.stopped and (run.path / "curve.png").exists()
    assert kinds(run) == [task.unit] * evaluations + ["interrupted"]
    assert checkpoints(run) == {str(saved)}
    fit(task.task, RunDirectory.open(run.path), resume=True)  # compiled anew
    assert_same_run(task, run, whole[0])


@vary("task, at", [("images", 2), ("images", 4), ("text", 1), ("text", 4)], indirect=["task"])
def test_resumes_exactly_after_a_stop(tmp_path, task, whole, at):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(PreemptionError, match=r"(in epoch|at step) \d"):
        fit(task, run, stop=lambda step: step >= at)
    assert kinds(run)[-1] == "interrupted" and "final" not in kinds(run)
    assert str(at) in checkpoints(run)
    fit(task, RunDirectory.open(run.path), resume=True)
    assert_same_run(task, run, whole[0])


def test_resumes_exactly_from_the_last_checkpoint(tmp_path, task, whole):
    """After an interruption that nothing announced, of a run with a checkpoint after each step."""
    often: Any = CachedTask(task.task, checkpoint_every=1)
    often._programs, often._initial_state = task._programs, task._initial_state
    run, step = new_run(tmp_path / "run", often), task.eval_steps[0] + 2
    with pytest.raises(KeyboardInterrupt):
        fit(often, run, InterruptAt(step))
    last = max(map(int, checkpoints(run)))
    assert last >= step - 1
    progress = RecordedProgress()
    fit(task, RunDirectory.open(run.path), progress, resume=True)  # the option may change
    assert progress.steps[0] == last + 1
    assert_same_run(task, run, whole[0])


def test_a_damaged_best_checkpoint(tmp_path, first_is_best, whole):
    """The next best parameters are tested, here those of the last step."""
    first, finished, _ = first_is_best
    run, (best, _, last) = copy_of(finished, tmp_path / "run"), first.eval_steps
    flip_bit(run.checkpoints / str(best))
    progress = RecordedProgress()
    result = fit(first, run, progress, resume=True)
    assert f"checkpoints/{best} is damaged" in progress.texts[0]
    assert result.test_loss == whole[1].test_loss
    assert checkpoints(run) == {f"damaged-{best}", str(last)}


def test_a_deleted_best_checkpoint(tmp_path, task):
    """Patience counts from the best validation whose checkpoint is left."""
    first = FirstIsBest(CachedTask(task, patience=1))
    run, (best, second, last) = new_run(tmp_path / "run", first), task.eval_steps
    fit(first, run)
    assert checkpoints(run) == {str(best), str(second)}
    shutil.rmtree(run.checkpoints / str(best))
    progress = RecordedProgress()
    result = fit(first, run, progress, resume=True)
    (text,) = progress.texts
    assert text.startswith(f"{run.checkpoints / str(best)}, the best checkpoint, is missing")
    assert progress.steps == [*range(second + 1, last + 1)]
    assert first.evaluated[-1] == ("test", second)
    assert vars(result)[f"best_{task.unit}"] == run.read_metrics()[1][task.unit]


def test_changed_metrics(tmp_path, first_is_best):
    first, finished, _ = first_is_best
    run = copy_of(finished, tmp_path / "run")
    file = run.path / "metrics.jsonl"
    text, loss = file.read_text(), repr(run.read_metrics()[0]["validation_loss"])
    changed = text.replace(loss, loss[:5] + str(9 - int(loss[5])) + loss[6:], 1)
    file.write_text(changed)
    with pytest.raises(TrainError, match=r"metrics\.jsonl was changed"):
        fit(first, run, resume=True)
    assert file.read_text() == changed


def test_a_locked_run(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with run.locked(), pytest.raises(TrainError, match="another process"):
        fit(task, RunDirectory.open(run.path), resume=True)
    assert run.read_metrics() == []


def of_length(task, length, **options):
    """Return a similar task of another length."""
    make = MAKE["images" if task.unit == "epoch" else "text"]
    return make(**{f"{task.unit}s": length}, **options)


def length_of(task):
    return task.describe()["options"][f"{task.unit}s"]


@vary_kind
def test_a_longer_run(tmp_path, task, whole):
    """All further steps follow the schedule of the longer run; the earlier lines stay."""
    run, length = copy_of(whole[0], tmp_path / "run"), length_of(task) + 1
    moved = {"data": "elsewhere"} if task.unit == "epoch" else {}  # the same data
    longer = of_length(task, length, **moved)
    fit(longer, run, resume=True)
    lines = run.read_metrics()
    assert lines[:3] == whole[0].read_metrics()[:3]
    end = longer.eval_steps[-1]
    assert [line["step"] for line in lines[:-1]] == [*task.eval_steps, end]
    assert lines[-1]["kind"] == "final"
    before = task.task.record(end, {"loss": 0, "accuracy": 0}, {}, 0.0)["learning_rate"]
    assert lines[3]["learning_rate"] > before
    assert read_config(run) == longer.describe()

    with pytest.raises(TrainError, match=rf"`{task.unit}s` \(=1\) .*{length}: .*{end} steps"):
        fit(of_length(task, 1), run, resume=True)
    assert run.read_metrics() == lines and read_config(run) == longer.describe()


def test_a_run_of_other_options_or_data(tmp_path, task, whole):
    run = copy_of(whole[0], tmp_path / "run")
    with pytest.raises(TrainError, match=r"`seed` \(=0\), not with 1"):
        fit(of_length(task, length_of(task), seed=1), run, resume=True)
    (run.path / "config.json").write_text(json.dumps(task.describe() | {"data": {}}))
    with pytest.raises(TrainError, match="other data"):
        fit(task, run, resume=True)
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


# The background save of Orbax fails a second time, where no code can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["start", "report", "stop"])
def test_a_run_that_is_deleted(tmp_path, task, when):
    """Even where Orbax makes the directory again, for a checkpoint that cannot be resumed."""

    def delete(*_):
        shutil.rmtree(run.path, ignore_errors=True)  # Orbax writes into it
        return True

    run, progress = new_run(tmp_path / "run", task), Progress()
    if when != "stop":
        setattr(progress, when, delete)
    with pytest.raises(TrainError, match="run was deleted"):
        fit(task, run, progress, stop=delete if when == "stop" else lambda step: False)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_stops_at_an_evaluation_that_is_not_finite(tmp_path, task, part, monkeypatch):
    evaluate = task.make_eval()

    def diverge(state, of):
        return dict(evaluate(state, of)) | ({"loss": math.inf} if of == part else {})

    monkeypatch.setattr(task, "make_eval", lambda: diverge, raising=False)
    with pytest.raises(TrainError, match=rf"{part} loss .* (epoch|step) \d. .*`learning_rate`"):
        fit(task, new_run(tmp_path / "run", task))


@pytest.mark.parametrize(
    ("method", "failure", "message"),
    [
        ("save", "RESOURCE_EXHAUSTED: Error writing", "No space .*Make room"),
        # In the background.
        ("wait_until_finished", "Error writing: No space left on device", "No space .*Make room"),
        ("save", "a zarr metadata file is missing\nand so on", "ValueError in Orbax.*Correct"),
        ("save", "NOT_FOUND: File too large [OS error 27: EFBIG]", "File too large, see ulimit -f"),
    ],
)
def test_files_that_cannot_be_written(tmp_path, task, monkeypatch, method, failure, message):
    run = new_run(tmp_path / "run", task)
    failing = mock.Mock(side_effect=ValueError(failure))
    monkeypatch.setattr(f"orbax.checkpoint.CheckpointManager.{method}", failing)
    with pytest.raises(TrainError, match=rf"run.* \({message}.*resume"):
        fit(task, run)
