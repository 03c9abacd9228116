"""Progress display shared by all tasks: lines, and a bar on a terminal."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .task import Metrics, Progress, Record

LineText = Callable[[Record], str]
BarText = Callable[[int, Metrics, float], str]  # (step, metrics, examples per second)

PATIENCE = 60.0  # seconds without a line


def result_table() -> Table:
    """Return an empty table of names and values."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    return table


def format_sizes(train: int, validation: int, test: int) -> str:
    """Return the sizes of the parts of the data, without an empty validation part."""
    if validation:
        return f"{train} train, {validation} validation and {test} test"
    return f"{train} train and {test} test"


def print_line(console: Console, text: str) -> None:
    """Print plain text without wrapping it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class ConsoleProgress(Progress):
    """A line per evaluation, below them a bar over all steps on a terminal.

    Elsewhere, a step is printed after a minute without a line.
    """

    def __init__(self, console: Console, line_text: LineText, bar_text: BarText):
        self.console, self.line_text, self.bar_text = console, line_text, bar_text
        self.steps, self.last_line = 0, 0.0
        self.bar: Bar | None = None
        if console.is_terminal:
            self.bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )

    def start(self, steps: int, done: int) -> None:
        """Show the bar, and say that the first step is compiled."""
        self.steps = steps
        if self.bar:
            self.bar.add_task("compiling" if done < steps else "", total=steps, completed=done)
            self.bar.start()
        elif done < steps:
            self.log("compiling")

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Advance the bar, or print the metrics if nothing was printed for a minute."""
        text = self.bar_text(step, metrics, rate)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step, description=text)
        elif time.monotonic() - self.last_line > PATIENCE:
            self.log(f"step {step}/{self.steps}  {text}")

    def report(self, record: Record) -> None:
        """Print a record."""
        self.log(self.line_text(record))

    def log(self, text: str) -> None:
        """Print a message."""
        print_line(self.console, text)
        self.last_line = time.monotonic()

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar:
            self.bar.stop()
