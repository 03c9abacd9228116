import jax
import pytest

from effjax.train.decoder_forms import FORMS
from effjax.train.errors import TrainError
from effjax.train.lm.config import LMConfig
from effjax.train.lm.model import lm_steps
from tests.train.small import lm_task


def test_reports_come_at_the_end_too():
    steps = [list(lm_task(steps=s, report_every=e).eval_steps) for s, e in ((4, 2), (5, 2), (3, 9))]
    assert steps == [[2, 4], [2, 4, 5], [3]]


def test_planned_steps():
    steps = lm_steps(LMConfig(layers=2, width=16, heads=2, context=12))(4)
    assert tuple(steps) == tuple(FORMS)
    step, state, batch, key = steps["offload all, fused"]
    assert {name: a.shape for name, a in batch.items()} == {"tokens": (4, 12), "labels": (4, 12)}
    assert step.trace(state, batch, key).out_info[1][0].shape == ()
    task = lm_task(1, offload="all", fuse_update=True)
    _, shapes, first, _ = lm_steps(task.config)(4)["offload all, fused"]
    kinds = [
        jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.memory_kind), tree)
        for tree in (shapes, task.initial_state(), first, next(task.batches(0)))
    ]
    assert kinds[0] == kinds[1] and kinds[2] == kinds[3]


def test_microbatches_are_for_one_device():
    with pytest.raises(TrainError, match=r"`num_microbatches` \(=2\) needs a single device"):
        lm_task(2, num_microbatches=2)
