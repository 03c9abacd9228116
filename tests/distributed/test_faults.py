"""What goes wrong in a run of several processes: all of them do the same about it."""

import jax
import numpy as np
import pytest

from tests.distributed.commands import ended, start, train
from tests.distributed.test_train import (
    PREEMPTED,
    check_run,
    lines,
    losses,
    parameters,
    task_of,
    text,
)
from tests.train.test_checksums import flip

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.exhaustive

SPOILS = """
import jax.numpy as jnp
from effjax.train.lm import steps, task
batches, loss = task.train_batches, steps.lm_loss
def spoiled(data, context, size, seed, done, rows):
    for step, batch in enumerate(batches(data, context, size, seed, done, rows), done + 1):
        yield batch * 0 if step == 4 else batch
def lm_loss(graphdef, params, tokens, *rest):
    bad = jnp.where(jnp.all(tokens == 0), jnp.nan, 0.0)
    return loss(graphdef, params, tokens, *rest) + bad
task.train_batches, steps.lm_loss = spoiled, lm_loss"""


def same_end(a, b):
    states = [parameters(run, task_of(run)) for run in (a, b)]
    for got, wanted in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["skip", "rollback"])
def test_a_step_that_is_not_finite(tmp_path, text, how):
    """It is left out by all processes, as by one."""
    options = "--mesh", "data=2,fsdp=2", "--on-nan", how, "--checkpoint-every", "2"
    two, one = tmp_path / "two", tmp_path / "one"
    first, second = train(2, *text, *options, "--out", two, before=SPOILS)
    train(1, *text, *options, "--out", one, before=SPOILS)
    said = "step 4: its loss or its gradients are not finite"
    assert said in first and said not in second
    wanted = [{"kind": "rolled back", "step": 4, "checkpoint": "checkpoints/3"}]
    found = [{k: v for k, v in line.items() if k in wanted[0]} for line in lines(two)]
    assert [line for line in found if line["kind"] == "rolled back"] == (
        wanted if how == "rollback" else []
    )
    assert [line.get("skipped") for line in lines(two) if line["kind"] == "step"] == [None, [4]]
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)
    same_end(two, one)


STOPS_ONCE = """
if process == 1:
    import os, signal
    from effjax.train.lm.task import LMTask
    read, asked = LMTask.read, []
    def read_then_ask(self, metrics):
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGHUP))
        return read(self, metrics)
    LMTask.read = read_then_ask"""


def test_a_damaged_checkpoint(tmp_path, text):
    run = tmp_path / "run"
    options = "--mesh", "data=2,fsdp=2", "--checkpoint-every", "1"
    found = ended(start(2, *text, *options, "--out", run, before=STOPS_ONCE))
    assert [code for code, _, _ in found] == [PREEMPTED] * 2, found
    last = max([*run.glob("checkpoints/*"), *run.glob("partway/*")], key=lambda one: int(one.name))
    flip(last)
    wanted = f"{last.parent.name}/{last.name}: cannot be restored"
    found = ended(start(2, "lm", "--resume", run))
    assert [code for code, _, _ in found] == [2, 2], found
    remedy = "give --fall-back with --resume to go on from"
    assert all(wanted in said and remedy in said for _, _, said in found)
    first, _ = train(2, "lm", "--resume", run, "--fall-back")
    assert wanted in first and "goes on from" in first
    check_run(run)
