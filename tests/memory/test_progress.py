"""Progress of plans: what is compiled, how far it is, and how long it takes."""

from effjax.memory import render


def test_names_programs_that_start_and_twice_a_minute(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 1.0, 1.0, 2.0, 32.0, 32.0, 40.0, 50.0])
    monkeypatch.setattr(render.time, "monotonic", lambda: next(clock))
    report = render.Progress("compiling", 3)
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


def test_reports_nothing_if_it_is_off(capsys):
    report = render.Progress("compiling", 2, show=False)
    report.run(["plain"])
    report.finish("plain: 1.0 GB")
    assert capsys.readouterr() == ("", "")
