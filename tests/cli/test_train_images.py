import contextlib
import dataclasses
import json
import shutil
import signal
import sys

import pytest

from effjax import cli
from effjax.train.images.config import DenseNetConfig, ResNetConfig
from tests.cli.command import TINY, interrupt_at, one_line, signal_at


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "folder:broken"], "dog/0.png: not a readable image"),
        (["--batch-size", "12"], "`batch_size` (=12)"),
        (["--model", "vgg"], "`model` (='vgg')"),
        (["--model", "resnet50"], "is not a DenseNet. Use effjax train resnet --model resnet50."),
        (["--model", "wide_resnet50_2"], "Use effjax train resnet --model wide_resnet50_2."),
        (["--freeze-stages", "1"], "`freeze_stages` (=1) needs `init_from`"),
        (["--init-from", "broken/weights.pth"], "broken/weights.pth: cannot be read"),
        (["--out", "broken"], "broken"),
        (["--resume", "broken"], "broken"),
        (["--resume", "broken", "--depth", "22"], "--depth cannot be combined with --resume"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, argv, message):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        for file in ("0.png", "1.png"):
            Image.new("RGB", (8, 8)).save(tmp_path / "broken" / name / file)
    (tmp_path / "broken" / "dog" / "0.png").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    options = argv if "--resume" in argv else [*TINY[2:], *argv]
    code, out, err = run("train", "densenet", *options)
    assert (code, out) == (2, "")
    assert one_line(err) and message in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.exhaustive
def test_one_epoch_of_densenet_on_digits(run, tmp_path):
    code, out, err = run(*TINY, "--epochs", "1", "--parallel", "shard_map", "--out", "here")
    assert (code, err) == (0, "")
    assert "digits: 1295 train, 143 validation and 359 test images of 8×8×1 in 10 classes" in out
    assert "shard_map over 8 devices" in out
    assert "1 epoch, " in out and "epoch 1/1  loss" in out
    for row in ("test accuracy", "images/s", "batch 64 (plain)", "batch 64 (efficient, this run)"):
        assert row in out
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final"
    assert 0 < final["kept_bytes"]["efficient"] < final["kept_bytes"]["plain"]


def test_resnet_and_its_comparison(run, small_model, tmp_path):
    argv = "train", "resnet", "--depth", "34", "--dcn", "v2", "--compare-plain", "--epochs", "1"
    code, out, err = run(*argv, "--batch-size", "16", "--out", "here")
    assert (code, err) == (0, "") and "resnet34, float32" in out
    assert "batch 16 (efficient, this run)" in out
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: dcn v2 ") and ", plain " in last
    for name, dcn in (("here", "v2"), ("here-plain", "none")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["command"] == "resnet" and config["options"]["dcn"] == dcn

    shutil.rmtree(tmp_path / "here-plain")
    code, out, err = run("train", "resnet", "--resume", "here", "--compare-plain")
    assert (code, err) == (0, "") and out.splitlines()[-1] == last


def test_ctrl_c_that_a_callback_swallows(run, small_model, monkeypatch):
    """As those do that JAX calls from C++: the run ends after the step, with a checkpoint."""

    def step(self, step, measured, rate):
        with contextlib.suppress(KeyboardInterrupt):
            interrupt_at(3)(self, step, measured, rate)

    monkeypatch.setattr("effjax.train.report.ConsoleProgress.step", step)
    options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
    code, _, err = run("train", "densenet", *options)
    assert code == 130 and err.startswith("effjax: interrupted and saved at step 4, in epoch 1. ")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.exhaustive
def test_ctrl_c_then_resume(run, small_model, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("effjax.train.report.ConsoleProgress.step", interrupt_at(5))  # of 8
        options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
        code, out, err = run("train", "densenet", *options)
    assert code == 130 and "epoch 1/2" in out and "press Ctrl-C again to end now" in out
    assert err == (
        "effjax: interrupted and saved at step 6, in epoch 2. Resume with effjax train densenet "
        "--resume here\n"
    )
    names = {p.name for p in (tmp_path / "here").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "curve.png", "checkpoints"}
    assert {path.name for path in (tmp_path / "here" / "checkpoints").iterdir()} == {"4", "6"}

    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, err) == (0, "")
    assert "epoch 1/2" not in out and "epoch 2/2" in out
    for row in ("test accuracy", "images/s", "batch 16 (plain)", "batch 16 (efficient, this run)"):
        assert row in out


def create_run(path, config):
    """Write the config.json of a run."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.describe("0", {})))


def test_a_run_of_another_command(run, tmp_path):
    create_run(tmp_path / "here", ResNetConfig())
    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, out) == (2, "") and one_line(err)
    assert "not a run of effjax train densenet. Use effjax train resnet --resume here" in err
    (tmp_path / "here" / "config.json").write_text('{"effjax": "0"}')
    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, out) == (2, "") and err.endswith("effjax train densenet. Start a new run.\n")
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["config.json"]


def test_options_that_can_change(run, small_model, monkeypatch, tmp_path):
    calls = []

    def fit(task, run, progress, resume, stop):
        calls.append((task.config, resume))
        raise KeyboardInterrupt

    monkeypatch.setattr("effjax.train.loop.fit", fit)
    config = DenseNetConfig(batch_size=16, epochs=5)
    create_run(tmp_path / "here", config)
    resume = "train", "densenet", "--resume", "here"
    options = "--epochs", "8", "--on-nan", "skip", "--data", "cifar10:moved"
    assert run(*resume, *options)[0] == run(*resume)[0] == 130
    changed = dataclasses.replace(config, epochs=8, on_nan="skip", data="cifar10:moved")
    assert calls == [(changed, True), (config, True)]


def test_a_second_ctrl_c(run, small_model, monkeypatch, tmp_path, capsys):
    """While the curve is drawn it is one line too; later nobody hears it."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    ignored = []
    monkeypatch.setattr("effjax.train.run_directory.RunDirectory.draw", interrupt)
    monkeypatch.setattr("effjax.train.report.ConsoleProgress.start", interrupt)
    options = ["train", "densenet", "--batch-size", "16", "--out", "here"]
    code, _, err = run(*options)
    assert code == 130
    assert err == "effjax: interrupted before the first step. Nothing is kept.\n"
    monkeypatch.setattr("effjax.train.images.task.load_dataset", interrupt)
    monkeypatch.setattr(signal, "signal", lambda *given: ignored.append(given))
    assert cli.main(options) == 130 and ignored == []  # a caller's process goes on
    monkeypatch.setattr(sys, "argv", ["effjax", *options])
    assert cli.main() == 130 and ignored == [(signal.SIGINT, signal.SIG_IGN)]
    assert capsys.readouterr().err == 2 * "effjax: interrupted\n"


def test_out_of_memory(run, small_model, monkeypatch):
    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")

    monkeypatch.setattr("effjax.train.loop.fit", exhausted)
    code, _, err = run("train", "densenet", "--batch-size", "16")
    assert code == 1
    assert err == (
        "effjax: out of device memory. Try a smaller --batch-size, or --save features. To see what "
        "uses the memory, plan the model with effjax memory.\n"
    )


def test_overwrite_and_progress_bar(run, small_model, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    options = ["--epochs", "1", "--batch-size", "16", "--out", "here"]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"effjax": "0"}')
    (tmp_path / "here" / "curve.png").write_text("old")
    code, _, err = run("train", "densenet", *options)
    assert code == 2 and "holds a run" in err
    code, out, _ = run("train", "densenet", *options, "--overwrite")
    assert code == 0 and "images/s" in out
    assert (tmp_path / "here" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_sigterm_then_resume(run, small_model, monkeypatch, tmp_path):
    """In the middle of an epoch; the step that is under way is finished and saved."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "effjax.train.report.ConsoleProgress.step", signal_at(signal.SIGTERM, 6)
        )  # of 8
        options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
        code, _, err = run("train", "densenet", *options)
    assert code == 75
    assert err == (
        "effjax: stopped and saved at step 7, in epoch 2. Resume with effjax train densenet "
        "--resume here\n"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    saved = {path.name for path in (tmp_path / "here" / "checkpoints").iterdir()}
    assert saved == {"4", "7"}

    code, out, err = run("train", "densenet", "--resume", "here", "--checkpoint-every", "1")
    assert (code, err) == (0, "") and "epoch 2/2" in out
