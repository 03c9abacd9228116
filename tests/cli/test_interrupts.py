"""Ctrl-C during `effjax train`, by signals to another process."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from effjax.cli.interrupts import Interrupts
from effjax.train.run_directory import RunDirectory
from tests.cli.command import one_line
from tests.train.text.small import tiny_base

NEW_RUN = (
    "finetune base --data base/rows.jsonl --max-length 16 --batch-size 2 --dtype float32 --out here"
)
# JAX computes or compiles in C++: the main thread runs no Python.
BUSY = """
import jax
def busy(*_, **__):
    print("busy", flush=True)
    jax.jit(lambda: jax.lax.while_loop(lambda x: x > 0, lambda x: x | 1, 1))().block_until_ready()
"""
IN_A_STEP = """
from effjax.train.text.task import TextTask
read, losses = TextTask.read, []
def read_two(self, loss):
    losses.append(loss)
    return busy() if len(losses) > 2 else read(self, loss)
TextTask.read = read_two
"""
WHILE_COMPILING = """
from effjax.train.text.task import TextTask
TextTask.make_step = busy
"""


@pytest.fixture
def start(tmp_path):
    """Start a run in a new process after running some code; return the process."""
    pytest.importorskip("typer")
    shutil.copytree(tiny_base(), tmp_path / "base")
    processes = []

    def start(*options, before=""):
        path = os.pathsep.join(p for p in sys.path if p)
        environment = os.environ | {
            "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }  # fmt: skip
        code = f"{before}\nfrom effjax.cli import main\nraise SystemExit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *options], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(process, text):
    """Read stdout up to a line with this text."""
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"no {text!r}: {process.stderr.read()}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("busy", "presses", "message"),
    [
        (IN_A_STEP, 2, "here keeps step {}. Resume with effjax finetune --resume here"),
        (WHILE_COMPILING, 1, "interrupted before the first step. Nothing is kept."),
    ],
)
def test_ctrl_c_while_jax_is_busy(start, tmp_path, busy, presses, message):
    """The second one ends a step that would never end."""
    process = start(*NEW_RUN.split(), "--checkpoint-every", "1", before=BUSY + busy)
    wait_for(process, "busy")
    process.send_signal(signal.SIGINT)
    if presses == 2:
        wait_for(process, "press Ctrl-C again to end now")
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and one_line(err)
    assert message.format(RunDirectory(tmp_path / "here").last_step) in err


def test_no_traceback_of_a_lost_exception(monkeypatch):
    class Raises:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reported.append(lost.exc_type))
    with Interrupts(print, str):
        for error in (KeyboardInterrupt, ValueError):
            Raises(error)
    assert reported == [ValueError]
    Raises(KeyboardInterrupt)
    assert reported == [ValueError, KeyboardInterrupt]


@pytest.mark.parametrize("end", ["return 0", "raise ImportError('half of a module')"])
def test_ctrl_c_that_an_import_loses(start, end):
    before = f"""
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
    process = start("generate", before=before)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "effjax: interrupted\n")


def test_closed_standard_output(start):
    process = start("finetune", "--help", before="import os; os.close(os.dup(1))")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 1 and "standard output was closed" in err and err.count("\n") == 1
