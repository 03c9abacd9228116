"""Faults in a run of several processes: all of them react alike."""

import jax
import numpy as np
import pytest

from tests.distributed.commands import train
from tests.distributed.test_train import (
    check_run,
    lines,
    losses,
    parameters,
    task_of,
    text,
)
from tests.train.test_checkpoint import flip_bit

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.exhaustive

NAN_AT_STEP_4 = """
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


def test_skips_a_step_that_is_not_finite(tmp_path, text):
    options = "--mesh", "data=2,fsdp=2", "--on-nan", "skip", "--checkpoint-every", "2"
    two, one = tmp_path / "two", tmp_path / "one"
    first, second = train(2, *text, *options, "--out", two, before=NAN_AT_STEP_4)
    train(1, *text, *options, "--out", one, before=NAN_AT_STEP_4)
    message = "step 4: its loss or its gradients are not finite"
    assert message in first and message not in second
    assert [line.get("skipped") for line in lines(two) if line["kind"] == "step"] == [None, [4]]
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)
    states = [parameters(run, task_of(run)) for run in (two, one)]
    for got, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_falls_back_from_damaged_checkpoints(tmp_path, text):
    run = tmp_path / "run"
    options = "--mesh", "data=2,fsdp=2", "--checkpoint-every", "1", "--keep", "9"
    train(2, *text, *options, "--out", run)
    last = max(run.glob("checkpoints/*"), key=lambda path: int(path.name))
    flip_bit(last)
    first, second = train(2, "lm", "--resume", run)
    message = f"checkpoints/{last.name} is damaged"
    assert message in first and "using" in first and message not in second
    assert (run / "checkpoints" / f"damaged-{last.name}").is_dir()
    check_run(run)
