"""Training with the layers on the host, or updated during the backward pass."""

import functools

import jax
import numpy as np
import pytest

from effjax.train.errors import TrainError
from effjax.train.lm.steps import OffloadedState
from tests.tiers import plainly
from tests.train.small import lm_task

MODES = {
    "activations": dict(offload="activations"),
    "params": dict(offload="params"),
    "dots": dict(offload="all", policy="dots"),
    "fused in memory": dict(fuse_update=True, policy="everything"),
    "fused, activations": dict(offload="activations", fuse_update=True),
    "microbatches": dict(offload="all", fuse_update=True, num_microbatches=2, dropout=0.0),
}


def assert_place_of_layers(state, mode):
    on_host = MODES[mode].get("offload") in ("params", "all")
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state.params["blocks"])}
    assert kinds == {"pinned_host" if on_host else "device"}
    assert isinstance(state, OffloadedState) == (on_host or "fuse_update" in MODES[mode])


def losses_of(task):
    """Return the losses of two steps and the test loss after them, and the state."""
    state, step, losses = task.initial_state(), task.make_step(), []
    for _, batch in zip(range(2), task.batches(0), strict=False):
        state, loss = step(state, batch, jax.random.key(0))
        losses.append(float(loss))
    return [*losses, task.make_eval()(state, "test")["loss"]], state


@functools.cache
def losses_in_memory(dropout):
    return losses_of(lm_task(1, dropout=dropout))[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_layers_in_memory(mode):
    task = lm_task(1, **MODES[mode])
    losses, state = losses_of(task)
    np.testing.assert_allclose(losses, losses_in_memory(task.config.dropout), rtol=1e-5)
    assert_place_of_layers(state, mode)


@pytest.mark.parametrize("mode", plainly("params", of=["params", "fused in memory"]))
def test_place_of_the_first_layers(mode):
    assert_place_of_layers(lm_task(1, **MODES[mode]).initial_state(), mode)


def test_microbatches_are_for_one_device():
    with pytest.raises(TrainError, match=r"`num_microbatches` \(=2\) needs a single device"):
        lm_task(2, **MODES["microbatches"])
