"""Options from a file: `--config`, and `--print-config`, which writes such files."""

import json
import os

import pytest
import yaml

from tests.cli.command import TINY


def test_a_file_and_the_command_line(run_without_training, tmp_path):
    (tmp_path / "run.yaml").write_text("depth: 10\ngrowth-rate: 4\nefficient: false\nepochs: 7\n")
    run_without_training("train", "densenet", "--config", "run.yaml", "--epochs", "2", "--out", "a")
    options = json.loads((tmp_path / "a" / "config.json").read_text())["options"]
    expected = {"depth": 10, "growth_rate": 4, "efficient": False, "epochs": 2, "batch_size": 64}
    assert options.items() >= expected.items()


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (
            [*TINY, "--no-efficient", "--learning-rate", "1e-4"],
            dict(depth=10, growth_rate=4, efficient=False, learning_rate=1e-4),
        ),
        ([*TINY, "--out", "here", "--overwrite"], dict(depth=10, growth_rate=4)),  # of one run
        (
            ["train", "resnet", "--fit", "h100", "--distributed", "--heartbeat-timeout", "30"],
            dict(fit="h100", distributed=True, heartbeat_timeout=30),
        ),
    ],
)
def test_prints_the_options_that_are_given(run, tmp_path, argv, printed):
    code, out, err = run(*argv, "--print-config")
    assert (code, err) == (0, "") and yaml.safe_load(out) == printed
    (tmp_path / "run.yaml").write_text(out)
    again = run(*argv[:2], "--config", "run.yaml", "--keep", "3", "--print-config")
    assert yaml.safe_load(again[1]) == printed | {"keep": 3}


def test_an_empty_file(run, tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert run(*TINY, "--config", "run.yaml", "--print-config")[0] == 0


def test_wrong_options_are_not_printed(refused, tmp_path):
    assert "--epochs (=0) must be between" in refused(*TINY, "--epochs", "0", "--print-config")
    (tmp_path / "run.yaml").write_text("max_length: 1\n")
    err = refused("memory", "finetune", "--config", "run.yaml", "base")
    assert "--max-length (=1) must be between 2 and" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run.yaml: cannot be read (No such file"),
        ("epochs", "run.yaml: must have options by name"),
        ("{", "run.yaml: must be YAML"),
        ("epoch: 3", "'epoch' is not an option. Did you mean epochs?"),
        ("num_train_epochs: 3", "'num_train_epochs' is not an option. Use epochs."),
        ("bf16: true", "'bf16' is not an option. Use dtype: bfloat16 (the default of training)."),
        ("epochs: many", "'--epochs'"),
        ("epochs: 0", "--epochs (=0) must be between 1"),
        ("save: all", "'--save'"),
        ("epochs: true", "'epochs' (=True) must be a number or a text"),
        ("efficient: 1", "'efficient' (=1) must be true or false"),
        ("data: [a, b]", "must be a single value"),
        ("growth-rate: 4\ngrowth_rate: 5", "'growth_rate' is given twice"),
        ("config: other.yaml", "'config' is not an option"),
        ("epochs: 3\nepochs: 4", "must be YAML ('epochs' is given twice)"),
        ("data: &a [x]\nsave: *a", "line 2: neither aliases nor deep lists"),
        ("data: " + 9999 * "[", "line 1: neither aliases nor deep lists"),
        ("#" * 1_000_001, "must be YAML (1000001 characters)"),
    ],
)
def test_wrong_files(refused, tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    assert message in refused("train", "densenet", "--config", "run.yaml")


def test_pipes_are_not_read(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe must be a regular file" in refused("train", "densenet", "--config", "pipe")
    assert "cannot be read" in refused("train", "densenet", "--config", "missing.yaml")


def test_resume_accepts_the_options_of_the_run(refused, run_without_training, tmp_path):
    (tmp_path / "run.yaml").write_text("depth: 10\ngrowth-rate: 4\n")
    run_without_training("train", "densenet", "--config", "run.yaml", "--out", "a")
    again = "train", "densenet", "--config", "run.yaml", "--resume", "a"
    run_without_training(*again, "--keep", "2")
    err = refused(*again, "--momentum", "0.8")
    assert "a was trained with --momentum (=0.9), not with 0.8. Resume with the former" in err
