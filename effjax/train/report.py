"""The output of a run, the same for all tasks: lines, a bar on a terminal, a final table."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from .errors import printable
from .task import SAMPLES, Metrics, Progress, Record, Task

# The format of each metric in a line and, with fewer digits, in the bar.
FORMATS = {
    "loss": (".4f", ".3f"),
    "accuracy": (".2%", ".1%"),
    "ap": (".3f", ".3f"),
    "ap50": (".3f", ".3f"),
    "margin": (".3f", ".2f"),
    "rewards/chosen": (".3f", ".2f"),
    "rewards/rejected": (".3f", ".2f"),
    "router_loss": (".3f", ".2f"),
    "busiest_expert": (".1%", ".0%"),
}
PATIENCE = 60.0  # seconds without a line


def print_table(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and values."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def print_line(console: Console, text: str) -> None:
    """Print plain text without wrapping it."""
    # Rich interprets markup such as [red], and emoji such as :cat:, in a string.
    console.print(Text(printable(text)), soft_wrap=True)


class ConsoleProgress(Progress):
    """Print a line per evaluation, and show a progress bar on a terminal.

    Elsewhere, a step is printed after a minute without a line.
    """

    def __init__(self, console: Console, task: Task):
        self.console, self.task = console, task
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
        words = [f"{name} {value:{FORMATS[name][1]}}" for name, value in metrics.items()]
        if self.task.unit == "epoch":  # the bar shows the step
            words.insert(0, self.task.where(step).removeprefix("in "))
        text = "  ".join([*words, f"{rate:.0f} {self.task.items}/s"])
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step, description=text)
        # A log file shows that a long epoch goes on, without a line for each step.
        elif time.monotonic() - self.last_line > PATIENCE:
            self.log(f"step {step}/{self.steps}  {text}")

    def report(self, record: Record) -> None:
        """Print a record."""
        unit = self.task.unit
        length = getattr(self.task.config, f"{unit}s")
        words = [f"{unit} {record[unit]:>{len(str(length))}}/{length}"]
        for part, prefix in (("train_", ""), ("validation_", "validation ")):
            for name, (form, _) in FORMATS.items():
                if (value := record.get(part + name)) is not None:
                    words.append(f"{prefix}{name} {value:{form}}")
        words.append(f"{record[f'{self.task.items}_per_second']:.0f} {self.task.items}/s")
        self.log("  ".join(words))
        for sample in record.get(SAMPLES, ()):
            self.log(f"  > {sample['prompt']}")
            for line in sample["text"].splitlines():
                self.log(f"    {line}")

    def log(self, text: str) -> None:
        """Print a message."""
        print_line(self.console, text)
        self.last_line = time.monotonic()

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar:
            self.bar.stop()


@contextlib.contextmanager
def load_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of numbers of bytes, read and in all; it shows a bar on a terminal."""
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def update(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:  # what follows may take hours
            bar.stop()

    try:
        yield update
    finally:
        bar.stop()
