"""Options from a file: `--config`, and `--print-config`, which writes such files."""

import json

import pytest
import yaml

from tests.cli.command import TINY, one_line


def test_a_file_and_the_command_line(run_without_training, tmp_path):
    (tmp_path / "run.yaml").write_text("depth: 10\ngrowth-rate: 4\nefficient: false\nepochs: 7\n")
    run_without_training("train", "densenet", "--config", "run.yaml", "--epochs", "2", "--out", "a")
    options = json.loads((tmp_path / "a" / "config.json").read_text())["options"]
    expected = {"depth": 10, "growth_rate": 4, "efficient": False, "epochs": 2, "batch_size": 64}
    assert options.items() >= expected.items()


def test_prints_the_options_that_are_given(run, tmp_path):
    argv = *TINY, "--no-efficient", "--learning-rate", "1e-4"
    code, out, err = run(*argv, "--print-config")
    assert (code, err) == (0, "")
    given = dict(depth=10, growth_rate=4, efficient=False, learning_rate=1e-4)
    assert yaml.safe_load(out) == given
    (tmp_path / "run.yaml").write_text(out)
    again = run("train", "densenet", "--config", "run.yaml", "--epochs", "3", "--print-config")
    assert yaml.safe_load(again[1]) == given | {"epochs": 3}


def test_a_plan_reads_the_file_of_a_run(run, tmp_path):
    (tmp_path / "run.yaml").write_text("max_length: 1\n")
    code, out, err = run("memory", "finetune", "--config", "run.yaml", "base")
    assert (code, out) == (2, "") and "--max-length (=1) must be at least 2" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "run.yaml: No such file"),
        ("epochs", "run.yaml: must have options by name"),
        ("{", "run.yaml: must be YAML"),
        ("epoch: 3", "'epoch' is not an option. Did you mean epochs?"),
        ("epochs: many", "'--epochs'"),
        ("epochs: 0", "--epochs (=0) must be between 1"),
        ("save: all", "'--save'"),
        ("epochs: true", "'epochs' (=True) must be a number or a text"),
        ("efficient: 1", "'efficient' (=1) must be true or false"),
        ("data: [a, b]", "must be a single value"),
        ("growth-rate: 4\ngrowth_rate: 5", "'growth_rate' is given twice"),
        ("config: other.yaml", "'config' is not an option"),
    ],
)
def test_wrong_files_are_one_line(run, tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    code, out, err = run("train", "densenet", "--config", "run.yaml")
    assert (code, out) == (2, "") and one_line(err) and message in err, err


def test_resume_accepts_the_options_of_the_run(run, run_without_training, tmp_path):
    (tmp_path / "run.yaml").write_text("depth: 10\ngrowth-rate: 4\n")
    run_without_training("train", "densenet", "--config", "run.yaml", "--out", "a")
    again = "train", "densenet", "--config", "run.yaml", "--resume", "a"
    run_without_training(*again, "--keep", "2")
    code, _, err = run(*again, "--momentum", "0.8")
    assert code == 2 and "--momentum (=0.8) cannot change on --resume. The run has 0.9." in err


def test_prints_no_options_that_are_wrong_or_of_one_run(run):
    of_one_run = "--out", "here", "--overwrite"
    code, out, _ = run(*TINY, *of_one_run, "--keep", "2", "--print-config")
    assert code == 0 and yaml.safe_load(out) == {"depth": 10, "growth_rate": 4, "keep": 2}
    code, out, err = run(*TINY, "--epochs", "0", "--print-config")
    assert (code, out) == (2, "") and "--epochs (=0) must be between 1" in err


def test_prints_how_a_run_starts(run, tmp_path):
    argv = "--fit", "h100", "--distributed", "--heartbeat-timeout", "30"
    code, out, _ = run("train", "lm", *argv, "--print-config")
    assert code == 0
    assert yaml.safe_load(out) == dict(fit="h100", distributed=True, heartbeat_timeout=30)
    (tmp_path / "run.yaml").write_text(out)
    again = run("train", "lm", "--config", "run.yaml", "--print-config")
    assert again[:2] == (0, out)


def test_an_empty_file(run, tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert run(*TINY, "--config", "run.yaml", "--print-config")[0] == 0
