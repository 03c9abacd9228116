"""The output of a run on text: a description, a progress bar, and a final table."""

import math

from rich.console import Console

from ...memory import MemoryPlan
from ...memory.render import format_bytes
from .. import report
from ..errors import counted
from ..mesh import describe_devices
from ..report import print_line
from ..run_directory import RunDirectory
from ..task import Metrics, Progress, Record
from .task import LMResult, LMTask


def announce(console: Console, task: LMTask, run: RunDirectory) -> None:
    """Print the data, the model and the run directory."""
    config, text = task.config, task.text
    sizes = report.format_sizes(len(text.train), len(text.validation), len(text.test))
    print_line(console, f"{text.name}: {sizes} bytes")
    trained = "" if config.lora is None else f" ({task.learner.num_trained} of them trained)"
    print_line(
        console,
        f"{counted(config.layers, 'layer')} of width {config.width}, {task.learner.num_params} "
        f"parameters{trained}, {config.dtype}, batch {config.batch_size} × {config.context}, "
        f"{counted(config.steps, 'step')}, {describe_devices(task.mesh)}",
    )
    if task.source is not None:
        print_line(console, f"initialized from {task.source.run.path} at step {task.source.step}")
    print_line(console, f"run directory: {run.path}")


def make_progress(console: Console, task: LMTask) -> Progress:
    """Return a progress bar on a terminal, and one line per validation otherwise."""
    steps = task.config.steps

    def line_text(record: Record) -> str:
        validation = ""
        if "validation_loss" in record:
            validation = (
                f"validation loss {record['validation_loss']:.4f}  "
                f"validation bits/byte {record['validation_bits_per_byte']:.3f}  "
            )
        return (
            f"step {record['step']:>{len(str(steps))}}/{steps}  "
            f"loss {record['train_loss']:.4f}  {validation}"
            f"{record['tokens_per_second']:.0f} tokens/s"
        )

    def bar_text(step: int, measured: Metrics, rate: float) -> str:
        return f"loss {measured['loss']:.3f}  {rate:.0f} tokens/s"

    return report.ConsoleProgress(console, line_text, bar_text)


def show_result(
    console: Console, run: RunDirectory, result: LMResult, plan: MemoryPlan | None
) -> None:
    """Print the final table."""
    table = report.result_table()
    best = f"best step, {result.best_step}"
    if result.validation_loss is None:
        best = f"last step, {result.best_step}"
    for name, loss in (
        ("train loss", result.train_loss),
        (f"validation loss of the {best}", result.validation_loss),
        (f"test loss of the {best}", result.test_loss),
        ("test loss without context", result.unigram_bits * math.log(2)),
    ):
        if loss is not None:
            table.add_row(name, f"{loss:.4f} nats, {loss / math.log(2):.3f} bits/byte")
    table.add_row("parameters", str(result.num_params))
    table.add_row("tokens/s", f"{result.tokens_per_second:.0f}")
    table.add_row("time", f"{result.seconds:.0f} s")
    if plan is not None:
        table.add_row("device memory on an H200", format_bytes(plan.peak_device_bytes))
        table.add_row("host memory", format_bytes(plan.host.total))
    console.print(table)
    print_line(console, f"written: {run.path}")
