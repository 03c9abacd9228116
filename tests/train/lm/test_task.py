import dataclasses

import pytest

from effjax.train.data.text import split_text
from effjax.train.errors import TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from tests.train.small import lm_task


def test_resume_needs_the_same_text(tmp_path):
    run = RunDirectory.create(tmp_path / "run", lm_task().describe(), overwrite=False)
    other = dataclasses.replace(lm_task(), text=split_text("dog", b"a lazy dog. " * 99))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(other, run, resume=True)


def test_reports_come_at_the_end_too():
    steps = [list(lm_task(steps=s, report_every=e).eval_steps) for s, e in ((4, 2), (5, 2), (3, 9))]
    assert steps == [[2, 4], [2, 4, 5], [3]]


def test_a_batch_that_does_not_fit_the_devices():
    with pytest.raises(TrainError, match=r"`batch_size` \(=5\) must be divisible by .*Use 4"):
        lm_task(batch_size=5)
    with pytest.raises(TrainError, match=r"bytes are too few for `context` \(=200\)"):
        lm_task(context=200)
