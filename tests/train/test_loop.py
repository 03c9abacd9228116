import json
import shutil
import signal
from typing import Any

import jax
import numpy as np
import pytest

from effjax.train.errors import TrainError
from effjax.train.images.config import Config
from effjax.train.images.job import prepare
from effjax.train.images.recipe import make_optimizer, make_schedule, model_builder
from effjax.train.loop import Progress, backward_bytes, fit, initial_state, train_batches
from effjax.train.run_directory import RunDirectory
from tests.train import small

pytest.importorskip("matplotlib")


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr("effjax.train.job.model_builder", small.builder)
    config = Config(batch_size=16, epochs=3, learning_rate=0.05)
    return prepare(config, jax.devices()[:2], small.dataset())


def new_run(path, job):
    return RunDirectory.create(path, job.describe(), overwrite=False)


class Interrupt(Progress):
    """Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch):
        self.at = epoch
        self.stopped = False

    def step(self, epoch, loss, accuracy, images_per_second):
        if epoch == self.at:
            signal.raise_signal(signal.SIGINT)

    def stop(self):
        self.stopped = True


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_timing(records):
    timing = {"seconds", "images_per_second"}
    return [{k: v for k, v in r.items() if k not in timing} for r in records]


def test_a_run_and_its_files(tmp_path, job):
    run = new_run(tmp_path / "run", job)
    result = fit(job, run)
    records = lines(run.path)
    assert [r["kind"] for r in records] == ["epoch"] * 3 + ["final"]
    assert records[-1] | {"kind": None} == vars(result) | {"kind": None}
    assert [r["step"] for r in records[:3]] == [4, 8, 12]
    assert records[2]["train_loss"] < records[0]["train_loss"]
    assert result.best_test_accuracy == max(r["test_accuracy"] for r in records[:3])
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    kept = {int(p.name) for p in run.checkpoints.iterdir()}
    assert kept == {3, result.best_epoch}
    config = json.loads((run.path / "config.json").read_text())
    assert config["options"]["batch_size"] == 16
    assert config["data"]["class_names"] == list("abcde")
    names = {p.name for p in run.path.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}


def test_resuming_after_ctrl_c_ends_with_the_same_bits(tmp_path, job):
    whole = new_run(tmp_path / "whole", job)
    fit(job, whole)
    run = new_run(tmp_path / "run", job)
    progress = Interrupt(epoch=2)
    with pytest.raises(KeyboardInterrupt):
        fit(job, run, progress)
    assert progress.stopped
    assert [r["kind"] for r in lines(run.path)] == ["epoch", "interrupted"]
    assert (run.path / "curve.png").exists()
    assert {p.name for p in run.checkpoints.iterdir()} == {"1"}

    fit(job, RunDirectory.open(run.path), resume=True)
    assert without_timing(lines(run.path)) == without_timing(lines(whole.path))

    from effjax.train.checkpoint import Checkpoints

    like = initial_state(job)
    with Checkpoints(whole.checkpoints) as a, Checkpoints(run.checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(like, 3)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_ctrl_c_in_the_first_epoch_leaves_a_run_to_resume(tmp_path, job):
    run = new_run(tmp_path / "run", job)
    with pytest.raises(KeyboardInterrupt):
        fit(job, run, Interrupt(epoch=1))
    assert lines(run.path) == [{"kind": "interrupted"}]
    assert (run.path / "curve.png").exists()
    assert {p.name for p in run.checkpoints.iterdir()} == {"0"}


def test_ctrl_c_before_the_first_checkpoint_leaves_a_run_to_resume(tmp_path, job, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    run, whole = new_run(tmp_path / "run", job), new_run(tmp_path / "whole", job)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("effjax.train.loop.initial_state", interrupt)
        fit(job, run)
    assert list(run.checkpoints.iterdir()) == []
    fit(job, RunDirectory.open(run.path), resume=True)
    fit(job, whole)
    assert without_timing(lines(run.path)) == without_timing(lines(whole.path))


def test_ctrl_c_on_a_full_disk(tmp_path, job, monkeypatch):
    run = new_run(tmp_path / "run", job)
    monkeypatch.setattr(RunDirectory, "append", full_disk)
    with pytest.raises(KeyboardInterrupt):
        fit(job, run, Interrupt(epoch=1))


def test_resuming_a_finished_run_without_its_metrics(tmp_path, job):
    run = new_run(tmp_path / "run", job)
    fit(job, run)
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(TrainError, match=r"metrics\.jsonl: epoch 1 is missing, .*start a new run"):
        fit(job, run, resume=True)
    assert not (run.path / "metrics.jsonl").exists()


def unreadable(*_, **__):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("damage", ["cut short", "unreadable"])
def test_a_damaged_checkpoint_is_named(tmp_path, job, monkeypatch, damage):
    run = new_run(tmp_path / "run", job)
    with pytest.raises(KeyboardInterrupt):
        fit(job, run, Interrupt(epoch=2))
    with monkeypatch.context() as patch:
        if damage == "cut short":
            file = run.checkpoints / "1" / "default" / "_METADATA"
            file.write_bytes(file.read_bytes()[:100])
        else:
            patch.setattr("orbax.checkpoint.CheckpointManager.restore", unreadable)
        message = r"checkpoints/1: cannot be restored .*; delete this directory, then resume"
        with pytest.raises(TrainError, match=message):
            fit(job, run, resume=True)
    shutil.rmtree(run.checkpoints / "1")
    fit(job, run, resume=True)
    assert [r["kind"] for r in lines(run.path)] == ["epoch"] * 3 + ["final"]


def test_resume_needs_the_same_data(tmp_path, job):
    run = new_run(tmp_path / "run", job)
    (run.path / "config.json").write_text(json.dumps(job.describe() | {"data": {}}))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(job, run, resume=True)


def test_a_loss_that_is_not_finite_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("effjax.train.job.model_builder", small.builder)
    config = Config(batch_size=16, epochs=3, learning_rate=1e30)
    job = prepare(config, jax.devices()[:1], small.dataset())
    with pytest.raises(TrainError, match="the train loss is .*; use a learning_rate below 1e"):
        fit(job, new_run(tmp_path / "run", job))


def test_a_test_loss_that_is_not_finite_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("effjax.train.job.model_builder", small.builder)
    config = Config(batch_size=70, epochs=3, learning_rate=1e38)  # one step an epoch
    job = prepare(config, jax.devices()[:1], small.dataset())
    with pytest.raises(TrainError, match="the test loss is .* in epoch 1; use a learning_rate"):
        fit(job, new_run(tmp_path / "run", job))


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_said(tmp_path, job, monkeypatch):
    monkeypatch.setattr(RunDirectory, "append", full_disk)
    with pytest.raises(TrainError, match=r"run: cannot be written to \(No space left.*then resume"):
        fit(job, new_run(tmp_path / "run", job))


def test_no_device(monkeypatch):
    def fail():
        raise RuntimeError("no backend")

    monkeypatch.setattr("jax.local_devices", fail)
    with pytest.raises(TrainError, match=r"JAX finds no device \(no backend\); run effjax doctor"):
        prepare(Config(), dataset=small.dataset())


def test_batches_depend_on_seed_and_epoch_only(job):
    first = list(train_batches(job, 1))
    assert len(first) == 4 and first[0].images.shape == (16, 8, 8, 1)
    for a, b in zip(first, train_batches(job, 1), strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)
    assert not np.array_equal(first[0].labels, next(train_batches(job, 2)).labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 7},
            r"batch_size \(=7\) is not divisible by the number of devices \(=2\); use 6",
        ),
        ({"batch_size": 1}, "use 2"),
        ({"batch_size": 128}, r"larger than the train set \(=70 images\)"),
        ({"depth": 11}, "must be 6n . 4"),
        ({"model": "resnet"}, r"model \(='resnet'\) must be one of densenet-bc, densenet121"),
        ({"model": "densenet121", "depth": 22}, "depth .* has a fixed depth"),
        ({"model": "densenet121", "small_inputs": False}, "too small"),
        ({"drop_rate": 1.0}, "drop_rate"),
        ({"compression": 0.0}, "compression"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(TrainError, match=message):
        prepare(Config(**{"batch_size": 16} | options), jax.devices()[:2], small.dataset())


@pytest.mark.parametrize(
    "option",
    [
        {"epochs": 0}, {"batch_size": 0}, {"growth_rate": 0}, {"learning_rate": 0.0},
        {"learning_rate": float("nan")}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"seed": -1},
        {"parallel": "pjit"}, {"dtype": "float16"}, {"schedule": "linear"}, {"save": "all"},
    ],
)  # fmt: skip
def test_options_out_of_range(option):
    (name,) = option
    with pytest.raises(TrainError, match=rf"^{name} \(="):
        Config(**option)


def test_options_of_another_version():
    with pytest.raises(TrainError, match="another version"):
        Config.from_json({"depht": 22})
    with pytest.raises(TrainError, match="another version"):
        Config.from_json(None)


def test_schedules():
    cosine: Any = make_schedule(Config(epochs=10), 10)
    rates = [float(cosine(s)) for s in (0, 50, 100)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0], atol=1e-7)
    step: Any = make_schedule(Config(epochs=10, schedule="step"), 10)
    rates = [float(step(s)) for s in (0, 49, 51, 76)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001], rtol=1e-5)


def test_weight_decay_is_of_kernels_only():
    config = Config(learning_rate=1.0, momentum=0.0, weight_decay=0.5)
    optimizer = make_optimizer(config, lambda _: 1.0)
    params = {"kernel": np.ones((2, 2), np.float32), "scale": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates: Any
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], -0.5)
    np.testing.assert_array_equal(updates["scale"], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_efficient_keeps_less_and_parameters_stay_float32(dtype):
    data = small.dataset(size=16)
    job = prepare(Config(batch_size=16, dtype=dtype, depth=40), jax.devices()[:1], data)
    plain, efficient = (backward_bytes(job, efficient=e) for e in (False, True))
    assert efficient.argument_bytes > 0
    assert efficient.bytes < 0.4 * plain.bytes
    _, params, _ = jax.eval_shape(lambda: initial_state(job))[:3]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_small_inputs_by_image_size():
    from flax import nnx

    def stem(size, **options):
        build: Any = model_builder(Config(**options), (size, size, 1), 5)
        model: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        return model.stem_conv.kernel.shape

    assert stem(8) == (3, 3, 1, 24)
    assert stem(96) == (7, 7, 1, 24)
    assert stem(96, small_inputs=True) == (3, 3, 1, 24)
    assert stem(32, model="densenet100_12") == (3, 3, 1, 24)
    assert stem(224, model="densenet121") == (7, 7, 1, 64)
