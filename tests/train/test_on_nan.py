"""Steps whose loss or gradients are not finite: on images and on text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import Preempted, TrainError
from effjax.train.images.steps import Batch, Learner
from effjax.train.lm import offloaded, steps
from effjax.train.lm.config import LMConfig
from effjax.train.loop import ROLLBACKS, fit
from effjax.train.run_directory import RunDirectory
from tests.tiers import exhaustive, plainly
from tests.train.small import CompiledOnce, Said, image_task, lm_task

pytest.importorskip("matplotlib")

GRADIENTS, LOSS = 0, 1  # what is not finite of a batch of this alone


def poison(batch, params):
    """What is added to a loss: NaN, or a zero whose gradient is none, or nothing."""
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
    loss, parts = steps.lm_loss, offloaded.lm_parts

    def lm_loss(graphdef, params, tokens, *rest):
        return loss(graphdef, params, tokens, *rest) + poison(tokens, params)

    def lm_parts(*args):
        found = parts(*args)

        def head(others, x, tokens, key):
            return found.head(others, x, tokens, key) + poison(tokens, (others, x))

        return found._replace(head=head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "lm_loss", lm_loss)
        patch.setattr(offloaded, "lm_parts", lm_parts)
        yield


class Bad(CompiledOnce):
    """Some of its batches are: by step, what is not finite."""

    def __init__(self, task, bad):
        if hasattr(task.learner, "on_nan"):
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
        return batch * 0 + value


# Images: epochs of 4 steps. Text: tested after steps 2, 4 and 5.
MAKE = {"images": (image_task, {3: GRADIENTS, 6: LOSS}), "lm": (lm_task, {1: LOSS, 3: GRADIENTS})}


KINDS = [f"{kind} {how}" for kind in MAKE for how in ("skip", "rollback")]


@pytest.fixture(scope="module", params=plainly("images rollback", "lm skip", of=KINDS))
def task(request):
    kind, how = request.param.split()
    make, bad = MAKE[kind]
    return Bad(make(on_nan=how, checkpoint_every=None if kind == "lm" else 3), bad)


def new_run(path, task):
    return RunDirectory.create(path, task.describe(), overwrite=False)


def lines(run):
    timing = {"seconds", "images_per_second", "tokens_per_second"}
    return [{k: v for k, v in record.items() if k not in timing} for record in run.metrics]


def by_hand(task):
    """The last state, of a loop that knows which steps are to change nothing."""
    state, step, key = task.initial_state(), task.make_step(), jax.random.key(0)
    batches = task.batches(0)
    for number in range(1, task.numbers[-1] * task.steps_each + 1):
        batch = next(batches)
        if number in task.bad:
            state = state._replace(step=state.step + 1)
        else:
            state, _ = step(state, batch, key)
    return state


def last_state(task, run):
    with Checkpoints(run.checkpoints) as saved:
        return saved.restore(task.shapes(), task.numbers[-1])


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    run, said = new_run(tmp_path_factory.mktemp("whole") / "run", task), Said()
    fit(task, run, said)
    return run, said


def test_the_state_is_that_without_these_batches(task, whole):
    run, said = whole
    same_bits(last_state(task, run), by_hand(task))
    records = [record for record in run.metrics if record["kind"] == task.kind]
    assert sum((record.get("skipped", []) for record in records), []) == sorted(task.bad)
    assert all(np.isfinite(record["train_loss"]) for record in records)
    assert set(task.bad).isdisjoint(said.steps) and not run.partway.exists()
    rolled_back = [r for r in run.metrics if r["kind"] == "rolled back"]
    if task.config.on_nan == "skip":
        want = [f"skipped step {s}: its loss or its gradients are not finite" for s in task.bad]
        assert said.texts == want and not rolled_back
        return
    assert [r["step"] for r in rolled_back] == sorted(task.bad)
    where = {"step": {1: "checkpoints/0", 3: "checkpoints/2"}}.get(
        task.kind, {3: "checkpoints/0", 6: "checkpoints/1"}
    )
    for text, line in zip(said.texts, rolled_back, strict=True):
        step, checkpoint = line["step"], line["checkpoint"]
        assert checkpoint == where[step]
        assert text == (
            f"step {step}: its loss or its gradients are not finite; goes back to {checkpoint}, "
            f"after step {line['checkpoint_step']}, and leaves its batch out"
        )


@pytest.mark.parametrize("at", [3, exhaustive(2), exhaustive(4)])
def test_stopped_and_resumed(task, whole, tmp_path, at):
    run = new_run(tmp_path / "run", task)
    with pytest.raises(Preempted):
        fit(task, run, stop=lambda step: step >= at)
    fit(task, RunDirectory.open(run.path), resume=True)
    # A run that is stopped is saved, and may then go back to that.
    where = {"checkpoint", "checkpoint_step"}
    found, want = (
        [{k: v for k, v in line.items() if k not in where} for line in lines(each)]
        for each in (run, whole[0])
    )
    assert found == want
    same_bits(last_state(task, run), last_state(task, whole[0]))


def test_too_many(task, tmp_path):
    """Nothing is left to take a mean of, or too much is to be left out."""
    many, before = dict.fromkeys(range(1, 100), LOSS), task.bad
    how = task.config.on_nan
    count = min(task.numbers[0] * task.steps_each, ROLLBACKS)
    message = f"the last {count} steps have no finite loss .* use a learning_rate below"
    if how == "rollback" and task.kind == "epoch":
        many[1] = 7
        count = 4 + ROLLBACKS - 3
        message = rf"the train loss is nan in epoch 2, and {ROLLBACKS} batches have been left out"
    task.bad = many
    try:
        with pytest.raises(TrainError, match=message):
            fit(task, new_run(tmp_path / "run", task))
    finally:
        task.bad = before


def test_fused_layers_are_not_skipped():
    with pytest.raises(TrainError, match=r"on_nan .=skip. cannot be had with fuse_update, which"):
        LMConfig(fuse_update=True, on_nan="skip")


FORMS = {
    "images, jit": (image_task, {}),
    "images, shard_map": (image_task, {"parallel": "shard_map"}),
    "images, pmap": (image_task, {"parallel": "pmap"}),
    "images, fsdp": (image_task, {"mesh": "data=1,fsdp=2"}),
    "text, fsdp": (lm_task, {"mesh": "data=1,fsdp=2"}),
    "text, remat": (lm_task, {"remat": True}),
    "text, activations": (lm_task, {"offload": "activations"}),
    "text, parameters": (lm_task, {"offload": "params"}),
    "text, all": (lm_task, {"offload": "all", "devices": 1, "num_microbatches": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_changes_nothing(form):
    make, options = FORMS[form]
    task, plain = (Bad(make(on_nan=how, **options), {}) for how in ("skip", "stop"))
    states, key = [], jax.random.key(0)
    for one in (task, plain):
        state, metrics = one.make_step()(one.initial_state(), next(one.batches(0)), key)
        assert np.isfinite(one.read(metrics)["loss"])
        states.append(jax.tree.map(np.asarray, state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *states)
    for kind in (GRADIENTS, LOSS):
        state, metrics = task.make_step()(state_of(task, states[0]), task.first(kind), key)
        assert np.isnan(task.read(metrics)["loss"])
        same_bits(state, states[0]._replace(step=np.int32(2)))


def state_of(task, arrays):
    """These arrays where those of a state lie."""
    return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), arrays, task.shapes())


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", ["none", "all"])
@pytest.mark.parametrize("kind", [LOSS, GRADIENTS])
def test_a_fused_step_shows_it(offload, kind):
    task = Bad(lm_task(fuse_update=True, offload=offload, on_nan="rollback"), {})
    _, loss = task.make_step()(task.initial_state(), task.first(kind), jax.random.key(0))
    assert np.isnan(loss)
