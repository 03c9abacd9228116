import functools
import json
import signal
from typing import Any

import jax
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import TrainError
from effjax.train.lm.steps import OffloadedState
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.task import Progress
from tests.tiers import exhaustive, plainly
from tests.train.small import CachedTask, lm_task

pytest.importorskip("matplotlib")


def new_run(path, task):
    return RunDirectory.create(path, task.describe(), overwrite=False)


def lines(run):
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    timing = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in r.items() if k not in timing} for r in records]


class Interrupt(Progress):
    """Ctrl-C in the middle."""

    def __init__(self, at):
        self.at = at

    def step(self, step, measured, rate):
        if step == self.at:
            signal.raise_signal(signal.SIGINT)


MODES = {
    "activations": dict(offload="activations"),
    "params": dict(offload="params"),
    "all": dict(offload="all"),
    "fused": dict(offload="all", fuse_update=True),
    "dots": dict(offload="all", policy="dots"),
    "fused in memory": dict(fuse_update=True, policy="everything"),
    "fused, activations": dict(offload="activations", fuse_update=True),
}


@pytest.fixture(scope="module")
def whole_on_one(tmp_path_factory):
    run = new_run(tmp_path_factory.mktemp("one") / "run", lm_task(1))
    fit(lm_task(1), run)
    return lines(run)


@pytest.mark.parametrize("mode", [exhaustive(mode) for mode in MODES])
def test_offloaded_the_losses_are_the_same(mode, tmp_path, whole_on_one):
    one = lm_task(1, **MODES[mode])
    run = new_run(tmp_path / "run", one)
    fit(one, run)
    for got, want in zip(lines(run), whole_on_one, strict=True):
        for name in want.keys() & {"validation_loss", "test_loss"}:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
        np.testing.assert_allclose(got["train_loss"], want["train_loss"], rtol=1e-5)


@pytest.mark.parametrize("mode", plainly("params", "fused in memory", of=MODES))
def test_where_the_layers_live(mode):
    one = lm_task(1, **MODES[mode])
    state = one.initial_state()
    on_host = MODES[mode].get("offload") in ("params", "all")
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state.params["blocks"])}
    assert kinds == {"pinned_host" if on_host else "device"}
    assert isinstance(state, OffloadedState) == (on_host or "fuse_update" in MODES[mode])


@pytest.mark.exhaustive
def test_offloaded_resuming_ends_with_the_same_bits(tmp_path, whole_on_one):
    """On two devices, with layers on the host of both."""
    one: Any = CachedTask(lm_task(2, offload="all", fuse_update=True))
    runs = [new_run(tmp_path / name, one) for name in ("whole", "parts")]
    fit(one, runs[0])
    for got, want in zip(lines(runs[0]), whole_on_one, strict=True):
        for name in want.keys() & {"validation_loss", "test_loss"}:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4)
    with pytest.raises(KeyboardInterrupt):
        fit(one, runs[1], Interrupt(at=3))
    fit(one.task, RunDirectory.open(runs[1].path), resume=True)  # compiled anew
    assert lines(runs[1])[-3:] == lines(runs[0])[-3:]
    state = one.task.initial_state()
    with Checkpoints(runs[0].checkpoints) as a, Checkpoints(runs[1].checkpoints) as b:
        for x, y in zip(*(jax.tree.leaves(c.restore(state, 5)) for c in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)
    assert isinstance(state, OffloadedState)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state.model.layers)}
    assert kinds == {"pinned_host"}
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, state.params, lm_task(2).initial_state().params)


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory):
    plain = lm_task(1, dropout=0.0)
    return fit(plain, new_run(tmp_path_factory.mktemp("plain") / "run", plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["activations", "fused"])
def test_microbatches(mode, tmp_path, without_dropout):
    one = lm_task(1, num_microbatches=2, dropout=0.0, **MODES[mode])
    found = fit(one, new_run(tmp_path / "run", one))
    np.testing.assert_allclose(found.test_loss, without_dropout.test_loss, rtol=1e-5)


@pytest.mark.parametrize("mode", ["activations", "fused"])
def test_microbatches_are_for_one_device(mode):
    with pytest.raises(TrainError, match=r"num_microbatches \(=2\) needs a single device"):
        lm_task(2, num_microbatches=2, dropout=0.0, **MODES[mode])
