import json
import shutil

import pytest

from effjax import convert
from tests.cli.command import TINY
from tests.train import small
from tests.train.images import archives
from tests.train.images.test_source_weights import make_weights


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*TINY[2:], "--data", "folder:broken"], "dog/0.png: not a readable image"),
        ([*TINY[2:], "--init-from", "broken/weights.pth"], "broken/weights.pth: cannot be read"),
        ([*TINY[2:], "--out", "broken"], "broken"),
        (["--resume", "broken"], "broken"),
    ],
)
def test_bad_input_leaves_nothing(refused, tmp_path, argv, message):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        for file in ("0.png", "1.png"):
            Image.new("RGB", (8, 8)).save(tmp_path / "broken" / name / file)
    (tmp_path / "broken" / "dog" / "0.png").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    assert message in refused("train", "densenet", *argv)
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


@pytest.mark.exhaustive
def test_resnet_and_its_comparison(run, monkeypatch, tmp_path):
    monkeypatch.setattr("effjax.train.images.task.model_builder", small.builder)
    monkeypatch.setattr("effjax.train.images.task.load_dataset", lambda *_: small.dataset())
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


@pytest.mark.exhaustive
def test_starts_with_a_file_and_resumes_without_it(run, tmp_path):
    archives.write_images(tmp_path / "flowers", dict(daisy=10, rose=10, tulip=10), size=(8, 8))
    file = tmp_path / "in.safetensors"
    convert.save_weights(file, make_weights())
    options = "--depth", "8", "--freeze-stages", "1", "--init-from", "in.safetensors"
    for name in "LICENSE", "rose/notes.txt":
        open(f"flowers/{name}", "w").close()
    data = "--data", "folder:flowers", "--batch-size", "8", "--validation", "0", "--epochs", "1"
    code, out, err = run("train", "resnet", *options, *data, "--out", "here")
    assert (code, err) == (0, "")
    for line in (
        f"weights: those of {file}",
        "new head of 3 classes; the file has 7 classes",
        "pixels are normalized by ImageNet's mean and standard deviation",
        "frozen: the stem and 1 stage; ",
        "left out, because not images of a class (2): LICENSE, rose/notes.txt",
    ):
        assert line in out
    config = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert config["init_from"] == str(file) and config["freeze_stages"] == 1
    file.unlink()
    code, out, err = run("train", "resnet", "--resume", "here", "--epochs", "2")
    assert (code, err) == (0, "") and "epoch 2/2" in out and "frozen: the stem" in out


def test_a_run_of_another_command(refused, tmp_path):
    config = tmp_path / "here" / "config.json"
    config.parent.mkdir()
    for command, message in (
        ({"command": "resnet"}, "of effjax train densenet. Use effjax train resnet --resume here"),
        ({}, "not a run of effjax train densenet. Start a new run.\n"),
    ):
        config.write_text(json.dumps({"effjax": "0"} | command))
        assert message in refused("train", "densenet", "--resume", "here")
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["config.json"]
