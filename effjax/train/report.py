"""What the reports of all tasks share: plain lines, and a progress bar on a terminal."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .loop import Measured, Progress, Record

LineText = Callable[[Record], str]
BarText = Callable[[int, Measured, float], str]  # step, what was measured, examples a second


def result_table() -> Table:
    """Names and values, to be filled."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    return table


def line(console: Console, text: str) -> None:
    """Plain text, not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_progress(console: Console, line_text: LineText, bar_text: BarText) -> Progress:
    """One line a test; on a terminal a bar over all steps too, with the lines above it."""
    if console.is_terminal:
        return BarProgress(console, line_text, bar_text)
    return LineProgress(console, line_text)


class LineProgress(Progress):
    """One line a test."""

    def __init__(self, console: Console, line_text: LineText):
        self.console, self.line_text = console, line_text

    def report(self, record: Record) -> None:
        line(self.console, self.line_text(record))


class BarProgress(LineProgress):
    """A bar over all steps, with the lines of the tests above it."""

    def __init__(self, console: Console, line_text: LineText, bar_text: BarText):
        super().__init__(console, line_text)
        self.bar_text = bar_text
        self.bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.row: TaskID | None = None

    def start(self, steps: int, done: int) -> None:
        self.row = self.bar.add_task("", total=steps, completed=done)
        self.bar.start()

    def step(self, step: int, measured: Measured, rate: float) -> None:
        assert self.row is not None  # start() comes first
        text = self.bar_text(step, measured, rate)
        self.bar.update(self.row, completed=step, description=text)

    def stop(self) -> None:
        self.bar.stop()
