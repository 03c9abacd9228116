"""The files and the lock of a run directory."""

import errno
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from effjax.train.config import fingerprint
from effjax.train.errors import TrainError
from effjax.train.run_directory import RunDirectory, default_path, digest_json

pytest.importorskip("matplotlib")

OPTIONS = {"epochs": 3}
CONFIG = {"effjax": "0", "options": OPTIONS, "fingerprint": fingerprint(OPTIONS)}
NESTED = "[" * 100_000


def create(path, overwrite=False):
    return RunDirectory.create(path, CONFIG, overwrite)


def test_unused_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "densenet-now")
    names = [create(default_path("densenet")).path.name for _ in range(3)]
    assert names == ["densenet-now", "densenet-now-2", "densenet-now-3"]


def test_overwrites_a_run_only_if_asked(tmp_path):
    run = create(tmp_path / "run")
    run.append({"kind": "epoch"})
    run.checkpoints.mkdir()
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(TrainError, match="--overwrite"):
        create(run.path)
    assert run.read_metrics() == [{"kind": "epoch"}]
    create(run.path, overwrite=True)
    assert run.read_metrics() == []
    assert {p.name for p in run.path.iterdir()} == {"config.json", "notes.txt"}


def test_interrupted_creation_can_be_repeated(tmp_path, monkeypatch):
    """Whenever the interruption comes."""
    run = tmp_path / "run"
    for existing in (False, True):
        for where in ("os.replace", "shutil.rmtree", "pathlib.Path.unlink"):
            if existing or where == "os.replace":
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(where, mock.Mock(side_effect=KeyboardInterrupt))
                    create(run, overwrite=existing)
                assert create(run, overwrite=existing).read_config() == CONFIG
                (run / "checkpoints").mkdir()


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
            with pytest.raises(TrainError, match="another process"):
                refused()
        assert run.read_metrics() == [{"kind": "epoch"}]
        other.kill()
    with run.locked():
        assert run.read_config() == CONFIG
    assert create(run.path, overwrite=True).read_metrics() == []


def test_file_system_without_locks(tmp_path, monkeypatch):
    run = create(tmp_path / "run")
    unsupported = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("fcntl.flock", unsupported)
    with run.locked():
        assert run.read_config() == CONFIG


@pytest.mark.parametrize("config", [None, '{"model_type": "bert"}', "[]", os.mkfifo])
def test_keeps_a_directory_of_other_files(tmp_path, config):
    """A model of another library has a config.json and checkpoints too."""
    (tmp_path / "checkpoints" / "important").mkdir(parents=True)
    if callable(config):
        config(tmp_path / "config.json")
    elif config:
        (tmp_path / "config.json").write_text(config)
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="not a run.*--out"):
            create(tmp_path, overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_cannot_be_created(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainError, match="cannot be written to .*--out"):
            create(path)
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(TrainError, match="Permission denied"):
        create(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TrainError, match="matplotlib .*pip install"):
        create(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_cannot_be_opened(tmp_path, monkeypatch):
    with pytest.raises(TrainError, match="not a run"):
        RunDirectory.open(tmp_path)
    monkeypatch.setattr("pathlib.Path.stat", mock.Mock(side_effect=PermissionError(13, "denied")))
    with pytest.raises(TrainError, match="denied"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["{\n", "1\n", f"{NESTED}\n", os.mkfifo])
def test_files_that_cannot_be_read(tmp_path, name, content):
    """Reading a pipe would wait for ever."""
    run = create(tmp_path)
    file = tmp_path / name
    if callable(content):
        file.unlink(missing_ok=True)
        content(file)
    else:
        file.write_text(content)
    read = run.read_config if name == "config.json" else run.read_metrics
    with pytest.raises(TrainError, match=f"{name}: cannot be read"):
        read()


def test_edited_options(tmp_path):
    run = create(tmp_path)
    file = tmp_path / "config.json"
    for content, message in (
        (file.read_text().replace("3", "4", 1), "options were changed"),
        ('{"options": 3, "fingerprint": "a"}', "options must be an object"),
        ('{"base": 3}', "`base` is not an object"),
    ):
        file.write_text(content)
        with pytest.raises(TrainError, match=message):
            run.read_config()


def test_cuts_metrics_back_to_a_step(tmp_path):
    run = create(tmp_path)
    for step in (2, 4, 5, 6, 8):
        run.append({"kind": "step", "step": step})
    run.append({"kind": "interrupted"})
    kept = [{"kind": "step", "step": step} for step in (2, 4, 5, 6)]
    assert run.truncate_metrics("step", 6) == kept == run.read_metrics()


@pytest.mark.parametrize("end", ["append", "cut"])
def test_drops_an_incomplete_last_line(tmp_path, end):
    """Of a run that ended while the line was written."""
    run, first = create(tmp_path), {"kind": "step", "step": 1}
    run.append(first)
    run.append({"kind": "step", "step": 2})
    file = tmp_path / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    assert run.read_metrics() == [first]
    if end == "append":
        run.append({"kind": "interrupted"})
        assert run.read_metrics() == [first, {"kind": "interrupted"}]
    else:
        assert run.truncate_metrics("step", 1) == [first]
        assert file.read_text() == '{"kind": "step", "step": 1}\n'


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"kind": "step", "step": 2}\n',
        '{"kind": "step", "step": "1"}\n',
        '{"kind": "step", "step": 1}\n' * 2,
        '{"kind": "step", "step": 1, "loss": 5.4867}\n',
    ],
)
def test_metrics_that_do_not_fit_the_checkpoint(tmp_path, content):
    run, file = create(tmp_path), tmp_path / "metrics.jsonl"
    file.write_text(content)
    with pytest.raises(TrainError, match="changed after .*step 1"):
        run.truncate_metrics("step", 1, digest_json([{"kind": "step", "step": 1, "loss": 5.4863}]))
    assert file.read_text() == content


def test_a_curve_of_a_run_with_an_odd_name(tmp_path):
    """Matplotlib would parse the name as mathematics."""
    run = create(tmp_path / "$x_^$\x1b")
    run.draw(lambda axes: axes.plot([1, 2], label="loss"))
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_links_at_names_of_partial_files_are_not_followed(tmp_path):
    run, other = create(tmp_path / "run"), tmp_path / "other"
    other.write_text("mine")
    for name in (run.CONFIG, run.METRICS, run.CURVE, run.ARRAYS):
        (run.path / f"{name}.partial").symlink_to(other)
    run.write_config(run.read_config())
    run.truncate_metrics("step")
    run.draw(lambda axes: axes.plot([1, 2], label="a"))
    run.write_arrays({"a": np.arange(3)})
    assert other.read_text() == "mine" and not [*run.path.glob("*.partial")]
    assert not any(file.is_symlink() for file in run.path.iterdir())
