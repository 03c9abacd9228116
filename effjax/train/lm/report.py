"""What the command shows of a run on text: lines, a progress bar, and a table at the end."""

import math

from rich.console import Console

from ...memory import MemoryPlan
from ...memory.report import format_bytes
from .. import report
from ..loop import Measured, Progress, Record
from ..report import line
from ..run_directory import RunDirectory
from .task import LMResult, LMTask


def announce(console: Console, task: LMTask, run: RunDirectory) -> None:
    """One line on the text, one on the model, one on the run."""
    config, text = task.config, task.text
    line(console, f"{text.name}: {len(text.train)} train and {len(text.test)} test bytes")
    line(
        console,
        f"{config.layers} layers of width {config.width}, {task.learner.num_params} parameters, "
        f"{config.dtype}, batch {config.batch_size} × {config.context}, {config.steps} steps, "
        f"{len(task.devices)} device(s): {task.devices[0].device_kind}",
    )
    line(console, f"run directory: {run.path}")


def make_progress(console: Console, task: LMTask) -> Progress:
    """A bar on a terminal; elsewhere one line a test."""
    steps = task.config.steps

    def line_text(record: Record) -> str:
        return (
            f"step {record['step']:>{len(str(steps))}}/{steps}  "
            f"loss {record['train_loss']:.4f}  test loss {record['test_loss']:.4f}  "
            f"test bits/byte {record['test_bits_per_byte']:.3f}  "
            f"{record['tokens_per_second']:.0f} tokens/s"
        )

    def bar_text(step: int, measured: Measured, rate: float) -> str:
        return f"loss {measured['loss']:.3f}  {rate:.0f} tokens/s"

    return report.make_progress(console, line_text, bar_text)


def show_result(
    console: Console, run: RunDirectory, result: LMResult, plan: MemoryPlan | None
) -> None:
    """The final table."""
    table = report.result_table()
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
