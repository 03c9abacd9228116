"""What the command shows of a run: a progress bar or plain lines, and a table at the end."""

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)
from rich.table import Table

from ...memory.report import format_bytes
from ..loop import Progress, Result
from ..run_directory import RunDirectory
from .job import Job


def announce(console: Console, job: Job, run: RunDirectory) -> None:
    """One line on the data, one on the model, one on the run."""
    config, data = job.config, job.dataset
    height, width, channels = data.image_shape
    line(
        console,
        f"{data.name}: {len(data.train_images)} train and {len(data.test_images)} test images of "
        f"{height}×{width}×{channels} in {len(data.class_names)} classes",
    )
    line(
        console,
        f"{config.model}, {config.dtype}, batch {config.batch_size}, {config.epochs} epochs, "
        f"{config.parallel} over {len(job.devices)} device(s): {job.devices[0].device_kind}",
    )
    line(console, f"run directory: {run.path}")


def make_progress(console: Console, job: Job) -> Progress:
    """A bar on a terminal; elsewhere one line an epoch."""
    return BarProgress(console, job) if console.is_terminal else LineProgress(console, job)


class LineProgress(Progress):
    """One line an epoch."""

    def __init__(self, console: Console, job: Job):
        self.console = console
        self.epochs = job.config.epochs

    def epoch(self, record: dict[str, Any]) -> None:
        line(
            self.console,
            f"epoch {record['epoch']:>{len(str(self.epochs))}}/{self.epochs}  "
            f"loss {record['train_loss']:.4f}  accuracy {record['train_accuracy']:.2%}  "
            f"test loss {record['test_loss']:.4f}  test accuracy {record['test_accuracy']:.2%}  "
            f"{record['images_per_second']:.0f} images/s",
        )


class BarProgress(LineProgress):
    """A bar over all steps, with the lines of the epochs above it."""

    def __init__(self, console: Console, job: Job):
        super().__init__(console, job)
        self.bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("accuracy {task.fields[accuracy]:.1%}"),
            TextColumn("{task.fields[rate]:.0f} images/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task: TaskID | None = None

    def start(self, steps: int, done: int) -> None:
        zeros: dict[str, Any] = {"loss": 0.0, "accuracy": 0.0, "rate": 0.0}
        self.task = self.bar.add_task("", total=steps, completed=done, epoch=0, **zeros)
        self.bar.start()

    def step(self, epoch: int, loss: float, accuracy: float, images_per_second: float) -> None:
        assert self.task is not None  # start() comes first
        self.bar.update(
            self.task, advance=1, epoch=epoch, loss=loss, accuracy=accuracy, rate=images_per_second
        )

    def stop(self) -> None:
        self.bar.stop()


def show_result(console: Console, job: Job, run: RunDirectory, result: Result) -> None:
    """The final table."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("test accuracy", f"{result.test_accuracy:.2%}")
    table.add_row(
        "best test accuracy", f"{result.best_test_accuracy:.2%} (epoch {result.best_epoch})"
    )
    table.add_row("images/s", f"{result.images_per_second:.0f}")
    batch = f"batch {job.config.batch_size}"
    plain, other = result.kept_bytes
    used = other if getattr(job.config, other) else plain
    for form, size in result.kept_bytes.items():
        ran = ", this run" if form == used else ""
        table.add_row(f"kept for backward, {batch} ({form}{ran})", format_bytes(size))
    table.add_row("time", f"{result.seconds:.0f} s")
    console.print(table)
    line(console, f"written: {run.path}")


def line(console: Console, text: str) -> None:
    """Plain text, not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
