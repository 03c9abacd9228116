"""The files and the lock of a run directory."""

import errno
import os
import subprocess
import sys

import pytest

from effjax.train.config import fingerprint
from effjax.train.errors import TrainError
from effjax.train.run_directory import RunDirectory, default_path, digest_json

pytest.importorskip("matplotlib")


CONFIG = {"effjax": "0", "a": 1}


def create(path, overwrite=False):
    return RunDirectory.create(path, CONFIG, overwrite)


def test_unused_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "densenet-now")
    paths = [create(default_path("densenet")).path for _ in range(3)]
    assert [p.as_posix() for p in paths] == [
        "runs/densenet-now", "runs/densenet-now-2", "runs/densenet-now-3",
    ]  # fmt: skip


def test_overwrites_a_run_only_if_asked(tmp_path):
    run = create(tmp_path / "run")
    run.append({"kind": "epoch"})
    run.checkpoints.mkdir()
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(TrainError, match="holds a run. Give another --out, or --overwrite"):
        create(run.path)
    assert run.read_metrics() == [{"kind": "epoch"}]
    create(run.path, overwrite=True)
    assert run.read_metrics() == []
    assert {p.name for p in run.path.iterdir()} == {"config.json", "notes.txt"}


def test_lock_excludes_other_processes(tmp_path):
    """The lock ends with the process, even by SIGKILL."""
    run = create(tmp_path / "run")
    run.append({"kind": "epoch"})
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        for refused in (run.locked().__enter__, lambda: create(run.path, overwrite=True)):
            with pytest.raises(TrainError, match="run: another process is training in it. Wait"):
                refused()
        assert run.read_metrics() == [{"kind": "epoch"}]
        other.kill()
    with run.locked():
        assert run.read_config() == CONFIG
    assert create(run.path, overwrite=True).read_metrics() == []


def test_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run = create(tmp_path / "run")
    monkeypatch.setattr("fcntl.flock", unsupported)
    with run.locked():
        assert run.read_config() == CONFIG


def test_rejects_a_directory_of_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="not empty and not a run"):
            create(tmp_path, overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ['{"model_type": "bert"}', "[]"])
def test_rejects_a_config_of_another_program(tmp_path, content):
    """A model of another library has a config.json and checkpoints too."""
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "checkpoints" / "important").mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="not empty and not a run. Give another --out"):
            create(tmp_path, overwrite)
    assert (tmp_path / "config.json").read_text() == content
    assert (tmp_path / "checkpoints" / "important").is_dir()


def test_interrupted_creation_can_be_repeated(tmp_path, monkeypatch):
    """Whenever the interruption comes."""

    def end(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    for existing in (False, True):
        for where in ("os.replace", "shutil.rmtree", "pathlib.Path.unlink"):
            if existing or where == "os.replace":
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(where, end)
                    create(run, overwrite=existing)
                assert create(run, overwrite=existing).read_config() == CONFIG
                (run / "checkpoints").mkdir()


def test_rejects_a_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainError, match=r"cannot be written to .*\. Give another --out"):
            create(path)


def test_rejects_a_read_only_directory(tmp_path, monkeypatch):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(TrainError, match="cannot be written to .Permission denied"):
        create(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_open_rejects_a_directory_without_a_run(tmp_path):
    with pytest.raises(TrainError, match="not a run"):
        RunDirectory.open(tmp_path)
    create(tmp_path)
    for content in ("{", "[1]", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(TrainError, match="config.json: cannot be read"):
            RunDirectory.open(tmp_path).read_config()


def test_cuts_metrics_back_to_a_step(tmp_path):
    run = create(tmp_path)
    for step in (2, 4, 5, 6, 8):
        run.append({"kind": "step", "step": step})
    run.append({"kind": "interrupted"})
    assert [r["step"] for r in run.truncate_metrics("step", 6)] == [2, 4, 5, 6]
    assert [r["step"] for r in run.read_metrics()] == [2, 4, 5, 6]


def torn(path):
    """Return a run that ended while its second line was written."""
    run = create(path)
    for step in (1, 2):
        run.append({"kind": "step", "step": step})
    file = path / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    return run


def test_drops_an_incomplete_last_line(tmp_path):
    run = torn(tmp_path / "appended")
    run.append({"kind": "interrupted"})
    assert run.read_metrics() == [{"kind": "step", "step": 1}, {"kind": "interrupted"}]
    run = torn(tmp_path / "cut")
    assert [r["step"] for r in run.read_metrics()] == [1]
    assert [r["step"] for r in run.truncate_metrics("step", 1)] == [1]
    assert (run.path / "metrics.jsonl").read_text() == '{"kind": "step", "step": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": \n', ": cannot be read"),
        ("1\n", ": cannot be read .int, not an object"),
        ("[" * 100_000 + "\n", ": cannot be read .nested too deeply"),
        ("", " was changed after the checkpoint of step 1 was saved. Put the file back, or"),
        ('{"kind": "step", "step": 2}\n', " was changed"),
        ('{"kind": "step", "step": "1"}\n', " was changed"),
        ('{"kind": "step", "step": 1}\n' * 2, " was changed"),
        ('{"kind": "step", "step": 1, "loss": 5.4867}\n', " was changed"),
    ],
)
def test_rejects_metrics_that_do_not_fit_the_checkpoint(tmp_path, content, message):
    run = create(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(TrainError, match=rf"metrics\.jsonl{message}.*[Ss]tart a new run"):
        run.truncate_metrics("step", 1, digest_json([{"kind": "step", "step": 1, "loss": 5.4863}]))
    assert (tmp_path / "metrics.jsonl").read_text() == content


def test_rejects_pipes(tmp_path):
    """Reading one would wait for ever."""
    run = create(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(TrainError, match=r"metrics\.jsonl: cannot be read \(not a regular file"):
        run.read_metrics()
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(TrainError, match=r"config\.json: cannot be read \(not a regular file"):
        run.read_config()
    with pytest.raises(TrainError, match="not empty and not a run"):
        create(tmp_path, overwrite=True)


def test_does_not_append_to_a_deleted_run(tmp_path):
    run = create(tmp_path / "run")
    (run.path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="the run was deleted"):
        run.append({"kind": "step"})
    assert not (run.path / "metrics.jsonl").exists()


def test_requires_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TrainError, match=r'matplotlib is missing. Run pip install ".\[train\]"'):
        create(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rejects_an_unreadable_directory(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    with pytest.raises(TrainError, match=r"cannot be read \(Permission denied\)\. Check"):
        RunDirectory.open(tmp_path / "run")


def test_rejects_edited_options(tmp_path):
    options = {"epochs": 3}
    run = RunDirectory.create(
        tmp_path, {"options": options, "fingerprint": fingerprint(options)}, overwrite=False
    )
    assert run.read_config()["options"] == options
    file = tmp_path / "config.json"
    for content, message in (
        (file.read_text().replace("3", "4", 1), "its options were changed, .* start a new run"),
        ('{"options": 3, "fingerprint": "a"}', "cannot be read .options must be an object"),
    ):
        file.write_text(content)
        with pytest.raises(TrainError, match=message):
            run.read_config()


def test_a_curve_of_a_run_with_an_odd_name(tmp_path):
    """Matplotlib would parse the name as mathematics."""
    run = create(tmp_path / "$x_^$\x1b")
    run.draw(lambda axes: axes.plot([1, 2], label="loss"))
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
