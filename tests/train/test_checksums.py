"""A checkpoint that is damaged, or of something else: every test runs on images and on text."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from effjax.train import checksums
from effjax.train.checkpoint import Checkpoints
from effjax.train.errors import Damaged, TrainError
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from tests.tiers import plainly
from tests.train.small import CompiledOnce, Said, image_task, lm_task

pytest.importorskip("matplotlib")

MAKE = {"images": image_task, "lm": lm_task}


@pytest.fixture(scope="module", params=plainly("images", of=MAKE))
def task(request):
    return CompiledOnce(MAKE[request.param](checkpoint_every=3))


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """A finished run, in which the first number is made to be the best one."""
    run = RunDirectory.create(tmp_path_factory.mktemp("whole") / "run", task.describe(), False)
    task.score = lambda record: -record[task.kind]
    fit(task, run)
    return run


@pytest.fixture
def run(whole, tmp_path):
    return RunDirectory.open(shutil.copytree(whole.path, tmp_path / "run"))


def flip(checkpoint):
    """One bit in the largest file, which holds arrays."""
    file = max((f for f in checkpoint.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def lines(run):
    timing = {"seconds", "images_per_second", "tokens_per_second"}
    return [{k: v for k, v in record.items() if k not in timing} for record in run.metrics]


def test_another_bit_is_found(tmp_path):
    state = {"a": np.arange(30000, dtype=np.float32), "b": jax.numpy.ones(3)}
    with Checkpoints(tmp_path / "run") as saved:
        saved.save(2, state, best=2)
    sums = json.loads((tmp_path / "run" / "2" / "checksums.json").read_text())
    files = {f for f in (tmp_path / "run" / "2").rglob("*") if f.is_file()}
    assert len(sums) == len(files) - 1 > 3
    with Checkpoints(tmp_path / "run") as saved:
        assert saved.fault(2) is None
        jax.tree.map(np.testing.assert_array_equal, saved.restore(state, 2), state)
        for file in sorted(files):
            content = file.read_bytes()
            for damage in (lambda f, c: f.write_bytes(c[:-1] + bytes([c[-1] ^ 1])), None):
                damage(file, content) if damage else file.unlink()
                if file.name == checksums.NAME and damage is None:
                    assert saved.fault(2) is None  # as those of older runs
                else:
                    with pytest.raises(Damaged, match=r"run/2: cannot be restored \("):
                        saved.restore(state, 2)
                file.write_bytes(content)


def test_a_damaged_checkpoint_names_the_one_to_fall_back_to(task, whole, run):
    first, _, last = task.numbers
    flip(run.checkpoints / str(last))
    message = rf"checkpoints/{last}: cannot be restored .* is not as it was written.; give "
    message += rf"--fall-back with --resume to go on from .*/checkpoints/{first}$"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
    assert lines(run) == lines(whole)
    said = Said()
    fit(task, run, said, resume=True, fall_back=True)
    assert f"checkpoints/{last}: cannot be restored" in said.texts[0]
    assert said.texts[1:] == [f"goes on from {run.path}/checkpoints/{first}"]
    assert said.steps[0] == first * task.steps_each + 1
    assert lines(run) == lines(whole)
    same_bits(task, run, whole)


def same_bits(task, *runs):
    """Of the last parameters."""
    found = []
    for run in runs:
        with Checkpoints(run.checkpoints) as saved:
            found.append(jax.tree.leaves(saved.restore(task.shapes(), task.numbers[-1])))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_best_one_is_damaged(task, run):
    """It is looked for at the end only."""
    first, _, last = task.numbers
    flip(run.checkpoints / str(first))
    message = rf"checkpoints/{first}: cannot .* go on from .*/checkpoints/{last}$"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
    result = fit(task, run, resume=True, fall_back=True)
    assert vars(result)[f"best_{task.kind}"] == last


def test_no_whole_checkpoint(task, run):
    for number in task.numbers[::2]:
        flip(run.checkpoints / str(number))
    with pytest.raises(TrainError, match="there is no whole one beside it: put its files back, or"):
        fit(task, run, resume=True)
    with pytest.raises(TrainError, match="run: none of its checkpoints can be restored; start a"):
        fit(task, run, resume=True, fall_back=True)
    assert len(list(run.checkpoints.iterdir())) == 2  # nothing is lost by it


def unreadable(*_, **__):
    raise OSError(5, "Input/output error")


def of_another_model(*_, **__):
    raise ValueError("User-provided restore item and on-disk value are not alike")


def test_a_checkpoint_of_another_model_is_not_to_be_deleted(task, run, monkeypatch):
    message = r"is whole, but not of the model that config.json tells of \(ValueError\); put the"
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.restore", of_another_model)
        for fall_back in (False, True):
            with pytest.raises(TrainError, match=message):
                fit(task, run, resume=True, fall_back=fall_back)
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.CheckpointManager.restore", unreadable)
        with pytest.raises(TrainError, match=r"cannot be restored \(OSError\); give --fall-back"):
            fit(task, run, resume=True)
    assert len(list(run.checkpoints.iterdir())) == 2


def test_a_damaged_checkpoint_of_an_older_run(task, run):
    """It has no checksums; what Orbax refuses is damaged."""
    checkpoint = run.checkpoints / str(task.numbers[-1])
    (checkpoint / checksums.NAME).unlink()
    os.truncate(checkpoint / "default" / "_METADATA", 100)
    message = rf"cannot be restored \(\w+\); give .*/checkpoints/{task.numbers[0]}$"
    with pytest.raises(TrainError, match=message):
        fit(task, run, resume=True)
