"""`effjax train` and `finetune` in two processes: the same run as in one, and what ends it."""

import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from effjax.convert import load_adapter, load_checkpoint, load_detector
from effjax.models import DecoderConfig, decoder_shapes
from effjax.train.checkpoint import Checkpoints
from effjax.train.detection import task as detection
from effjax.train.detection.config import DetectorConfig
from effjax.train.images import task as images
from effjax.train.images.config import DenseNetRunConfig
from effjax.train.loop import fit
from effjax.train.run_directory import RunDirectory
from effjax.train.text import task as text
from effjax.train.text.config import FinetuneConfig
from tests.distributed.processes import DEVICES, Group
from tests.train.detection import coco
from tests.train.small import as_numbers
from tests.train.test_checkpoint import flip_bit
from tests.train.text.small import write_base

pytest.importorskip("tokenizers")

SHORT = "--max-length 16 --batch-size 4 --report-every 2 --learning-rate 1e-2 --dtype float32"
SHORT += " --param-dtype float32 --date 2026-01-31"
STEPS = "--steps", 14
SPLIT = "--mesh", "data=2,fsdp=2", "--params-in", "host", "--fuse-update"
OFTEN = "--checkpoint-every", 1, "--keep", 9
LOSSES = "train_loss", "validation_loss"
PREEMPTED = 75


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base", num_hidden_layers=1)


@pytest.fixture(scope="module")
def options(base):
    """Return the command of a small run."""
    return ["finetune", base, "--data", base / "rows.jsonl", *SHORT.split()]


@pytest.fixture(scope="module")
def group():
    """Two processes for all commands that end well."""
    with Group() as group:
        yield group


def losses(path):
    lines = RunDirectory.open(path).read_metrics()
    return [[line[name] for name in LOSSES] for line in lines if LOSSES[0] in line]


def task_of(path, **changes):
    """Return the task of a run, on as many devices of this process."""
    stored = RunDirectory.open(path).read_config()
    options, devices = stored["options"] | changes, jax.devices()[:DEVICES]
    if stored["command"] == "finetune":
        return text.prepare(FinetuneConfig.from_json(options), devices)
    if stored["command"] == "detector":
        return detection.prepare(DetectorConfig.from_json(options), devices)
    return images.prepare(DenseNetRunConfig.from_json(options), devices)


def parameters(path, task):
    """Return the state in the last checkpoint, whatever devices wrote it, with the bits of keys."""
    with Checkpoints(RunDirectory.open(path).checkpoints) as saved:
        state = saved.restore(task.shapes(), saved.steps[-1])
    return jax.tree.map(as_numbers, state)


def exported(path, lora=None):
    """Return the arrays that a run has exported."""
    if lora:
        return load_adapter(path / "adapter")[0]
    assert (path / "model" / "tokenizer.json").exists()
    config = DecoderConfig.from_json(path / "model")
    return load_checkpoint(path / "model", *decoder_shapes(config))


def train_alone(path):
    """Train with the options of another run in this process; return the run."""
    task, alone = task_of(path), path.with_name(f"{path.name}-alone")
    fit(task, RunDirectory.create(alone, task.describe(), overwrite=False))
    return alone


def assert_same_run(path, alone):
    """Assert that the losses and the last state of two runs agree.

    They agree up to the rounding of sums in another order.
    """
    np.testing.assert_allclose(losses(path), losses(alone), rtol=1e-5)
    task = task_of(alone)
    states = parameters(path, task), parameters(alone, task)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def assert_same_bits(path, other):
    assert losses(path) == losses(other)
    task = task_of(path)
    jax.tree.map(np.testing.assert_array_equal, parameters(path, task), parameters(other, task))


# A process gets a signal in a step. JAX notices SIGTERM after about a second.
IN_STEP = """
if process == {}:
    import os, signal, time
    from effjax.train.text.task import TextTask
    read, steps = TextTask.read, []
    def send_and_read(self, metrics):
        steps.append(metrics)
        if len(steps) == {}:
            os.kill(os.getpid(), signal.{})
        time.sleep(0.3)
        return read(self, metrics)
    patch.setattr(TextTask, "read", send_and_read)"""


@pytest.fixture(scope="module")
def stopped(group, options, tmp_path_factory):
    """Train until SIGTERM; return the run and how its processes ended."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    signal = IN_STEP.format(1, 4, "SIGTERM")
    argv = *options, *STEPS, *SPLIT, *OFTEN, "--out", run
    return run, group.run(*argv, before=signal)


def test_sigterm_saves_both_processes(stopped):
    run, ended = stopped
    assert [one.code for one in ended] == [PREEMPTED] * 2, ended
    assert "stopped and saved at step" in ended[0].err
    assert ["compiling" in one.out for one in ended] == [True, False]
    assert RunDirectory.open(run).read_metrics()[-1] == {"kind": "interrupted"}
    with Checkpoints(run / "checkpoints") as saved:
        last = saved.steps[-1]
        assert last > 0 and f"at step {last}." in ended[0].err
        assert saved.find_damage(last) is None


SLOW = """
if process == 1:
    import time
    from orbax.checkpoint import CheckpointManager
    finalize = CheckpointManager._finalize
    def finalize_late(*args):
        time.sleep(0.5)
        finalize(*args)
    patch.setattr(CheckpointManager, "_finalize", finalize_late)"""


@pytest.fixture(scope="module")
def whole(group, options, tmp_path_factory):
    """Train to the end, with a checkpoint after each step.

    No process starts a checkpoint before the other one, which is slow, has finished the last one.
    """
    run = tmp_path_factory.mktemp("whole") / "run"
    argv = *options, *STEPS, *SPLIT, *OFTEN, "--out", run
    said = group.train(*argv, before=SLOW)
    assert ["written" in out for out in said] == [True, False]
    return run


@pytest.fixture(scope="module")
def alone(whole):
    return train_alone(whole)


@pytest.mark.exhaustive
def test_offloaded_run_with_slow_checkpoints(group, whole, alone, tmp_path):
    assert_same_run(whole, alone)
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "model")
    group.train("finetune", "--resume", run)  # a run that has ended exports the same again
    jax.tree.map(np.testing.assert_array_equal, exported(run), exported(whole))


@pytest.mark.exhaustive
def test_adapters(group, options, tmp_path):
    run = tmp_path / "run"
    argv = *options, "--steps", 6, *SPLIT[:-1], "--lora", 2, "--out", run
    group.train(*argv)
    alone = train_alone(run)
    assert_same_run(run, alone)
    arrays = exported(run, lora=2), exported(alone, lora=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), *arrays)


@pytest.mark.exhaustive
def test_resumes_exactly_after_sigterm_and_damage(group, stopped, whole, tmp_path):
    run = shutil.copytree(stopped[0], tmp_path / "run")
    *_, before, last = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    flip_bit(run / "checkpoints" / str(last))
    first, second = group.train("finetune", "--resume", run)
    message = f"checkpoints/{last} is damaged"
    assert message in first and f"Using {run}/checkpoints/{before}\n" in first
    assert message not in second
    assert (run / "checkpoints" / f"damaged-{last}").is_dir()
    assert_same_bits(run, whole)


DENSENET = (
    "train densenet --depth 10 --growth-rate 4 --epochs 1 --batch-size 256 --learning-rate 0.01"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["--parallel pmap", "--mesh fsdp=4"])
def test_images_take_the_same_steps_as_in_one_process(group, tmp_path, options):
    """Each process passes its own rows to pmap; with fsdp, parameters are split over processes."""
    run = tmp_path / "run"
    said = group.train(*DENSENET.split(), *options.split(), "--out", run)
    assert ["written" in out for out in said] == [True, False]
    assert_same_run(run, train_alone(run))


# Instead of the average precision, which is 0 after few steps, a number of the order of the images.
IN_ORDER = """
import numpy as np
from effjax.train.detection import task
def average(images, num_classes, scores, labels, boxes):
    return {"ap": float(np.average(boxes.mean((1, 2)), weights=np.arange(len(images))))}
patch.setattr(task, "average_precision", average)"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=4", "data=2,fsdp=2"])
def test_detectors_take_the_same_steps_as_in_one_process(group, tmp_path, mesh, monkeypatch):
    """Each process decodes its own images, and detections of all are evaluated."""
    pytest.importorskip("pycocotools")
    run, data = tmp_path / "run", coco.write_coco(tmp_path / "coco")
    weights = coco.write_detector(tmp_path / "rtdetr")
    argv = "train", "detector", "--data", data, "--weights", weights, "--mesh", mesh
    options = "--image-size 32 --batch-size 8 --steps 4 --report-every 2"
    said = group.train(*argv, *options.split(), "--out", run, before=IN_ORDER)
    assert ["written" in out for out in said] == [True, False]
    exec(IN_ORDER, {"patch": monkeypatch})
    alone = train_alone(run)
    assert_same_run(run, alone)
    lines = [RunDirectory.open(path).read_metrics() for path in (run, alone)]
    found = [[line["validation_ap"] for line in each if "validation_ap" in line] for each in lines]
    assert found[0] == pytest.approx(found[1], rel=1e-4) and min(found[0]) > 1
    models = [nnx.state(load_detector(path / "model")) for path in (run, alone)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), *models)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "killed"), [("SIGKILL", 1), ("SIGKILL", 0), ("SIGSTOP", 1)])
def test_a_killed_process_ends_all(tmp_path, options, alone, how, killed):
    """JAX ends the other one, and the run resumes in one process from its last checkpoint."""
    run, other = tmp_path / "run", 1 - killed
    with Group(heartbeat_timeout=10) as two:
        ended = two.run(
            *options, *STEPS, *SPLIT, "--out", run,
            before=IN_STEP.format(killed, 3, how), wait_for=[other],
        )[other]  # fmt: skip
    assert ended.code not in (None, 0, PREEMPTED)
    if how == "SIGSTOP":
        assert "unhealthy" in ended.err and "\n1\n" in ended.err  # process 1, as JAX says it
    fit(task_of(run, mesh="data=4"), RunDirectory.open(run), resume=True)
    assert_same_run(run, alone)


def test_an_error_of_one_process(tmp_path, options):
    """It ends at once with its error. The other one, which waits for it, is ended by JAX."""
    before = "if process == 1: argv[argv.index('--data') + 1] = 'nowhere.jsonl'"
    with Group(heartbeat_timeout=5) as two:
        first, second = two.run(*options, *STEPS, "--out", tmp_path / "run", before=before)
    assert second.code == 2 and second.err.startswith("effjax: nowhere.jsonl: cannot be read")
    assert first.code not in (None, 0, 2, PREEMPTED) and not (tmp_path / "run").exists()


LIBRARIES = """pass
from effjax.native import defaults
patch.setenv("EFFJAX_CUDA", "on")
patch.setattr(defaults, "library_digest", lambda _: str(process))"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("argv += ['--seed', '7']", "option --seed (=7 in process 1) is 0 in process 0"),
        ("argv += ['--resume', 'a-run']", "option --resume (='a-run' in process 1) is None"),
        ("argv[argv.index('--data') + 1] = OTHER", "data `sha256` (='"),
        ("patch.setenv('EFFJAX_CUDA', 'off')", "native kernels `EFFJAX_CUDA` (='off' in"),
        (LIBRARIES, "native kernels `library` (='1' in process 1) is '0' in process 0"),
        # The first process alone checks the directory.
        ("import os; os.makedirs(RUN + '/mine')", "run: not empty and not a run"),
    ],
)
def test_an_error_that_all_processes_print(tmp_path, base, options, change, message):
    other = tmp_path / "other.jsonl"  # as long, with other contents
    other.write_text((base / "rows.jsonl").read_text().replace("class", "klass"))
    run = tmp_path / "run"
    before = f"OTHER, RUN = {str(other)!r}, {str(run)!r}\nif process == 1: {change}"
    with Group(heartbeat_timeout=5) as two:
        first, second = two.run(*options, *STEPS, "--out", run, before=before)
    assert first.code == second.code == 2 and not (run / "config.json").exists()
    assert first.err.startswith("effjax: ") and message in first.err and second.err == first.err
