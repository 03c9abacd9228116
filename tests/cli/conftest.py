import signal
import sys
import types

import pytest

from effjax import cli
from effjax.train.host_memory import VARIABLE
from tests.cli.command import one_line


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty directory; return its exit code, stdout and stderr."""
    for name in ("typer", "rich", "matplotlib", "sklearn", "PIL"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # restored at the end
    monkeypatch.delenv(VARIABLE)  # commands that train set it

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Run a wrong command, which ends with one line on stderr; return that line."""

    def refused(*argv):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and one_line(err), err
        return err

    return refused


@pytest.fixture
def when_printed(monkeypatch):
    """Call a function once, when the command has printed a text."""

    def when_printed(text, action):
        write, calls = sys.stdout.write, []

        def write_and_act(printed):
            count = write(printed)
            if text in printed and not calls:
                calls.append(text)
                action()
            return count

        monkeypatch.setattr(sys.stdout, "write", write_and_act)

    return when_printed


@pytest.fixture
def run_without_training(run, when_printed):
    """Run a command that trains, with Ctrl-C before the first step; return its output."""

    def run_without_training(*argv):
        when_printed("run directory: ", lambda: signal.raise_signal(signal.SIGINT))
        code, out, err = run(*argv)
        assert (code, err) == (130, "effjax: interrupted\n")
        return out

    return run_without_training


@pytest.fixture
def search(monkeypatch):
    """Replace the search for options by one that chooses the last ones; return its arguments."""
    calls = []

    class Found(types.SimpleNamespace):
        def __str__(self):
            return "a table"

    def choose_options(make_step, options, **arguments):
        calls.append(arguments)
        last = {name: values[-1] for name, values in options.items()}
        small = {"mlp_chunk_size": None, "num_microbatches": 1}
        last |= {name: value for name, value in small.items() if name in last}
        fun, *args = make_step(**last)
        assert callable(fun) and args
        fits = arguments["budget"] is None or arguments["budget"] > 10**6
        return Found(options=last if fits else None)

    monkeypatch.setattr("effjax.memory.choose_options", choose_options)
    return calls
