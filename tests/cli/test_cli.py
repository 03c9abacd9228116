import json
import signal
import subprocess
import sys

import pytest

from effjax import cli
from effjax.cli import doctor
from tests.programs import has_gpu_compiler, needs_gpu_compiler

TINY = ["train", "densenet", "--depth", "10", "--growth-rate", "4"]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty directory; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def needs_train():
    for name in ("typer", "rich", "matplotlib", "sklearn", "PIL"):
        pytest.importorskip(name)


@pytest.fixture
def small_model(monkeypatch):
    """A model that compiles in a second, on small images with the name `digits`."""
    from tests.train import small

    monkeypatch.setattr("effjax.train.images.task.model_builder", small.builder)
    monkeypatch.setattr("effjax.train.images.task.load_dataset", lambda *_: small.dataset())


def test_doctor_examines_this_machine():
    findings = doctor.examine()
    assert findings["packages"]["jax"] and findings["packages"]["flax"]
    assert len(findings["devices"]) >= 1
    assert findings["devices"][0]["default_memory"] in findings["devices"][0]["memories"]
    assert findings["backend_error"] is None
    text = "\n".join(doctor.lines(findings))
    assert "memory:" in text and "native kernels: cpu " in text and "extras:" in text


def test_doctor_says_what_to_install():
    missing = doctor.missing_by_extra(
        [
            "jax>=0.10.2",
            'numpy>=2; extra == "train"',
            "no-such-package>=1 ; extra == 'train'",
            'no-such-package[all]; python_version > "3" and extra == "plan"',
            'effjax[train,plan]; extra == "test"',
            'pytest>=8; extra == "test"',
            'jax[cuda99-local]; extra == "cuda99"',
        ]
    )
    none = ["no-such-package"]
    cuda = ["jax-cuda99-plugin"]
    assert missing == {"train": none, "plan": none, "test": none, "cuda99": cuda}


def test_doctor_without_a_backend(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr("jax.local_devices", fail)
    findings = doctor.examine()
    assert findings["devices"] == []
    assert "devices: none, Unable to initialize backend 'cuda': no driver" in doctor.lines(findings)


def test_doctor_command(run, needs_train):
    code, out, _ = run("doctor")
    assert code == 0 and "memory:" in out
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["packages"]["jax"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_train_extra(run, needs_train, monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "effjax.cli.app", raising=False)
    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = run("train", "densenet")
    assert (code, out) == (2, "")
    assert err == f'effjax: {missing} is missing; run pip install "effjax[train]"\n'
    code, out, _ = run("doctor")
    assert code == 0 and "native kernels: cpu " in out
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["devices"]
    monkeypatch.delitem(sys.modules, "effjax.cli.app", raising=False)


def test_version_and_help(run, needs_train):
    import effjax

    assert run("--version")[:2] == (0, f"effjax {effjax.__version__}\n")
    for argv in (["--help"], ["train", "--help"], [*TINY[:2], "--help"], ["train", "lm", "--help"]):
        code, out, _ = run(*argv)
        assert code == 0 and "Usage: effjax" in out


def test_help_starts_no_backend(needs_train):
    code = (
        "import sys; from effjax.cli import main; main(['train', 'densenet', '--help']);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends;"
        "assert not {'flax', 'optax', 'matplotlib', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def one_line(err):
    return err.startswith("effjax: ") and err.endswith("\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "mnist"], "data 'mnist' is not known"),
        (["--data", "cifar10:nowhere"], "nowhere: no such file"),
        (["--data", "cifar10:broken.tar.gz"], "broken.tar.gz: not a whole .tar.gz"),
        (["--data", "folder:broken"], "dog/0.png: not a readable image"),
        (["--batch-size", "12"], "batch_size (=12) is not divisible by the number of devices (=8)"),
        (["--depth", "23"], "must be 6n + 4"),
        (["--model", "vgg"], "model (='vgg')"),
        (["--epochs", "0"], "epochs (=0)"),
        (["--out", "file/run"], "file/run: cannot be written to"),
        (["--out", "broken"], "broken: not empty and not a run"),
        (["--resume", "broken"], "broken: not a run"),
        (["--resume", "broken", "--epochs", "3"], "--epochs cannot be given with --resume"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, needs_train, argv, message):
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b hello")
    (tmp_path / "file").write_text("")
    for name in ("cat", "dog"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "0.png").write_text("hello")
    (tmp_path / "broken" / "cat" / "0.png").write_bytes(png())
    before = sorted(tmp_path.rglob("*"))
    options = argv if "--resume" in argv else [*TINY[2:], *argv]
    code, out, err = run("train", "densenet", *options)
    assert (code, out) == (2, "")
    assert one_line(err) and message in err
    assert sorted(tmp_path.rglob("*")) == before


def png():
    import io

    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "png")
    return stream.getvalue()


def test_an_option_that_is_not_known(run, needs_train):
    code, out, err = run(*TINY, "--dtype", "int8")
    assert (code, out) == (2, "") and "int8" in err and "Traceback" not in err


def test_one_epoch_of_densenet_on_digits(run, needs_train, tmp_path):
    code, out, err = run(*TINY, "--epochs", "1", "--parallel", "shard_map", "--out", "here")
    assert (code, err) == (0, "")
    assert "digits: 1438 train and 359 test images of 8×8×1 in 10 classes" in out
    assert "shard_map over 8 device(s)" in out
    assert "epoch 1/1  loss" in out
    for row in ("test accuracy", "images/s", "batch 64 (plain)", "batch 64 (efficient, this run)"):
        assert row in out
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final"
    assert 0 < final["kept_bytes"]["efficient"] < final["kept_bytes"]["plain"]

    code, out, err = run(*TINY, "--epochs", "1", "--out", "here")
    assert (code, out) == (2, "") and one_line(err)
    assert "here: holds a run; give another --out, or --overwrite" in err


def test_deform_resnet_and_its_baseline(run, needs_train, small_model, tmp_path):
    options = ["--epochs", "1", "--batch-size", "16", "--data", "digits", "--out", "here"]
    code, out, err = run("train", "deform-resnet", *options)
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: deformable ") and ", plain " in last
    for name in ("deformable", "plain"):
        config = json.loads((tmp_path / "here" / name / "config.json").read_text())
        assert config["options"]["deformable"] is (name == "deformable")
    code, out, _ = run("train", "deform-resnet", *options, "--overwrite", "--no-baseline")
    assert code == 0 and "plain" not in out.splitlines()[-1]
    code, _, err = run("train", "deform-resnet", *options)
    assert code == 2 and one_line(err) and "holds a run" in err


def interrupt_at(number):
    """For a progress: Ctrl-C after a step."""

    def step(self, step, measured, rate):
        if step == number:
            signal.raise_signal(signal.SIGINT)

    return step


def test_ctrl_c_then_resume(run, needs_train, small_model, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("effjax.train.report.LineProgress.step", interrupt_at(5))  # of 8
        options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
        code, out, err = run("train", "densenet", *options)
    assert code == 130 and "epoch 1/2" in out
    assert err == "effjax: interrupted; go on with effjax train densenet --resume here\n"
    names = {p.name for p in (tmp_path / "here").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}

    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, err) == (0, "")
    assert "epoch 1/2" not in out and "epoch 2/2" in out


def test_ctrl_c_before_training(run, needs_train, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("effjax.train.images.task.load_dataset", interrupt)
    assert run(*TINY) == (130, "", "effjax: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory(run, needs_train, small_model, monkeypatch):
    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")

    monkeypatch.setattr("effjax.train.loop.fit", exhausted)
    code, _, err = run("train", "densenet", "--batch-size", "16")
    assert code == 1 and one_line(err) and "out of device memory; try a smaller" in err


def test_overwrite_and_progress_bar(run, needs_train, small_model, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    options = ["--epochs", "1", "--batch-size", "16", "--out", "here"]
    assert run("train", "densenet", *options)[0] == 0
    (tmp_path / "here" / "curve.png").write_text("old")
    code, out, _ = run("train", "densenet", *options, "--overwrite")
    assert code == 0 and "images/s" in out
    assert (tmp_path / "here" / "curve.png").read_bytes().startswith(b"\x89PNG")


LM = ["--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--batch-size", "8"]
LM += ["--steps", "3", "--report-every", "2", "--data", "text:text.txt"]


@pytest.fixture
def run_lm(run, needs_train, tmp_path):
    """Runs `effjax train lm` where there is a small text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    return lambda *argv: run("train", "lm", *argv)


def test_lm_with_ctrl_c_and_resume(run_lm, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("effjax.train.report.LineProgress.step", interrupt_at(3))
        code, out, err = run_lm(*LM, "--remat", "--bias", "--dtype", "bfloat16", "--out", "here")
    assert code == 130 and "step 2/3  loss" in out
    assert err == "effjax: interrupted; go on with effjax train lm --resume here\n"
    assert "text:text.txt: 357 train and 39 test bytes" in out
    assert "batch 8 × 8, 3 steps, 8 device(s)" in out
    options = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert options["remat"] and options["bias"] and options["context"] == 8

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    code, out, err = run_lm("--resume", "here")
    assert (code, err) == (0, "")
    assert "step 2/3" not in out and "step 3/3" in out
    for row in (
        "train loss",
        "test loss",
        "bits/byte",
        "parameters",
        "tokens/s",
        "without context",
        *(["device memory on an H200", "host memory beside it"] if has_gpu_compiler() else []),
    ):
        assert row in out
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final" and final["test_bits_per_byte"] < 9


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "digits"], "data 'digits' is not known; use one of pydoc, text:PATH"),
        (["--data", "text:nowhere"], "nowhere: no such file or directory"),
        (["--context", "39"], "396 bytes are too few for context (=39)"),
        (["--heads", "3"], "width (=8) must be divisible by 2 · heads (=3); use 6"),
        (["--batch-size", "12"], "batch_size (=12) is not divisible by the number of devices (=8)"),
        (["--steps", "0"], "steps (=0)"),
        (["--fuse-update"], "fuse_update is for parameters on the host; use offload params or all"),
        (["--out", "."], ".: not empty and not a run"),
        (["--resume", "."], ".: not a run"),
        (["--resume", ".", "--context", "3"], "--context cannot be given with --resume"),
    ],
)
def test_lm_says_what_is_wrong(run_lm, tmp_path, argv, message):
    code, out, err = run_lm(*([] if "--resume" in argv else LM), *argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_lm_out_of_memory(run_lm, monkeypatch):
    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("effjax.train.loop.fit", exhausted)
    code, _, err = run_lm(*LM)
    assert code == 1 and one_line(err) and "smaller --batch-size, or --remat" in err


OWN = """
import jax, jax.numpy as jnp

def one(batch):
    return lambda x: x + 1, jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def two(batch):
    return {"sum": (jnp.sum, *one(batch)[1:]), "sin": (jnp.sin, *one(batch)[1:])}

def wrong(batch):
    return batch

number = 3
"""


@pytest.fixture
def run_memory(run, needs_train, tmp_path, monkeypatch):
    """Runs `effjax memory` where the module `own_step` has steps."""
    monkeypatch.delitem(sys.modules, "own_step", raising=False)
    (tmp_path / "own_step.py").write_text(OWN)
    return lambda *argv: run("memory", *argv)


@needs_gpu_compiler
def test_memory_of_own_steps(run_memory, tmp_path):
    code, out, err = run_memory("own_step:one", "--batch-size", "4", "--target", "l4")
    assert (code, err) == (0, "")
    assert "one: 8.2 kB at the peak fits in 17.7 GB (75% of NVIDIA L4)" in out
    code, out, _ = run_memory("own_step:two", "--batch-size", "4", "--plot", "a.png", "--json")
    plans = json.loads(out)
    assert code == 0 and list(plans) == ["sum", "sin"]
    assert plans["sin"]["peak_device_bytes"] == 2 * 4 * 4 * 256
    assert (tmp_path / "a.png").stat().st_size > 1000


@needs_gpu_compiler
def test_memory_of_the_largest_batch(run_memory):
    argv = "own_step:one", "--max-batch", "--target", "l4", "--memory-fraction", "0.0001"
    code, out, _ = run_memory(*argv, "--json")
    largest = int(0.0001 * 22 * 2**30) // 2048
    assert code == 0 and json.loads(out)["one"]["batch_size"] == largest
    code, out, _ = run_memory(*argv)
    assert code == 0 and str(largest) in out


@needs_gpu_compiler
def test_memory_of_a_densenet(run_memory):
    argv = "densenet", "--depth", "10", "--growth-rate", "4", "--image-size", "8"
    only = "--only", "effjax conv", "--only", "plain"
    code, out, err = run_memory(*argv, *only, "--batch-size", "4", "--num-devices", "2")
    assert (code, err) == (0, "")
    assert "plain" in out and "effjax conv" in out and "jax.checkpoint" not in out
    assert "all-reduce" in out and "each of 2" in out


def test_memory_of_a_language_model(run_memory):
    only = "--only", "in memory", "--only", "offload all, fused"
    argv = "lm", "--layers", "6", "--width", "64", "--context", "16", "--batch-size", "4"
    code, out, err = run_memory(*argv, *only, "--num-microbatches", "2", "--json")
    assert (code, err) == (0, "")
    plans = json.loads(out)
    parameters = 4 * 6 * (12 * 64**2 + 2 * 64)
    assert plans["in memory"]["host"]["arguments"] == 0
    assert plans["in memory"]["device"]["arguments"] >= 3 * parameters
    offloaded = plans["offload all, fused"]
    assert offloaded["host"]["arguments"] == offloaded["host"]["aliased"] == 3 * parameters


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no_such_module:f"], "there is no module no_such_module"),
        (["own_step:nothing"], "own_step has no function 'nothing'"),
        (["own_step:number"], "own_step has no function 'number'"),
        (["own_step:wrong"], "must return (fn, *args) or a dict of such by name, not int"),
        (["own_step:one", "--target", "h300"], "neither one of h200"),
        (["own_step:two", "--only", "cos"], "--only 'cos' must be one of sum, sin"),
        (["own_step:one", "--plot", "no/where.png"], "there is no folder no"),
        (["own_step:one", "--memory-fraction", "2"], "must lie in (0, 1]"),
        (["densenet", "--layers", "2"], "--layers is not an option of densenet"),
        (["lm", "--depth", "22"], "--depth is not an option of lm"),
        (["lm", "--width", "9"], "width (=9) must be divisible by 2 · heads (=4)"),
        (["own_step:one", "--batch-size", "3", "--num-devices", "2"], "divisible by num_devices"),
        (["densenet", "--depth", "11"], "`depth` (=11)"),
        (["densenet", "--image-size", "2"], "is too small"),
        (["resnet50"], "must be one of densenet-bc"),
    ],
)
def test_memory_says_what_is_wrong(run_memory, argv, message):
    code, out, err = run_memory(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err


def test_memory_without_the_compiler(run_memory, monkeypatch):
    monkeypatch.setattr("effjax.memory._compile._PLUGINS", ())
    code, out, err = run_memory("own_step:one")
    assert (code, out) == (1, "") and one_line(err) and 'pip install "effjax[plan]"' in err
