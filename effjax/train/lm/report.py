"""What the command shows of a run: a progress bar or plain lines, and a table at the end."""

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ...memory import MemoryPlan
from ...memory.report import format_bytes
from ..images.report import line
from ..run_directory import RunDirectory
from .job import LMJob
from .loop import LMProgress, LMResult


def announce(console: Console, job: LMJob, run: RunDirectory) -> None:
    """One line on the text, one on the model, one on the run."""
    config, text = job.config, job.text
    line(console, f"{text.name}: {len(text.train)} train and {len(text.test)} test bytes")
    line(
        console,
        f"{config.layers} layers of width {config.width}, {job.num_params} parameters, "
        f"{config.dtype}, batch {config.batch_size} × {config.context}, {config.steps} steps, "
        f"{len(job.devices)} device(s): {job.devices[0].device_kind}",
    )
    line(console, f"run directory: {run.path}")


def make_progress(console: Console, job: LMJob) -> LMProgress:
    """A bar on a terminal; elsewhere one line a test."""
    return BarProgress(console, job) if console.is_terminal else LineProgress(console, job)


class LineProgress(LMProgress):
    """One line a test."""

    def __init__(self, console: Console, job: LMJob):
        self.console = console
        self.steps = job.config.steps

    def report(self, record: dict[str, Any]) -> None:
        line(
            self.console,
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}  "
            f"loss {record['train_loss']:.4f}  test loss {record['test_loss']:.4f}  "
            f"test bits/byte {record['test_bits_per_byte']:.3f}  "
            f"{record['tokens_per_second']:.0f} tokens/s",
        )


class BarProgress(LineProgress):
    """A bar over all steps, with the lines of the tests above it."""

    def __init__(self, console: Console, job: LMJob):
        super().__init__(console, job)
        self.bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task: TaskID | None = None

    def start(self, steps: int, done: int) -> None:
        zeros: dict[str, Any] = {"loss": 0.0, "rate": 0.0}
        self.task = self.bar.add_task("", total=steps, completed=done, **zeros)
        self.bar.start()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        assert self.task is not None  # start() comes first
        self.bar.update(self.task, completed=step, loss=loss, rate=tokens_per_second)

    def stop(self) -> None:
        self.bar.stop()


def show_result(
    console: Console, run: RunDirectory, result: LMResult, plan: MemoryPlan | None
) -> None:
    """The final table."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, loss in (
        ("train loss", result.train_loss),
        ("test loss", result.test_loss),
        (f"best test loss (step {result.best_step})", result.best_test_loss),
        ("test loss without context", result.unigram_bits * math.log(2)),
    ):
        table.add_row(name, f"{loss:.4f} nats, {loss / math.log(2):.3f} bits/byte")
    table.add_row("parameters", str(result.num_params))
    table.add_row("tokens/s", f"{result.tokens_per_second:.0f}")
    table.add_row("time", f"{result.seconds:.0f} s")
    if plan is not None:
        table.add_row("device memory on an H200", format_bytes(plan.peak_device_bytes))
        table.add_row("host memory beside it", format_bytes(plan.host.total))
    console.print(table)
    line(console, f"written: {run.path}")
