import errno
import json
import os
import subprocess
import sys

import pytest

from effjax.train.config import fingerprint
from effjax.train.errors import TrainError
from effjax.train.run_directory import RunDirectory, unused

pytest.importorskip("matplotlib")


CONFIG = {"effjax": "0", "a": 1}


def create(path, overwrite=False):
    return RunDirectory.create(path, CONFIG, overwrite)


def test_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "densenet-now")
    paths = [create(unused("densenet")).path for _ in range(3)]
    assert [p.as_posix() for p in paths] == [
        "runs/densenet-now", "runs/densenet-now-2", "runs/densenet-now-3",
    ]  # fmt: skip


def test_a_run_is_not_overwritten_unless_asked(tmp_path):
    run = create(tmp_path / "run")
    run.append({"kind": "epoch"})
    run.checkpoints.mkdir()
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(TrainError, match="holds a run; give another --out, or --overwrite"):
        create(run.path)
    assert run.metrics == [{"kind": "epoch"}]
    create(run.path, overwrite=True)
    assert run.metrics == []
    assert {p.name for p in run.path.iterdir()} == {"config.json", "notes.txt"}


def test_one_process_at_a_time(tmp_path):
    """Until it ends, even by a signal that nobody can catch."""
    run = create(tmp_path / "run")
    run.append({"kind": "epoch"})
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        for refused in (run.locked().__enter__, lambda: create(run.path, overwrite=True)):
            with pytest.raises(TrainError, match="run: another process is training in it; wait"):
                refused()
        assert run.metrics == [{"kind": "epoch"}]
        other.kill()
    with run.locked():
        assert run.config == CONFIG
    assert create(run.path, overwrite=True).metrics == []


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run = create(tmp_path / "run")
    monkeypatch.setattr("fcntl.flock", unsupported)
    with run.locked():
        assert run.config == CONFIG


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="not empty and not a run"):
            create(tmp_path, overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ['{"model_type": "bert"}', "{", "[]"])
def test_a_config_of_something_else(tmp_path, content):
    """A model of another library: neither its checkpoints nor its config are ours to delete."""
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "checkpoints" / "important").mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="not empty and not a run; give another --out"):
            create(tmp_path, overwrite)
    assert (tmp_path / "config.json").read_text() == content
    assert (tmp_path / "checkpoints" / "important").is_dir()


def test_an_end_while_a_run_is_made(tmp_path, monkeypatch):
    """What is left can be begun anew, whenever it comes."""

    def end(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    for existing in (False, True):
        for where in ("os.replace", "shutil.rmtree", "pathlib.Path.unlink"):
            if existing or where == "os.replace":
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(where, end)
                    create(run, overwrite=existing)
                assert create(run, overwrite=existing).config == CONFIG
                (run / "checkpoints").mkdir()


def test_an_empty_directory_is_used(tmp_path):
    assert json.loads((create(tmp_path).path / "config.json").read_text()) == CONFIG


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainError, match="cannot be written to .*; give another --out"):
            create(path)


def test_a_read_only_directory(tmp_path, monkeypatch):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(TrainError, match="cannot be written to .Permission denied"):
        create(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_open_needs_a_run(tmp_path):
    with pytest.raises(TrainError, match="not a run"):
        RunDirectory.open(tmp_path)
    create(tmp_path)
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(TrainError, match="config.json: cannot be read"):
            _ = RunDirectory.open(tmp_path).config


def test_metrics_are_cut_back_to_an_epoch(tmp_path):
    run = create(tmp_path)
    for epoch in (1, 2, 3):
        run.append({"kind": "epoch", "epoch": epoch})
    run.append({"kind": "interrupted"})
    assert [r["epoch"] for r in run.keep("epoch", [1, 2])] == [1, 2]
    assert [r["epoch"] for r in run.metrics] == [1, 2]


def torn(path):
    """A run whose second line was cut off in mid-append."""
    run = create(path)
    for epoch in (1, 2):
        run.append({"kind": "epoch", "epoch": epoch})
    file = path / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    return run


def test_a_torn_last_line_is_dropped(tmp_path):
    run = torn(tmp_path)
    assert [r["epoch"] for r in run.metrics] == [1]
    assert [r["epoch"] for r in run.keep("epoch", [1])] == [1]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "epoch", "epoch": 1}\n'


def test_a_line_after_a_torn_one_is_a_line_of_its_own(tmp_path):
    run = torn(tmp_path)
    run.append({"kind": "interrupted"})
    assert run.metrics == [{"kind": "epoch", "epoch": 1}, {"kind": "interrupted"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": \n', "cannot be read"),
        ("1\n", "cannot be read .int, not an object"),
        ('{"kind": "epoch", "epoch": 2}\n', "epoch 1 is missing"),
        ('{"kind": "epoch", "epoch": 1}\n' * 2, "epoch 1 is there twice"),
    ],
)
def test_metrics_that_cannot_be_gone_on_with(tmp_path, content, message):
    run = create(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(TrainError, match=rf"metrics\.jsonl: {message}.*start a new run"):
        run.keep("epoch", [1])
    assert (tmp_path / "metrics.jsonl").read_text() == content


@pytest.mark.parametrize("loss", ["", ', "loss": null', ', "loss": "a"', ', "loss": true'])
def test_a_line_without_a_number(tmp_path, loss):
    run = create(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "epoch", "epoch": 1{loss}}}\n')
    with pytest.raises(TrainError, match=r"metrics.jsonl: epoch 1 has no loss, .*start a new run"):
        run.keep("epoch", [1], ["loss"])
    assert run.keep("epoch", [1]) == run.metrics


def test_metrics_are_json(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        create(tmp_path).append({"loss": float("nan")})
    assert RunDirectory(tmp_path).metrics == []


def test_without_matplotlib_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        TrainError, match=r'matplotlib is missing; run pip install "effjax\[train\]"'
    ):
        create(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("asked", ["open", "unused"])
def test_a_folder_that_may_not_be_searched(tmp_path, monkeypatch, asked):
    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    with pytest.raises(TrainError, match=r"cannot be .*\(Permission denied\); (check|give)"):
        RunDirectory.open(tmp_path / "run") if asked == "open" else unused("densenet")


def test_metrics_beside_those_that_are_wanted_are_kept(tmp_path):
    """A run that was made longer has a line of its former end."""
    run = create(tmp_path)
    for step in (2, 4, 5, 6, 8):
        run.append({"kind": "step", "step": step})
    assert [r["step"] for r in run.keep("step", [2, 4, 6])] == [2, 4, 5, 6]


def test_options_that_were_changed(tmp_path):
    options = {"epochs": 3}
    run = RunDirectory.create(
        tmp_path, {"options": options, "fingerprint": fingerprint(options)}, overwrite=False
    )
    assert run.config["options"] == options
    file = tmp_path / "config.json"
    for content, message in (
        (file.read_text().replace("3", "4", 1), "its options were changed, .*start a new run"),
        ('{"options": 3, "fingerprint": "a"}', "cannot be read .options: not an object"),
    ):
        file.write_text(content)
        with pytest.raises(TrainError, match=message):
            _ = run.config
