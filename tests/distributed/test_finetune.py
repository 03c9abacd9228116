"""`effjax finetune` in two processes: the same run as in one."""

import shutil

import jax
import numpy as np
import pytest

from effjax.convert import load_adapter, load_checkpoint
from effjax.models import DecoderConfig, decoder_shapes
from effjax.train.loop import fit
from tests.distributed.processes import DEVICES, Group
from tests.distributed.test_train import losses
from tests.train.small import new_run
from tests.train.text.small import finetune_task, write_base

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.exhaustive

SHORT = "--max-length 16 --batch-size 4 --report-every 2 --learning-rate 1e-2 --dtype float32"
SHORT += " --param-dtype float32 --date 2026-01-31"
SPLIT = dict(mesh="data=2,fsdp=2", offload="all")


@pytest.fixture(scope="module")
def group():
    with Group() as group:
        yield group


@pytest.mark.parametrize("lora", [None, 2])
def test_two_processes(group, tmp_path, lora):
    base = write_base(tmp_path / "base", num_hidden_layers=1)
    task = finetune_task(base, devices=DEVICES, lora=lora, **SPLIT)
    alone = new_run(tmp_path / "alone", task)
    fit(task, alone)

    run = tmp_path / "run"
    argv = ["finetune", base, "--data", base / "rows.jsonl", *SHORT.split()]
    argv += ["--steps", 6, "--out", run]
    argv += [word for name, value in SPLIT.items() for word in (f"--{name}", value)]
    argv += ["--lora", lora] if lora else []
    ended = group.run(*argv)
    assert [one.code for one in ended] == [0, 0], ended
    assert ["written" in one.out for one in ended] == [True, False]
    np.testing.assert_allclose(losses(run), losses(alone.path), rtol=1e-5)
    arrays, expected = (read_export(path, lora) for path in (run, alone.path))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), arrays, expected)

    if lora:
        return
    # A run that has ended exports the same again.
    shutil.rmtree(run / task.exported)
    ended = group.run("finetune", "--resume", run)
    assert [one.code for one in ended] == [0, 0], ended
    jax.tree.map(np.testing.assert_array_equal, read_export(run, lora), arrays)


def read_export(run, lora):
    """Return the arrays that a run has exported."""
    if lora:
        return load_adapter(run / "adapter")[0]
    folder = run / "model"
    assert (folder / "tokenizer.json").exists()
    return load_checkpoint(folder, *decoder_shapes(DecoderConfig.from_json(folder)))
