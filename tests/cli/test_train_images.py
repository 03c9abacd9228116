import json

import pytest

from tests.cli.command import TINY, interrupt_at, one_line


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
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, argv, message):
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


def test_deform_resnet_and_its_baseline(run, small_model, tmp_path):
    options = ["--epochs", "1", "--batch-size", "16", "--data", "digits", "--out", "here"]
    code, out, err = run("train", "deform-resnet", *options)
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: deformable ") and ", plain " in last
    for name in ("deformable", "plain"):
        config = json.loads((tmp_path / "here" / name / "config.json").read_text())
        assert config["options"]["deformable"] is (name == "deformable")
    code, _, err = run("train", "deform-resnet", *options)
    assert code == 2 and one_line(err) and "holds a run" in err


@pytest.mark.exhaustive
def test_deform_resnet_without_its_baseline(run, small_model, tmp_path):
    options = ["--epochs", "1", "--batch-size", "16", "--data", "digits", "--out", "here"]
    assert run("train", "deform-resnet", *options)[0] == 0
    code, out, _ = run("train", "deform-resnet", *options, "--overwrite", "--no-baseline")
    assert code == 0 and "plain" not in out.splitlines()[-1]


def test_which_runs_deform_resnet_starts(run, monkeypatch):
    started = []

    def train(config, out, overwrite):
        started.append((config.model, config.deformable, config.data, str(out), overwrite))
        return type("Result", (), {"test_accuracy": 0.5})

    app = pytest.importorskip("effjax.cli.train_deform_resnet")
    monkeypatch.setattr(app, "train_images", train)
    argv = "train", "deform-resnet", "--out", "here", "--overwrite", "--no-baseline"
    assert run(*argv) == (0, "test accuracy: deformable 50.00%\n", "")
    assert started == [("deform-resnet", True, "rotated-digits", "here/deformable", True)]


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
    code, _, err = run("train", "densenet", "--batch-size", "16")
    assert code == 1 and one_line(err) and "out of device memory; try a smaller" in err


def test_overwrite_and_progress_bar(run, small_model, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    options = ["--epochs", "1", "--batch-size", "16", "--out", "here"]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    (tmp_path / "here" / "curve.png").write_text("old")
    code, _, err = run("train", "densenet", *options)
    assert code == 2 and "holds a run" in err
    code, out, _ = run("train", "densenet", *options, "--overwrite")
    assert code == 0 and "images/s" in out
    assert (tmp_path / "here" / "curve.png").read_bytes().startswith(b"\x89PNG")
