"""What the command shows of a run on images: lines, a progress bar, and a table at the end."""

from rich.console import Console

from ...memory.report import format_bytes
from .. import report
from ..loop import Measured, Progress, Record
from ..report import line
from ..run_directory import RunDirectory
from .task import ImageResult, ImageTask


def announce(console: Console, task: ImageTask, run: RunDirectory) -> None:
    """One line on the data, one on the model, one on the run."""
    config, data = task.config, task.dataset
    height, width, channels = data.image_shape
    line(
        console,
        f"{data.name}: {len(data.train_images)} train and {len(data.test_images)} test images of "
        f"{height}×{width}×{channels} in {len(data.class_names)} classes",
    )
    line(
        console,
        f"{config.model}, {config.dtype}, batch {config.batch_size}, {config.epochs} epochs, "
        f"{config.parallel} over {len(task.devices)} device(s): {task.devices[0].device_kind}",
    )
    line(console, f"run directory: {run.path}")


def make_progress(console: Console, task: ImageTask) -> Progress:
    """A bar on a terminal; elsewhere one line an epoch."""
    epochs = task.config.epochs

    def line_text(record: Record) -> str:
        return (
            f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs}  "
            f"loss {record['train_loss']:.4f}  accuracy {record['train_accuracy']:.2%}  "
            f"test loss {record['test_loss']:.4f}  test accuracy {record['test_accuracy']:.2%}  "
            f"{record['images_per_second']:.0f} images/s"
        )

    def bar_text(step: int, measured: Measured, rate: float) -> str:
        return (
            f"{task.where(step).removeprefix('in ')}  loss {measured['loss']:.3f}  "
            f"accuracy {measured['accuracy']:.1%}  {rate:.0f} images/s"
        )

    return report.make_progress(console, line_text, bar_text)


def show_result(console: Console, task: ImageTask, run: RunDirectory, result: ImageResult) -> None:
    """The final table."""
    table = report.result_table()
    table.add_row("test accuracy", f"{result.test_accuracy:.2%}")
    table.add_row(
        "best test accuracy", f"{result.best_test_accuracy:.2%} (epoch {result.best_epoch})"
    )
    table.add_row("images/s", f"{result.images_per_second:.0f}")
    batch = f"batch {task.config.batch_size}"
    plain, other = result.kept_bytes
    used = other if getattr(task.config, other) else plain
    for form, size in result.kept_bytes.items():
        ran = ", this run" if form == used else ""
        table.add_row(f"kept for backward, {batch} ({form}{ran})", format_bytes(size))
    table.add_row("time", f"{result.seconds:.0f} s")
    console.print(table)
    line(console, f"written: {run.path}")
