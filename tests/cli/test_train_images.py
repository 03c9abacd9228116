import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from effjax import cli
from effjax.train.images.config import Config
from effjax.train.lm.config import LMConfig
from tests.cli.command import TINY, interrupt_at, one_line, planned, signal_at

LONG = "x" * 300


@pytest.fixture
def locked(monkeypatch):
    """Below a folder `locked` nothing can be looked up; root could."""
    stat = Path.stat

    def refuse(self, **options):
        if "locked" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)


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
        (["--resume", "broken", "--depth", "22"], "--depth cannot be given with --resume"),
        (["--validation", "1.5"], "validation (=1.5) must lie in [0, 1), or be a whole number"),
        (["--validation", "1438"], "validation (=1438) leaves none of the 1438 train images"),
        (["--resume", LONG], "cannot be read (File name too long); check its path"),
        (["--data", f"folder:{LONG}"], "cannot be read (File name too long); check its path"),
        (["--out", LONG], "cannot be written to (File name too long); give another --out"),
        (["--resume", "locked/run"], "locked/run/config.json: cannot be read (Permission denied)"),
        (["--data", "cifar10:locked"], "locked: cannot be read (Permission denied); check its"),
        (["--out", "locked/run"], "locked/run: cannot be written to (Permission denied)"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, locked, argv, message):
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

    code, out, err = run(*TINY, "--epochs", "1", "--out", "here")
    assert (code, out) == (2, "") and one_line(err)
    assert "here: holds a run; give another --out, or --overwrite" in err


def test_comparison_with_the_plain_network(run, small_model, tmp_path):
    options = ["--epochs", "1", "--batch-size", "16", "--out", "here"]
    argv = "train", "resnet", "--dcn", "v2", "--compare-plain"
    code, out, err = run(*argv, *options)
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: dcn v2 ") and ", plain " in last
    for name, dcn in (("here", "v2"), ("here-plain", "none")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["options"]["dcn"] == dcn
    shutil.rmtree(tmp_path / "here-plain")
    code, out, err = run("train", "resnet", "--resume", "here", "--compare-plain")
    assert (code, err) == (0, "") and out.splitlines()[-1] == last
    code, out, err = run("train", "resnet", "--compare-plain")
    assert (code, out) == (2, "") and one_line(err) and "needs --dcn" in err


def test_resnet(run, small_model, tmp_path):
    options = ["--depth", "34", "--dcn", "v2", "--epochs", "1", "--batch-size", "16"]
    code, out, err = run("train", "resnet", *options, "--out", "here")
    assert (code, err) == (0, "") and "resnet34, float32" in out
    assert "batch 16 (efficient, this run)" in out
    made = json.loads((tmp_path / "here" / "config.json").read_text())
    assert made["command"] == "resnet" and made["options"]["dcn"] == "v2"
    code, out, err = run("train", "resnet", "--resume", "here", "--depth", "34")
    assert code == 2 and "--depth cannot be given with --resume" in err
    code, out, err = run("train", "resnet", "--depth", "20")
    assert code == 2 and "--depth" in err


@pytest.mark.exhaustive
def test_resnet_learns_from_a_folder(run, tmp_path):
    """A real network, of images of two colors."""
    from PIL import Image

    for part, count in (("train", 16), ("test", 8)):
        for name, color in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                shade = tuple(min(c + 5 * i, 255) for c in color)
                Image.new("RGB", (12, 12), shade).save(folder / f"{i}.png")
    options = ["--data", "folder:images", "--validation", "0", "--batch-size", "16", "--dcn", "v1"]
    code, out, err = run("train", "resnet", *options, "--epochs", "1", "--out", "here")
    assert (code, err) == (0, "") and "images of 12×12×3 in 2 classes" in out
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < final["kept_bytes"]["efficient"] < final["kept_bytes"]["plain"]


def test_ctrl_c_that_a_callback_swallows(run, small_model, monkeypatch):
    """As those do that JAX calls from C++: the run ends after the step."""

    def step(self, step, measured, rate):
        with contextlib.suppress(KeyboardInterrupt):
            interrupt_at(3)(self, step, measured, rate)

    monkeypatch.setattr("effjax.train.report.LineProgress.step", step)
    options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
    code, _, err = run("train", "densenet", *options)
    assert code == 130 and err.startswith("effjax: interrupted; go on with effjax train densenet")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_then_resume(run, small_model, monkeypatch, tmp_path):
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
    for row in ("test accuracy", "images/s", "batch 16 (plain)", "batch 16 (efficient, this run)"):
        assert row in out


def a_run(path, config, old=False):
    """The config.json of a run of these options; one of before says less."""
    described = config.describe("0", {})
    if old:
        del described["command"], described["fingerprint"]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("command", "config", "message"),
    [
        ("densenet", Config(model="resnet18"), "use effjax train resnet --resume here"),
        ("resnet", Config(), "use effjax train densenet --resume here"),
        ("lm", Config(), "use effjax train densenet --resume here"),
        ("densenet", LMConfig(), "use effjax train lm --resume here"),
    ],
)
def test_a_run_of_another_command(run, tmp_path, command, config, message, old):
    a_run(tmp_path / "here", config, old)
    if old and (command == "lm" or isinstance(config, LMConfig)):
        message = f"config.json is not of effjax train {command}"
    before = (tmp_path / "here" / "config.json").read_text()
    code, out, err = run("train", command, "--resume", "here")
    assert (code, out) == (2, "") and one_line(err) and message in err
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["config.json"]
    assert (tmp_path / "here" / "config.json").read_text() == before


def test_options_that_were_edited(run, tmp_path):
    a_run(tmp_path / "here", Config())
    file = tmp_path / "here" / "config.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, out) == (2, "") and one_line(err)
    assert "config.json: its options were changed, and the run was trained with others" in err


def test_another_end_with_resume(run, small_model, monkeypatch, tmp_path):
    begun = []

    def fit(task, run, progress, resume, stop, fall_back):
        begun.append((task.config, resume, fall_back))
        raise KeyboardInterrupt

    monkeypatch.setattr("effjax.train.loop.fit", fit)
    a_run(tmp_path / "here", Config(batch_size=16, epochs=5))
    resume = "train", "densenet", "--resume", "here"
    assert run(*resume, "--epochs", "8")[0] == run(*resume)[0] == 130
    assert run(*resume, "--fall-back", "--on-nan", "skip")[0] == 130
    configs = Config(batch_size=16, epochs=8), Config(batch_size=16, epochs=5)
    skips = Config(batch_size=16, epochs=5, on_nan="skip")
    assert begun == [*((config, True, False) for config in configs), (skips, True, True)]
    code, _, err = run("train", "densenet", "--fall-back")
    assert code == 2 and one_line(err) and "--fall-back goes with --resume" in err


def test_a_second_ctrl_c(run, small_model, monkeypatch, tmp_path, capsys):
    """While the curve is drawn it is one line too; later nobody hears it."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    ignored = []
    monkeypatch.setattr("effjax.train.run_directory.RunDirectory.draw", interrupt)
    monkeypatch.setattr("effjax.train.report.LineProgress.start", interrupt)
    options = ["train", "densenet", "--batch-size", "16", "--out", "here"]
    code, _, err = run(*options)
    assert code == 130 and one_line(err) and "--resume here" in err
    monkeypatch.setattr("effjax.train.images.task.load_dataset", interrupt)
    monkeypatch.setattr(signal, "signal", lambda *given: ignored.append(given))
    assert cli.main(options) == 130 and ignored == []  # a caller's process goes on
    monkeypatch.setattr(sys, "argv", ["effjax", *options])
    assert cli.main() == 130 and ignored == [(signal.SIGINT, signal.SIG_IGN)]
    assert capsys.readouterr().err == 2 * "effjax: interrupted\n"


def test_ctrl_c_before_training(run, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("effjax.train.images.task.load_dataset", interrupt)
    assert run(*TINY) == (130, "", "effjax: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory(run, small_model, monkeypatch):
    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")

    monkeypatch.setattr("effjax.train.loop.fit", exhausted)
    options = "--batch-size", "16", "--depth", "10", "--growth-rate", "4"
    code, _, err = run("train", "densenet", *options)
    assert code == 1 and one_line(err) and "out of device memory; try a smaller" in err
    command = (
        "effjax memory densenet --depth 10 --growth-rate 4 --image-size 8 --num-classes 5 "
        "--batch-size 16 --num-devices 8"
    )
    assert err.endswith(f"; see where it goes with {command}\n")
    assert planned(monkeypatch, run, command) == (16, 8)


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
        patch.setattr("effjax.train.report.LineProgress.step", signal_at(signal.SIGTERM, 6))  # of 8
        options = ["--epochs", "2", "--batch-size", "16", "--out", "here"]
        code, _, err = run("train", "densenet", *options)
    assert code == 75
    assert err == (
        "effjax: stopped and saved in epoch 2; go on with effjax train densenet --resume here\n"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [path.name for path in (tmp_path / "here" / "partway").iterdir()] == ["7"]

    code, out, err = run("train", "densenet", "--resume", "here", "--checkpoint-every", "1")
    assert (code, err) == (0, "") and "epoch 2/2" in out
    assert not (tmp_path / "here" / "partway").exists()
