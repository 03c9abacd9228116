"""Rendering of results: text, rich tables and progress lines.

Nothing here depends on the results themselves. Each result describes itself as a `Report`.
"""

import abc
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MAX_ROWS = 12  # of a table
PATIENCE = 30.0  # seconds without a line of progress
TYPICAL_TIME = "seconds for a small step, minutes for a deep network"
_NUMERIC_COLUMNS = {
    "bytes", "count", "device", "host", "peak", "ratio", "arguments", "outputs", "temporaries",
    "batch", "amount", "rate", "alone", "adds", "call", "products", "kernels",
    "from host", "to host", "collectives", "step", "tokens/s", "images/s",
}  # fmt: skip
_UNWRAPPED_COLUMNS = _NUMERIC_COLUMNS | {"operation", "kind", "source", "called from"}
_HEARTBEAT = 30  # seconds


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, such as "12.3 MB"."""
    return format_number(count, ("B", "kB", "MB", "GB", "TB"))


def format_number(count: float, units: Sequence[str]) -> str:
    """Return a number with one of its units, each a thousand of the one before."""
    size, exponent = float(count), 0
    while size >= 1000 and exponent < len(units) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.1f} {units[exponent]}" if exponent else f"{count:.0f} {units[0]}"


@dataclasses.dataclass(frozen=True)
class ReportTable:
    """A table of text cells with an optional title."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        is_number = [name in _NUMERIC_COLUMNS for name in self.header]
        text = "\n".join(
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(line, widths, is_number, strict=True)
            ).rstrip()
            for line in lines
        )
        return f"{self.title}\n{text}" if self.title else text

    def __rich__(self) -> Any:
        import rich.table
        from rich.text import Text

        title = Text(self.title, style="bold") if self.title else None
        table = rich.table.Table(title=title, title_justify="left")
        for name in self.header:
            justify = "right" if name in _NUMERIC_COLUMNS else "left"
            table.add_column(name, justify=justify, no_wrap=name in _UNWRAPPED_COLUMNS)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


@dataclasses.dataclass(frozen=True)
class Report:
    """A result as a headline, a note and tables; `is_ok=False` marks the headline in red."""

    tables: Sequence[ReportTable]
    headline: str = ""
    note: str = ""
    is_ok: bool = True

    def __str__(self) -> str:
        summary = "\n".join(filter(None, [self.headline, self.note]))
        return "\n\n".join(filter(None, [summary, *map(str, self.tables)]))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        style = "bold" if self.is_ok else "bold red"
        summary = [Text(self.headline, style=style)] if self.headline else []
        summary += [Text(self.note)] if self.note else []
        return Group(*summary, *self.tables)


class Printable(abc.ABC):
    """Base class of results that print their report as text or, with rich, as tables."""

    @abc.abstractmethod
    def report(self) -> Report:
        """Return the report to print."""

    def __str__(self) -> str:
        return str(self.report())

    def __rich__(self) -> Any:
        return self.report()


class ProgressReport:
    """Progress of several programs; the base class reports nothing."""

    def run(self, names: Sequence[str]) -> None:
        """Report the programs that are being compiled."""

    def finish(self, line: str) -> None:
        """Report one finished program, given a line about it."""


@contextmanager
def progress_bar(title: str, total: int | None, show: bool) -> Iterator[ProgressReport]:
    """Report progress on stderr: a bar on a terminal, plain lines elsewhere.

    Args:
        title: the name of the task.
        total: the number of programs, or None if unknown.
        show: whether to report anything.
    """
    if not show:
        yield ProgressReport()
    elif sys.stderr.isatty():
        with _rich_progress_bar(title, total) as report:
            yield report
    else:
        yield _ProgressLines(title, total)


class _ProgressLines(ProgressReport):
    """Plain lines: the title, the finished programs, and the running ones.

    Those are named when one starts, and twice a minute.
    """

    def __init__(self, title: str, total: int | None):
        self.title, self.total, self.count = title, total, 0
        self.named: set[str] = set()
        self.start = self.last = time.monotonic()
        self._print(f"{title}{_in_all(total)}: {TYPICAL_TIME}")

    def run(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        if names and (not self.named.issuperset(names) or now - self.last >= PATIENCE):
            self.named.update(names)
            of_all = f" of {self.total}" if self.total else ""
            self._print(f"{'; '.join(names)}: {now - self.start:.0f} s, {self.count}{of_all} done")

    def finish(self, line: str) -> None:
        self.count += 1
        self._print(f"{self.count} of {self.total}, {line}" if self.total else line)

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self.last = time.monotonic()


def _in_all(total: int | None) -> str:
    return f", {total} in all" if total else ""


@contextmanager
def _rich_progress_bar(title: str, total: int | None) -> Iterator[ProgressReport]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    console.print(Text(f"{title}{_in_all(total)}: {TYPICAL_TIME}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)

        class BarReport(ProgressReport):
            def run(self, names: Sequence[str]) -> None:
                bar.update(task, description=f"{title} {', '.join(names)}".rstrip())

            def finish(self, line: str) -> None:
                bar.console.print(Text(line))
                bar.advance(task)

        yield BarReport()
