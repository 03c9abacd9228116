"""Progress display shared by all tasks: lines, and a bar on a terminal."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
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


def make_progress(console: Console, line_text: LineText, bar_text: BarText) -> Progress:
    """Return a progress bar with lines above it on a terminal, and lines elsewhere."""
    if console.is_terminal:
        return BarProgress(console, line_text, bar_text)
    return LineProgress(console, line_text, bar_text)


class LineProgress(Progress):
    """A line per evaluation, and one for a step after a minute without a line."""

    def __init__(self, console: Console, line_text: LineText, bar_text: BarText):
        self.console, self.line_text, self.bar_text = console, line_text, bar_text
        self.steps, self.last_line = 0, 0.0

    def start(self, steps: int, done: int) -> None:
        """Print that the first step is compiled."""
        self.steps = steps
        if done < steps:
            self.log("compiling")

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Print the metrics if nothing was printed for a minute."""
        if time.monotonic() - self.last_line > PATIENCE:
            self.log(f"step {step}/{self.steps}  {self.bar_text(step, metrics, rate)}")

    def report(self, record: Record) -> None:
        """Print a record."""
        self.log(self.line_text(record))

    def log(self, text: str) -> None:
        """Print a message."""
        print_line(self.console, text)
        self.last_line = time.monotonic()


class BarProgress(LineProgress):
    """A bar over all steps, with a line per evaluation above it."""

    def __init__(self, console: Console, line_text: LineText, bar_text: BarText):
        super().__init__(console, line_text, bar_text)
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
        """Show the bar."""
        text = "compiling" if done < steps else ""
        self.row = self.bar.add_task(text, total=steps, completed=done)
        self.bar.start()

    def step(self, step: int, metrics: Metrics, rate: float) -> None:
        """Advance the bar."""
        assert self.row is not None  # start() comes first
        text = self.bar_text(step, metrics, rate)
        self.bar.update(self.row, completed=step, description=text)

    def stop(self) -> None:
        """Remove the bar."""
        self.bar.stop()
