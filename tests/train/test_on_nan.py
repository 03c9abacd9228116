"""Steps whose loss or gradients are not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import PreemptionError, TrainError
from effjax.train.images.steps import Batch, Learner
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.text import learner
from tests.tiers import vary
from tests.train import small
from tests.train.small import (
    CachedTask,
    RecordedProgress,
    assert_same_run,
    image_task,
    new_run,
)
from tests.train.text.small import text_task

pytest.importorskip("matplotlib")

GRADIENTS, LOSS = 0, 1  # a batch of this value alone makes the gradients or the loss NaN


def poison(batch, params):
    """Return what is added to a loss: NaN, a zero whose gradient is NaN, or zero."""
    bad = jnp.all(batch == GRADIENTS)
    total = sum(jnp.sum(p) for p in jax.tree.leaves(params))
    root = jnp.sqrt(jnp.where(bad, 0 * total, 1.0)) - jnp.where(bad, 0.0, 1.0)
    return root + jnp.where(jnp.all(batch == LOSS), jnp.nan, 0.0)


class Poisoned(Learner):
    def loss(self, params, stats, batch, key):
        value, aux = super().loss(params, stats, batch, key)
        return value + poison(batch.images, params), aux


@pytest.fixture(scope="module", autouse=True)
def poisoned_text():
    make = learner.decoder_functions

    def decoder_functions(*args, **options):
        functions = make(*args, **options)

        def head(others, x, batch, key=None):
            total, weight = functions.head(others, x, batch, key)
            return total + poison(batch["tokens"], (others, x["hidden"])), weight

        return functions._replace(head=head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "decoder_functions", decoder_functions)
        yield


class Bad(CachedTask):
    """A task with bad batches at some steps."""

    def __init__(self, task, bad):
        if isinstance(task.learner, Learner):
            fields = {f.name: getattr(task.learner, f.name) for f in dataclasses.fields(Learner)}
            task = dataclasses.replace(task, learner=Poisoned(**fields))
        super().__init__(task)
        self.bad = bad

    def batches(self, done):
        for step, batch in enumerate(self.task.batches(done), done + 1):
            yield self.spoiled(batch, self.bad[step]) if step in self.bad else batch

    def first(self, value):
        return self.spoiled(next(self.task.batches(0)), value)

    def spoiled(self, batch, value):
        if isinstance(batch, Batch):
            return batch._replace(images=batch.images * 0 + value)
        return batch | {"tokens": batch["tokens"] * 0 + value}


# By step, what is not finite. Images: epochs of 4 steps. Text: evaluated after steps 2, 4 and 5.
MAKE = {
    "images": (image_task, {3: GRADIENTS, 6: LOSS}),
    "text": (text_task, {1: LOSS, 3: GRADIENTS}),
}


@pytest.fixture(scope="module")
def task(request):
    make, bad = MAKE[request.param]
    return Bad(make(on_nan="skip", checkpoint_every=3), bad)


def assert_same_bits(a, b):
    jax.tree.map(small.assert_same_bits, a, b)


@vary("task, at", [("images", 3), ("images", 4), ("text", 3)], indirect=["task"])
def test_skipped_steps_change_nothing(task, tmp_path, at):
    """Also in a run that is stopped and resumed, which ends with the same bits."""
    run, progress = new_run(tmp_path / "whole", task), RecordedProgress()
    fit(task, run, progress)
    expected, step, key = task.initial_state(), task.make_step(), jax.random.key(0)
    last = task.eval_steps[-1]
    for number, batch in zip(range(1, last + 1), task.batches(0), strict=False):
        if number in task.bad:
            expected = expected._replace(step=expected.step + 1)
        else:
            expected, _ = step(expected, batch, key)
    with Checkpoints(run.checkpoints) as checkpoints:
        assert_same_bits(checkpoints.restore(task.shapes(), last), expected)
    records = [record for record in run.read_metrics() if record["kind"] == task.unit]
    assert [step for record in records for step in record.get("skipped", [])] == sorted(task.bad)
    assert all(np.isfinite(record["train_loss"]) for record in records)
    assert set(task.bad).isdisjoint(progress.steps)
    assert all(f"step {step}:" in text for step, text in zip(task.bad, progress.texts, strict=True))

    stopped = new_run(tmp_path / "stopped", task)
    with pytest.raises(PreemptionError):
        fit(task, stopped, stop=lambda step: step >= at)
    fit(task, RunDirectory.open(stopped.path), resume=True)
    assert_same_run(task, stopped, run)


ONE_STEP = {"steps": 1, "report_every": 1, "fuse_update": True}


@vary(
    "make, options, value, remedy",
    [
        (text_task, ONE_STEP, GRADIENTS, "parameters"),
        (text_task, {}, GRADIENTS, "`learning_rate`"),
        (image_task, {}, GRADIENTS, "`learning_rate`"),
        (image_task, {}, LOSS, "`learning_rate`"),
    ],
)
def test_stops_at_a_step_that_is_not_finite(tmp_path, make, options, value, remedy):
    """Nothing of the step is saved."""
    at = options.get("steps", 2)
    task = Bad(make(checkpoint_every=1, **options), {at: value})
    run = new_run(tmp_path / "run", task)
    with pytest.raises(TrainError, match=f"^the loss or a gradient .*{remedy}"):
        fit(task, run)
    assert run.last_step == at - 1


@vary("task", MAKE, indirect=True)
def test_stops_if_no_step_of_an_interval_is_finite(task, tmp_path, monkeypatch):
    monkeypatch.setattr(task, "bad", dict.fromkeys(range(1, 100), LOSS))
    with pytest.raises(TrainError, match=f"the last {task.eval_steps[0]} steps .*`learning_rate`"):
        fit(task, new_run(tmp_path / "run", task))


FORMS = {
    "images, shard_map": (image_task, {"parallel": "shard_map"}),
    "images, fsdp": (image_task, {"mesh": "data=1,fsdp=2"}),
    "text, fsdp": (text_task, {"mesh": "data=1,fsdp=2"}),
    "text, all": (text_task, {"params_in": "host", "devices": 1, "num_microbatches": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_skipped_step_in_all_forms(form):
    make, options = FORMS[form]
    task = Bad(make(on_nan="skip", **options), {})
    step, shapes, key = task.task.make_step(), task.shapes(), jax.random.key(0)
    state, metrics = step(task.task.initial_state(), next(task.batches(0)), key)
    assert np.isfinite(task.read(metrics)["loss"])
    # Copies: steps donate their state.
    before = jax.tree.map(lambda a: jnp.array(a, copy=True), jax.device_get(state))
    for kind in (GRADIENTS, LOSS):
        copies = jax.tree.map(lambda a: jnp.array(a, copy=True), before)
        state = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), copies, shapes)
        state, metrics = step(state, task.first(kind), key)
        assert np.isnan(task.read(metrics)["loss"])
        assert_same_bits(state, before._replace(step=np.int32(2)))
