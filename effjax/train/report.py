"""What the reports of all tasks share: plain lines, and a progress bar on a terminal."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .task import Metrics, Progress, Record

LineText = Callable[[Record], str]
BarText = Callable[[int, Metrics, float], str]  # step, what was measured, examples a second

PATIENCE = 60.0  # seconds without a line


def result_table() -> Table:
    """Names and values, to be filled."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    return table


def parts(train: int, validation: int, test: int) -> str:
    """How large the parts of the data are; one that is empty is not named."""
    return (
        f"{train} train, {validation} validation and {test} test"
        if validation
        else f"{train} train and {test} test"
    )


def line(console: Console, text: str) -> None:
    """Plain text, not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_progress(console: Console, line_text: LineText, bar_text: BarText) -> Progress:
    """A line a validation, and on a terminal a bar over all steps below them; elsewhere a line now
    and then."""
    if console.is_terminal:
        return BarProgress(console, line_text, bar_text)
    return LineProgress(console, line_text, bar_text)


class LineProgress(Progress):
    """A line a validation, and one of a step where there was none for a minute."""

    def __init__(self, console: Console, line_text: LineText, bar_text: BarText):
        self.console, self.line_text, self.bar_text = console, line_text, bar_text
        self.steps, self.said = 0, 0.0

    def start(self, steps: int, done: int) -> None:
        self.steps = steps
        if done < steps:
            self.log("compiling")

    def step(self, step: int, measured: Metrics, rate: float) -> None:
        if time.monotonic() - self.said > PATIENCE:
            self.log(f"step {step}/{self.steps}  {self.bar_text(step, measured, rate)}")

    def report(self, record: Record) -> None:
        self.log(self.line_text(record))

    def log(self, text: str) -> None:
        line(self.console, text)
        self.said = time.monotonic()


class BarProgress(LineProgress):
    """A bar over all steps, with the lines of the validations above it."""

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
        text = "compiling" if done < steps else ""
        self.row = self.bar.add_task(text, total=steps, completed=done)
        self.bar.start()

    def step(self, step: int, measured: Metrics, rate: float) -> None:
        assert self.row is not None  # start() comes first
        text = self.bar_text(step, measured, rate)
        self.bar.update(self.row, completed=step, description=text)

    def stop(self) -> None:
        self.bar.stop()
