"""Tables, numbers and progress lines. Nothing here depends on the results, see `results.py`."""

import abc
import dataclasses
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROWS = 12  # of a table
PATIENCE = 30.0  # seconds without a line of progress
TYPICAL_TIME = "seconds for a small step, minutes for a deep network"
FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
_NUMBER = re.compile(r"([≥≤] )?\d.*|–?")  # also a number with a unit, or a missing one


def format_number(count: float, units: Sequence[str]) -> str:
    """Return a number with one of its units, each a thousand of the one before."""
    size, exponent = float(count), 0
    while size >= 1000 and exponent < len(units) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.1f} {units[exponent]}" if exponent else f"{count:.0f} {units[0]}"


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, such as "12.3 MB"."""
    return format_number(count, ("B", "kB", "MB", "GB", "TB"))


def format_seconds(seconds: float) -> str:
    """Return a duration with its unit, such as "12.3 ms"."""
    if 0 < seconds < 1e-6:  # of one example
        return format_number(seconds * 1e12, ("ps", "ns"))
    return format_number(seconds * 1e6, ("us", "ms", "s"))


@dataclasses.dataclass(frozen=True)
class ReportTable:
    """A table whose rows are texts by the name of their column, with an optional title."""

    rows: Sequence[Mapping[str, str]]
    title: str = ""

    @property
    def columns(self) -> dict[str, list[str]]:
        """The cells of each column that has any text."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        columns = {name: [row.get(name, "") for row in self.rows] for name in names}
        return {name: cells for name, cells in columns.items() if any(cells)}

    def __str__(self) -> str:
        padded = []
        for name, cells in self.columns.items():
            width, pad = (
                max(map(len, [name, *cells])),
                str.rjust if _is_numeric(cells) else str.ljust,
            )
            padded.append([pad(cell, width) for cell in [name, *cells]])
        lines = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
        return "\n".join([self.title, *lines] if self.title else lines)

    def __rich__(self) -> Any:
        import rich.table
        from rich.text import Text

        # As `Text`, since rich would read the brackets of shapes as markup.
        title = Text(self.title, style="bold") if self.title else None
        table = rich.table.Table(title=title, title_justify="left")
        for name, cells in self.columns.items():
            # Texts wrap at spaces only: a path or an operation that is too long is cut.
            is_number = _is_numeric(cells)
            justify = "right" if is_number else "left"
            table.add_column(name, justify=justify, no_wrap=is_number, overflow="ellipsis")
        for row in zip(*self.columns.values(), strict=True):
            table.add_row(*map(Text, row))
        return table


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


@dataclasses.dataclass(frozen=True)
class Report:
    """A result as a headline, a note and tables; `is_ok=False` marks the headline in red.

    Tables without rows are left out.
    """

    tables: Sequence[ReportTable]
    headline: str = ""
    note: str = ""
    is_ok: bool = True

    def __str__(self) -> str:
        summary = "\n".join(filter(None, [self.headline, self.note]))
        return "\n\n".join(filter(None, [summary, *(str(t) for t in self.tables if t.rows)]))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        style = "bold" if self.is_ok else "bold red"
        summary = [Text(self.headline, style=style)] if self.headline else []
        summary += [Text(self.note)] if self.note else []
        return Group(*summary, *(table for table in self.tables if table.rows))


class Printable(abc.ABC):
    """Base class of results that print their report as text or, with rich, as tables."""

    @abc.abstractmethod
    def report(self) -> Report:
        """Return the report to print."""

    def __str__(self) -> str:
        return str(self.report())

    def __rich__(self) -> Any:
        return self.report()


class Progress:
    """Lines on stderr about several programs: the finished ones, and those that are compiled.

    The latter are named when one starts, and twice a minute.
    """

    def __init__(self, title: str, total: int | None = None, show: bool = True):
        self.total, self.show, self.count = total, show, 0
        self.named: set[str] = set()
        self.start = self.last = time.monotonic()
        self._print(f"{title}{f', {total} in all' if total else ''}: {TYPICAL_TIME}")

    def run(self, names: Sequence[str]) -> None:
        """Report the programs that are being compiled."""
        now = time.monotonic()
        if names and (not self.named.issuperset(names) or now - self.last >= PATIENCE):
            self.named.update(names)
            of_all = f" of {self.total}" if self.total else ""
            self._print(f"{'; '.join(names)}: {now - self.start:.0f} s, {self.count}{of_all} done")

    def finish(self, line: str) -> None:
        """Report one finished program, given a line about it."""
        self.count += 1
        self._print(f"{self.count} of {self.total}, {line}" if self.total else line)

    def _print(self, line: str) -> None:
        if self.show:
            print(line, file=sys.stderr, flush=True)
        self.last = time.monotonic()
