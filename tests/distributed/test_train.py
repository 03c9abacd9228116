"""`effjax train` in several processes: the same run as in one, and what ends it."""

import json
import signal

import jax
import numpy as np
import pytest

from effjax.train.checkpoint import Checkpoints
from effjax.train.images import task as images
from effjax.train.images.config import DenseNetConfig, ResNetConfig
from effjax.train.lm import task as lm
from effjax.train.lm.config import LMConfig
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from tests.distributed.commands import DEVICES, PATIENCE, ended, start, train

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
LM = "lm --layers 2 --width 64 --heads 2 --context 16 --batch-size 8 --steps 6 --report-every 3"
LOSSES = "train_loss", "validation_loss"
PREEMPTED = 75


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "fox.txt"
    path.write_text(TEXT)
    return [*LM.split(), "--data", f"text:{path}"]


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def losses(path):
    return [[line[name] for name in LOSSES] for line in lines(path) if LOSSES[0] in line]


def task_of(path):
    """Return the task of a run, on as many devices of this process."""
    run = RunDirectory.open(path)
    options, devices = run.config["options"], jax.devices()[:DEVICES]
    if run.config["command"] == "lm":
        return lm.prepare(LMConfig(**options), devices, resume=True)
    config = {"densenet": DenseNetConfig, "resnet": ResNetConfig}[run.config["command"]]
    return images.prepare(config(**options), devices)


def parameters(path, task):
    """Return the state in the last checkpoint, whatever devices wrote it."""
    with Checkpoints(RunDirectory.open(path).checkpoints, read_only=True) as saved:
        return jax.device_get(saved.restore(task.shapes(), saved.steps[-1]))


def check_run(path, rounding=1.0):
    """Assert that the losses and the last state are those of a run in this process alone.

    They agree up to the rounding of sums in another order, times what the steps make of it.
    """
    task = task_of(path)
    alone = RunDirectory.create(path.with_name("alone"), task.describe(), overwrite=False)
    fit(task, alone)
    np.testing.assert_allclose(losses(path), losses(alone.path), rtol=1e-5 * rounding)
    states = parameters(path, task), parameters(alone.path, task)
    for got, wanted in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * rounding)


SPLIT = "--mesh", "data=2,fsdp=2", "--offload", "all", "--fuse-update"


STOPS = """
if process == 1:
    import os, signal, time
    from effjax.train.lm.task import LMTask
    read, asked = LMTask.read, []
    def read_then_ask(self, metrics):
        if not asked:  # the first time; then wait until JAX has noticed it
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
            time.sleep(3)
        return read(self, metrics)
    LMTask.read = read_then_ask"""


def test_sigterm_saves_both_processes(tmp_path, text):
    """The checkpoint can be restored in one process."""
    run = tmp_path / "run"
    small = "--layers", "1", "--report-every", "9", "--mesh", "data=2,fsdp=2"
    results = ended(start(2, *text, *small, "--out", run, before=STOPS))
    assert [code for code, _, _ in results] == [PREEMPTED] * 2, results
    assert "stopped and saved at step" in results[0][2]
    assert ["compiling" in out for _, out, _ in results] == [True, False]
    assert lines(run)[-1] == {"kind": "interrupted"}
    state, task = parameters(run, task_of(run)), task_of(run)
    steps = {int(path.name) for path in (run / "checkpoints").iterdir()}
    assert steps == {0, int(state.step)} and 0 < int(state.step) < task.eval_steps[-1]
    first = jax.device_get(task.initial_state())
    for new, old in zip(*map(jax.tree.leaves, (state.params, first.params)), strict=True):
        assert np.isfinite(new).all() and (new != old).any()
        np.testing.assert_allclose(new, old, atol=0.1)


@pytest.mark.exhaustive
def test_stopped_in_two_processes_and_resumed_in_one(tmp_path, text):
    """Parameters split and on the host."""
    run = tmp_path / "run"
    results = ended(start(2, *text, *SPLIT, "--out", run, before=STOPS))
    assert [code for code, _, _ in results] == [PREEMPTED] * 2, results
    train(1, "lm", "--resume", run, "--mesh", "data=4")
    check_run(run)
    assert [line["kind"] for line in lines(run)] == ["step", "step", "final"]


@pytest.mark.exhaustive
def test_resumes_exactly_in_as_many_processes(tmp_path, text):
    runs = tmp_path / "stopped", tmp_path / "whole"
    results = ended(start(2, *text, *SPLIT, "--out", runs[0], before=STOPS))
    assert [code for code, _, _ in results] == [PREEMPTED] * 2, results
    train(2, "lm", "--resume", runs[0])
    train(2, *text, *SPLIT, "--out", runs[1])
    assert losses(runs[0]) == losses(runs[1])
    states = [parameters(run, task_of(runs[0])) for run in runs]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


SLOW = """
if process == 1:
    import time
    from orbax.checkpoint import CheckpointManager
    finalize = CheckpointManager._finalize
    def finalize_late(*args):
        time.sleep(3)
        finalize(*args)
    CheckpointManager._finalize = finalize_late"""


@pytest.mark.exhaustive
def test_checkpoints_that_one_process_is_slow_to_finish(tmp_path, text):
    """No process starts the next one before."""
    train(2, *text, *SPLIT, "--checkpoint-every", 1, "--out", tmp_path / "run", before=SLOW)
    check_run(tmp_path / "run")


DENSENET = "densenet --depth 10 --growth-rate 12 --epochs 2 --batch-size 256"
RESNET = (
    "resnet --depth 8 --dcn v2 --data rotated-digits --no-augment --epochs 1 --batch-size 512 "
    "--learning-rate 0.05 --weight-decay 5e-4"
)
RUNS = {  # with the number of processes
    "densenet in shard_map": (2, f"{DENSENET} --parallel shard_map"),
    "densenet in pmap": (2, f"{DENSENET} --parallel pmap"),
    "densenet split": (2, f"{DENSENET} --mesh data=2,fsdp=2"),
    "deformable resnet split": (2, f"{RESNET} --mesh fsdp=4"),
    "lm offloaded, split": (4, f"{LM} --mesh fsdp=4 --offload all --checkpoint-every 2"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_same_steps_as_in_one_process(tmp_path, text, name):
    number, argv = RUNS[name][0], RUNS[name][1].split()
    argv += text[-2:] if argv[0] == "lm" else []
    said = train(number, *argv, "--out", tmp_path / "run")
    assert ["written" in one for one in said] == [True] + [False] * (number - 1)
    # Samples begin on pixels, where their gradient depends on the side that rounding puts them to.
    check_run(tmp_path / "run", rounding=100 if argv[0] == "resnet" else 1)


def dies(how):
    """Return code that ends process 1 after its second step."""
    return f"""
if process == 1:
    import os, signal
    from effjax.train.lm.task import LMTask
    read, steps = LMTask.read, []
    def read_then_die(self, metrics):
        steps.append(metrics)
        if len(steps) == 2:
            {how}
        return read(self, metrics)
    LMTask.read = read_then_die"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_killed_process_ends_all(tmp_path, text, how):
    """JAX names it, and the run resumes from its last checkpoint."""
    argv = [*text, *SPLIT, "--out", tmp_path / "run"]
    before = dies(f"os.kill(os.getpid(), signal.{how})")
    started = start(2, *argv, before=before, heartbeat_timeout=10)
    try:
        _, said = started[0].communicate(timeout=PATIENCE)
    finally:
        started[1].send_signal(signal.SIGKILL)
        started[1].communicate()
    assert started[0].returncode not in (0, PREEMPTED)
    assert "unhealthy" in said and "\n1\n" in said  # process 1, as JAX says it
    train(1, "lm", "--resume", tmp_path / "run")
    check_run(tmp_path / "run")


@pytest.mark.exhaustive
def test_an_error_of_one_process_ends_all(tmp_path, text):
    argv = [*text, "--out", tmp_path / "run"]
    before = dies("from effjax.train.errors import TrainError; raise TrainError('no such luck')")
    (first, _, _), (second, _, said) = ended(start(2, *argv, before=before, heartbeat_timeout=5))
    assert first not in (0, PREEMPTED) and second == 2
    assert "effjax: no such luck\n" in said


@pytest.mark.exhaustive
def test_rejects_options_that_differ(tmp_path, text):
    before = "if process == 1: import sys; sys.argv += ['--seed', '7']"
    results = ended(start(2, *text, "--out", tmp_path / "run", before=before))
    assert results[1][0] == 2 and "option seed (=7) is 0 in process 0. Give all" in results[1][2]
    assert results[0][0] != 0 and not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_an_error_in_all_processes(tmp_path, text):
    """The first process checks the directory, and all print the error."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    results = ended(start(2, *text, "--out", tmp_path / "run"))
    assert [code for code, _, _ in results] == [2, 2], results
    assert all("not empty and not a run. Give another --out" in said for _, _, said in results)
