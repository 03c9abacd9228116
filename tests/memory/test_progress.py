"""Progress of plans: what is compiled, how far it is, and how long it takes."""

import io
import re
import sys

import pytest

from effjax.memory import render


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_names_programs_that_start_and_twice_a_minute(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 1.0, 1.0, 2.0, 32.0, 32.0, 40.0, 50.0])
    monkeypatch.setattr(render.time, "monotonic", lambda: next(clock))
    with render.progress_bar("compiling", 3, show=True) as report:
        report.run(["plain", "conv"])  # at 1 s
        report.run(["plain", "conv"])  # at 2 s: too early
        report.run(["plain", "conv"])  # at 32 s
        report.finish("plain: 1.0 GB")  # at 40 s
        report.run(["conv"])  # at 50 s, 10 s after the last line
    assert capsys.readouterr().err.splitlines() == [
        f"compiling, 3 in all: {render.TYPICAL_TIME}",
        "plain; conv: 1 s, 0 of 3 done",
        "plain; conv: 32 s, 0 of 3 done",
        "1 of 3, plain: 1.0 GB",
    ]


def test_bar_names_the_running_programs(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    with render.progress_bar("compiling", 2, show=True) as report:
        report.run(["plain", "conv"])
        report.finish("plain: 1.0 GB")
        report.run(["[conv]"])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sys.stderr.getvalue())
    assert f"compiling, 2 in all: {render.TYPICAL_TIME}" in text
    assert "plain: 1.0 GB" in text and "compiling [conv]" in text and "1/2" in text


def test_reports_nothing_by_default(capsys):
    with render.progress_bar("compiling", 2, show=False) as report:
        report.run(["plain"])
        report.finish("plain: 1.0 GB")
    assert capsys.readouterr() == ("", "")
