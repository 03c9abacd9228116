"""The output of a run on text: its description and its result."""

import math

from ...memory import MemoryPlan
from ...memory.render import format_bytes
from ..errors import counted
from ..mesh import describe_devices
from ..report import format_sizes
from .task import LMResult, LMTask


def describe(task: LMTask) -> list[str]:
    """Describe the data, the model and the devices, one per line."""
    config, text = task.config, task.text
    sizes = format_sizes(len(text.train), len(text.validation), len(text.test))
    return [
        f"{text.name}: {sizes} bytes",
        f"{counted(config.layers, 'layer')} of width {config.width}, {task.learner.num_params} "
        f"parameters, {config.dtype}, batch {config.batch_size} × {config.context}, "
        f"{counted(config.steps, 'step')}, {describe_devices(task.mesh)}",
    ]


def result_rows(result: LMResult, plan: MemoryPlan | None) -> list[tuple[str, str]]:
    """Return the names and values of the final table."""
    best = f"best step, {result.best_step}"
    if result.validation_loss is None:
        best = f"last step, {result.best_step}"
    losses = {
        "train loss": result.train_loss,
        f"validation loss of the {best}": result.validation_loss,
        f"test loss of the {best}": result.test_loss,
        "test loss without context": result.unigram_bits * math.log(2),
    }
    rows = [
        (name, f"{loss:.4f} nats, {loss / math.log(2):.3f} bits/byte")
        for name, loss in losses.items()
        if loss is not None
    ]
    rows += [
        ("parameters", str(result.num_params)),
        ("tokens/s", f"{result.tokens_per_second:.0f}"),
        ("time", f"{result.seconds:.0f} s"),
    ]
    if plan is not None:
        rows += [
            ("device memory on an H200", format_bytes(plan.peak_device_bytes)),
            ("host memory", format_bytes(plan.host.total)),
        ]
    return rows
