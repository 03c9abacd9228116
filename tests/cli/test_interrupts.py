"""Ctrl-C, SIGTERM and SIGHUP during `effjax train`."""

import os
import signal
import subprocess
import sys

import pytest

from effjax.cli.training import stop_signals
from tests.train import small


@pytest.fixture
def set_handler():
    """Set the handler of a signal until the end of the test."""
    before = {}

    def set_handler(number, handler):
        before[number] = signal.signal(number, handler)

    yield set_handler
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_acts_as_before(set_handler, capfd, number):
    others = []
    set_handler(number, lambda number, _: others.append(number))
    with stop_signals(has_joined=False) as received:
        signal.raise_signal(number)
        said = "press Ctrl-C again to end now" in capfd.readouterr().err
        assert said == (number == signal.SIGINT) and received == [number] and others == []
        signal.raise_signal(number)
        assert received == others == [number]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_processes_are_stopped_by_sigterm(set_handler, number):
    """JAX receives it, and stops all processes after the same step."""
    of_jax = []
    set_handler(number, lambda *_: None)  # not that of nohup, which ignores SIGHUP
    set_handler(signal.SIGTERM, lambda number, _: of_jax.append(number))
    with stop_signals(has_joined=True):
        signal.raise_signal(number)
    assert of_jax == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored(set_handler):
    """As nohup starts a command."""
    set_handler(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals(has_joined=False) as received:
        signal.raise_signal(signal.SIGHUP)
    assert received == []


def test_ctrl_c_twice(run, when_printed, monkeypatch):
    monkeypatch.setattr("effjax.train.images.task.model_builder", small.builder)
    monkeypatch.setattr("effjax.train.images.task.load_dataset", lambda *_: small.dataset())

    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    when_printed("compiling", press_twice)
    argv = "train", "densenet", "--epochs", "3", "--batch-size", "16", "--out", "here"
    nothing = "effjax: interrupted before the first checkpoint. Nothing is kept.\n"
    assert run(*argv)[::2] == (130, nothing)

    when_printed("epoch 2/3", press_twice)
    resume = "Resume with effjax train densenet --resume here"
    code, out, err = run("train", "densenet", "--resume", "here")
    assert (code, err) == (130, f"effjax: interrupted. here keeps step 8. {resume}\n")
    assert "epoch 1/3" in out and "epoch 3/3" not in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def run_alone(code, *argv, **options):
    """Run Python code and then a command, in a process of its own."""
    pytest.importorskip("typer")
    code += "\nfrom effjax.cli import main\nraise SystemExit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *argv]
    pipe = {"stderr": subprocess.PIPE, "text": True, "timeout": 60}
    return subprocess.run(command, env=environment, **pipe, **options)


@pytest.mark.parametrize("end", ["return 0", "raise ImportError('half of a module')"])
def test_ctrl_c_that_an_import_loses(tmp_path, end):
    code = f"""
import effjax.cli, os, signal
def run(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        pass
    {end}
effjax.cli._run = run
"""
    ended = run_alone(code, "generate", cwd=tmp_path, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "effjax: interrupted\n")


def test_closed_standard_output(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_alone("", "train", "densenet", "--help", cwd=tmp_path, stdout=writer)
    os.close(writer)
    assert ended.returncode == 1 and "standard output was closed" in ended.stderr
    assert ended.stderr.count("\n") == 1
