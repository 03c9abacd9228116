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
from effjax.train.errors import Preempted, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress
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
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    best = max(records, key=task.score)
    assert result.validation_loss == best["validation_loss"]
    assert checkpoints(run) == {task.numbers[-1], best[task.kind]}
    assert json.loads((run.path / "config.json").read_text()) == task.describe()
    names = {p.name for p in run.path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}


@pytest.mark.parametrize("task", ["images"], indirect=True)
def test_what_is_said_of_images(task, whole):
    run, result = whole
    records = lines(run)[:3]
    best = max(r["validation_accuracy"] for r in records)
    assert result.validation_accuracy == best
    assert records[result.best_epoch - 1]["validation_accuracy"] == best
    assert result.best_epoch in checkpoints(run)
    config = json.loads((run.path / "config.json").read_text())
    assert config["options"]["batch_size"] == 16
    assert config["data"]["class_names"] == list("abcde")
    assert (config["data"]["train_images"], config["data"]["validation_images"]) == (65, 5)


@pytest.mark.parametrize("task", ["lm"], indirect=True)
def test_what_is_said_of_text(task, whole):
    run, result = whole
    records = lines(run)[:3]
    assert records[0]["train_loss"] < math.log(256) + 0.1
    np.testing.assert_allclose(result.test_bits_per_byte, result.test_loss / math.log(2))
    assert result.validation_loss == min(r["validation_loss"] for r in records)
    assert result.num_params == 2 * 256 * 16 + 16 + 2 * (12 * 16**2 + 2 * 16)
    assert 3 < result.unigram_bits < 5 and result.tokens_per_second > 0
    assert checkpoints(run) == {5, result.best_step}


class FirstIsBest(CompiledOnce):
    """Of the validated parameters the first ones; notes what is tested."""

    def __init__(self, task):
        super().__init__(task)
        self.tested = []

    def score(self, record):
        return -record[self.kind]

    def make_test(self):
        def test(state, part):
            self.tested.append((part, int(state.step)))
            return of_task(state, part)

        of_task = super().make_test()
        return test


def test_the_test_set_is_looked_at_once_and_with_the_best_parameters(tmp_path, task, whole):
    first: Any = FirstIsBest(task)
    run = new_run(tmp_path / "run", first)
    result = fit(first, run)
    steps = [number * task.steps_each for number in task.numbers]
    assert first.tested == [*(("validation", step) for step in steps), ("test", steps[0])]
    assert vars(result)[f"best_{task.kind}"] == task.numbers[0]
    assert checkpoints(run) == {task.numbers[0], task.numbers[-1]}
    assert not any(name.startswith("test") for line in lines(run)[:3] for name in line)
    assert result.test_loss > whole[1].test_loss  # the small models learn to the end

    shutil.rmtree(run.checkpoints / str(task.numbers[0]))  # as one does with a damaged one
    result = fit(first, run, resume=True)
    assert first.tested[4:] == [("test", steps[-1])]
    assert result.test_loss == whole[1].test_loss


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
    same_parameters(task, whole[0], run)


def same_parameters(task, a, b):
    """Of the last checkpoints of two runs."""
    like, last = task.initial_state(), task.numbers[-1]
    with Checkpoints(a.checkpoints) as a, Checkpoints(b.checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(like, last)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


class Asks:
    """What tells a run to stop when its step is there."""

    def __init__(self, at):
        self.at = at

    def __call__(self, step):
        return step >= self.at


@pytest.mark.parametrize("at", [1, 2, 4])
def test_stopped_at_any_step_and_resumed_ends_with_the_same_bits(tmp_path, task, whole, at):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(Preempted, match=r"(in epoch|at step) \d"):
        fit(task, run, stop=Asks(at))
    assert kinds(run)[-1] == "interrupted" and "final" not in kinds(run)
    fit(task, RunDirectory.open(run.path), resume=True)
    assert without_timing(run) == without_timing(whole[0])
    assert not run.partway.exists()
    same_parameters(task, whole[0], run)


@pytest.fixture(scope="module")
def often(task):
    """The task with a checkpoint after every step."""
    kind = "images" if task.kind == "epoch" else "lm"
    return CompiledOnce(MAKE[kind](checkpoint_every=1))


def test_checkpoints_on_the_way(tmp_path, task, whole, often):
    """An end that nobody announced: the run goes on from the step before it."""
    run, number = new_run(tmp_path / "run", often), task.numbers[0]
    step = number * task.steps_each + min(3, task.steps_each)
    with pytest.raises(KeyboardInterrupt):
        fit(often, run, Interrupt(at=step))
    assert len(list(run.partway.iterdir())) == 1
    began = []

    class Began(Progress):
        def start(self, steps, done):
            began.append(done)

    fit(task, RunDirectory.open(run.path), Began(), resume=True)  # how often may change
    assert began == [step - 1]
    assert without_timing(run) == without_timing(whole[0])
    same_parameters(task, whole[0], run)


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


def test_two_processes_in_one_run(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    with run.locked(), pytest.raises(TrainError, match="run: another process is training in it"):
        fit(task, RunDirectory.open(run.path), resume=True)
    assert run.metrics == []


def test_resume_needs_the_same_data(tmp_path, task):
    run = new_run(tmp_path / "run", task)
    (run.path / "config.json").write_text(json.dumps(task.describe() | {"data": {}}))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(task, run, resume=True)


def of_length(task, length, **options):
    """A task like it that ends elsewhere."""
    kind = "images" if task.kind == "epoch" else "lm"
    return MAKE[kind](**{f"{task.kind}s": length}, **options)


def copy_of(run, path):
    return RunDirectory.open(shutil.copytree(run.path, path))


def test_a_finished_run_is_made_longer(tmp_path, task, whole):
    """All further steps follow the schedule of the longer run; the lines so far stay."""
    run, length = copy_of(whole[0], tmp_path / "run"), task.numbers[-1] + 1
    longer = of_length(task, length)
    fit(longer, run, resume=True)
    records = lines(run)
    assert records[:3] == lines(whole[0])[:3]
    assert [r[task.kind] for r in records[:-1]] == [*task.numbers, length]
    assert records[-1]["kind"] == "final"
    before = task.task.record(length, {"loss": 0, "accuracy": 0}, {}, 0.0)["learning_rate"]
    assert records[3]["learning_rate"] > before
    assert run.config == longer.describe()

    message = rf"{task.kind}s \(=1\) must be at least {length}, which .*run has done already"
    with pytest.raises(TrainError, match=message):
        fit(of_length(task, 1), run, resume=True)
    assert lines(run) == records and run.config == longer.describe()


def test_resume_needs_the_same_options(tmp_path, task, whole):
    run = copy_of(whole[0], tmp_path / "run")
    other = of_length(task, task.numbers[-1], seed=1)
    with pytest.raises(TrainError, match=r"run: was trained with seed \(=0\), not with 1; go on"):
        fit(other, run, resume=True)
    assert lines(run) == lines(whole[0]) and checkpoints(run) == checkpoints(whole[0])


@pytest.mark.parametrize("name", ["seed", "batch_size", "length"])
def test_resume_needs_the_options_that_the_run_was_trained_with(tmp_path, task, whole, name):
    run = copy_of(whole[0], tmp_path / "run")
    config = task.describe()
    config["options"][f"{task.kind}s" if name == "length" else name] += 8
    (run.path / "config.json").write_text(json.dumps(config))
    message = r"config\.json: its options were changed.*start a new run"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
    assert lines(run) == lines(whole[0]) and checkpoints(run) == checkpoints(whole[0])


@pytest.mark.parametrize("make", [image_task, pytest.param(lm_task, marks=pytest.mark.exhaustive)])
def test_a_run_of_before_goes_on_as_it_began(tmp_path, make):
    """It has no validation set, hence no best epoch, and no fingerprint."""
    old: Any = CompiledOnce(make(validation=0))
    run = new_run(tmp_path / "run", old)
    with pytest.raises(KeyboardInterrupt):
        fit(old, run, after_first_test(old))
    config = old.describe()
    del config["fingerprint"], config["command"], config["options"]["validation"]
    assert not any("validation" in name for name in config["data"])
    (run.path / "config.json").write_text(json.dumps(config))
    options = type(old.config).from_json(run.config["options"])
    assert options == old.config
    first, interrupted = lines(run)
    first |= {"test_loss": 1.0, "test_accuracy": 0.5}
    (run.path / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(interrupted)}\n")

    result = fit(old, RunDirectory.open(run.path), resume=True)
    assert vars(result)[f"best_{old.kind}"] == old.numbers[-1]
    assert result.validation_loss is None
    assert checkpoints(run) == {old.numbers[-1]}
    assert lines(run)[0] == first and run.config == old.describe()


class Deletes(Progress):
    """Deletes a folder after the first test."""

    def __init__(self, path):
        self.path = path

    def report(self, record):
        shutil.rmtree(self.path, ignore_errors=True)


def of_orbax(*_, **__):
    raise ValueError("a zarr metadata file is missing\nand so on")


# What Orbax was writing in the background fails a second time, where nobody can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_is_deleted_meanwhile(tmp_path, task, monkeypatch):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(TrainError, match=r"run: was deleted while it was trained; start a new run"):
        fit(task, run, Deletes(run.path))
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", of_orbax)
    run = new_run(tmp_path / "other", task)
    message = r"checkpoints/0: cannot be written to \(ValueError of Orbax\); mend that, then resume"
    with pytest.raises(TrainError, match=message):
        fit(task, run)
    run = new_run(tmp_path / "another", task)
    monkeypatch.setattr(task, "initial_state", lambda: shutil.rmtree(run.path), raising=False)
    with pytest.raises(TrainError, match=r"another: was deleted while it was trained"):
        fit(task, run)


class Poisoned(CompiledOnce):
    """From the first step on, nothing is a number."""

    def initial_state(self):
        state = self.task.initial_state()
        return jax.tree.map(
            lambda a: a.at[...].set(np.nan) if np.issubdtype(a.dtype, np.floating) else a, state
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
    ("make", "options"),  # validated after one step
    [
        diverges("images", learning_rate=1e38, batch_size=65),
        diverges("lm", learning_rate=1e38, report_every=1),
    ],
)
def test_a_validation_loss_that_is_not_finite_is_said(tmp_path, make, options):
    wild = make(**options)
    message = "the validation loss is .* (in epoch|at step) 1; use a learning_rate"
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


def of_tensorstore(*_, **__):
    raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [OS error 28]")


@pytest.mark.parametrize("where", ["save", "wait_until_finished"])
def test_a_full_disk_of_tensorstore_is_said(tmp_path, task, monkeypatch, where):
    """It is not device memory that lacks."""
    run = new_run(tmp_path / "run", task)
    monkeypatch.setattr(f"orbax.checkpoint.CheckpointManager.{where}", of_tensorstore)
    message = r"cannot be written to \(No space left on device\); make room, then resume"
    with pytest.raises(TrainError, match=message):
        fit(task, run)
