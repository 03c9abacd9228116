"""The output of a run on images: a description, a progress bar, and a final table."""

from rich.console import Console

from ...memory.render import format_bytes
from .. import report
from ..errors import counted
from ..mesh import describe_devices
from ..report import print_line
from ..run_directory import RunDirectory
from ..task import Metrics, Progress, Record
from .task import ImageResult, ImageTask


def announce(console: Console, task: ImageTask, run: RunDirectory) -> None:
    """Print the data, the model and the run directory."""
    config, data = task.config, task.dataset
    height, width, channels = data.image_shape
    train, validation = len(data.train_images), len(data.validation_images)
    print_line(
        console,
        f"{data.name}: {report.format_sizes(train, validation, len(data.test_images))} images of "
        f"{height}×{width}×{channels} in {len(data.class_names)} classes",
    )
    left_out = train % config.batch_size
    if left_out:
        print_line(
            console,
            f"an epoch is {counted(task.steps_per_unit, 'step')} and leaves out "
            f"{counted(left_out, 'image')} that would not fill a batch, others each time",
        )
    print_line(
        console,
        f"{config.network}, {config.dtype}, batch {config.batch_size}, "
        f"{counted(config.epochs, 'epoch')}, {config.parallel} over "
        f"{describe_devices(task.mesh)}",
    )
    print_line(console, f"run directory: {run.path}")


def make_progress(console: Console, task: ImageTask) -> Progress:
    """Return a progress bar on a terminal, and one line per epoch otherwise."""
    epochs = task.config.epochs

    def line_text(record: Record) -> str:
        validation = ""
        if "validation_loss" in record:
            validation = (
                f"validation loss {record['validation_loss']:.4f}  "
                f"validation accuracy {record['validation_accuracy']:.2%}  "
            )
        return (
            f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs}  "
            f"loss {record['train_loss']:.4f}  accuracy {record['train_accuracy']:.2%}  "
            f"{validation}{record['images_per_second']:.0f} images/s"
        )

    def bar_text(step: int, measured: Metrics, rate: float) -> str:
        return (
            f"{task.where(step).removeprefix('in ')}  loss {measured['loss']:.3f}  "
            f"accuracy {measured['accuracy']:.1%}  {rate:.0f} images/s"
        )

    return report.ConsoleProgress(console, line_text, bar_text)


def show_result(console: Console, task: ImageTask, run: RunDirectory, result: ImageResult) -> None:
    """Print the final table."""
    table = report.result_table()
    table.add_row("test accuracy", f"{result.test_accuracy:.2%}")
    if result.validation_accuracy is None:
        table.add_row("last epoch", str(result.best_epoch))
    else:
        table.add_row("validation accuracy", f"{result.validation_accuracy:.2%}")
        table.add_row("best epoch", str(result.best_epoch))
    table.add_row("images/s", f"{result.images_per_second:.0f}")
    batch = f"batch {task.config.batch_size}"
    used = "efficient" if task.config.efficient else "plain"
    for form, size in result.kept_bytes.items():
        ran = ", this run" if form == used else ""
        table.add_row(f"kept for backward, {batch} ({form}{ran})", format_bytes(size))
    table.add_row("time", f"{result.seconds:.0f} s")
    console.print(table)
    print_line(console, f"written: {run.path}")
