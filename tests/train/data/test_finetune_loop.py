"""Rows in the training loop: resuming, and two processes."""

import itertools
import json

import jax
import numpy as np
import pytest

from effjax.train.errors import PreemptionError, TrainError
from effjax.train.loop import fit
from tests.distributed.processes import Group
from tests.train.data.bigram import bigram_task
from tests.train.data.tiny_checkpoint import write_tokenizer
from tests.train.small import assert_same_parameters, lines_without_times, new_run

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the folder of a tokenizer and a file of rows."""
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"))
    rows = [
        {"prompt": f"{i} + {j} =", "completion": f" {i + j}"} for i in range(9) for j in range(9)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder, folder / "rows.jsonl"


def test_resumes_exactly(files, tmp_path):
    task = bigram_task(*files, jax.devices()[:2])
    whole, stopped = (new_run(tmp_path / name, task) for name in ("whole", "stopped"))
    result = fit(task, whole)
    assert result.losses[-1] < result.losses[0] - 1
    for step in (3, 8):
        with pytest.raises(PreemptionError):
            fit(task, stopped, resume=step > 3, stop=lambda done, step=step: done == step)
    fit(task, stopped, resume=True)
    assert_same_parameters(task, whole, stopped)
    whole, resumed = (
        [line for line in lines_without_times(run) if line["kind"] == "step"]
        for run in (whole, stopped)
    )
    assert whole == resumed


def test_does_not_resume_with_other_rows(files, tmp_path):
    task = bigram_task(*files, jax.devices()[:2])
    run = new_run(tmp_path / "run", task)
    with pytest.raises(PreemptionError):
        fit(task, run, stop=lambda done: done == 1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(files[1].read_text().replace("16", "17"))
    with pytest.raises(TrainError, match="was trained on other data"):
        fit(bigram_task(files[0], rows, jax.devices()[:2]), run, resume=True)


PROGRAM = """
import itertools, jax, numpy
jax.distributed.initialize({address!r}, 2, process, heartbeat_timeout_seconds=30)
from tests.train.data.bigram import bigram_task
task = bigram_task({folder!r}, {rows!r})
assert len(task.mesh.devices) == 4 and len(task.mesh.local_devices) == 2
batches = list(itertools.islice(task.batches(1), 2))
shards = [[a.data for a in batch["tokens"].addressable_shards] for batch in batches]
tokens = [numpy.concatenate(rows) for rows in shards]
loss = task.make_eval()(task.initial_state(), "validation")["loss"]
numpy.savez({file!r} % process, tokens=tokens, loss=loss)
"""


@pytest.mark.exhaustive
def test_two_processes(files, tmp_path):
    """Each has its rows of the batches of one process."""
    file = str(tmp_path / "%d.npz")
    with Group() as two:
        options = {"address": two.address, "folder": str(files[0]), "rows": str(files[1])}
        ended = two.execute(PROGRAM.format(file=file, **options))
        assert [one.code for one in ended] == [0, 0], ended
    task = bigram_task(*files, jax.devices()[:4])
    batches = list(itertools.islice(task.batches(1), 2))
    loss = task.make_eval()(task.initial_state(), "validation")["loss"]
    for process in range(2):
        with np.load(file % process) as arrays:
            for batch, tokens in zip(batches, arrays["tokens"], strict=True):
                rows = slice(2 * process, 2 * process + 2)
                np.testing.assert_array_equal(tokens, batch["tokens"][rows])
            assert arrays["loss"] == pytest.approx(loss, rel=1e-6)
