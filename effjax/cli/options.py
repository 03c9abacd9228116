"""Options that several commands share, as annotated types, and the layout of their help."""

import functools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer.core
from typer import Option

# Options of one panel of the help.
data_option = functools.partial(Option, rich_help_panel="Data")
model_option = functools.partial(Option, rich_help_panel="Model")
optimization_option = functools.partial(Option, rich_help_panel="Optimization")
run_option = functools.partial(Option, rich_help_panel="Run")
process_option = functools.partial(Option, rich_help_panel="Several processes")

# Bounds of integers, above which JAX raises obscure errors or ends the process. The products of a
# few sizes, such as the shape of a kernel, must fit in 64 bits.
MAX_SIZE, MAX_COUNT = 2**20, 2**31 - 1
SIZE: dict[str, Any] = {"min": 1, "max": MAX_SIZE}  # of an image, a layer or a network
COUNT: dict[str, Any] = {"min": 1, "max": MAX_COUNT}  # of steps or examples

BatchSize = Annotated[
    int,
    optimization_option(help="Examples per step, over all devices.", **COUNT),
]
LearningRate = Annotated[float, optimization_option(help="Largest learning rate.")]
WeightDecay = Annotated[
    float, optimization_option(help="Weight decay of kernels. Norms and biases have none.")
]
DType = Annotated[
    Literal["float32", "bfloat16"],
    optimization_option(help="Dtype of the computation. Parameters are float32."),
]
Seed = Annotated[
    int,
    optimization_option(
        help="Seed of parameters, order, augmentation and dropout.", min=0, max=2**32 - 1
    ),
]

# Options of all commands that train a decoder.
Offload = Annotated[
    Literal["none", "activations", "params", "all"],
    model_option(
        help="Arrays in host memory: the residuals of the layers, parameters and optimizer state, "
        "or both."
    ),
]
FuseUpdate = Annotated[
    bool,
    model_option(
        help="Update each layer during the backward pass. Gradients are then clipped by the norm "
        "of the previous step."
    ),
]
Policy = Annotated[
    Literal["recompute", "dots", "everything"],
    model_option(
        help="Residuals of a layer: its input only, also the matrix products, or everything. The "
        "rest is recomputed in the backward pass."
    ),
]
NumMicrobatches = Annotated[
    int,
    model_option(
        help="Parts that the batch is split into. A layer is loaded once for all of them.", **SIZE
    ),
]
ClipNorm = Annotated[
    float, optimization_option(help="Largest norm of the gradients. 0 disables clipping.")
]

Out = Annotated[Path | None, run_option(help="Run directory. (default: runs/COMMAND-DATE-TIME)")]
Overwrite = Annotated[bool, run_option("--overwrite", help="Replace the run in --out.")]
Resume = Annotated[
    Path | None,
    run_option(
        help="Continue this run after its last intact checkpoint. Only its length, the places of "
        "its files, --checkpoint-every, --keep, --on-nan and --mesh can change."
    ),
]
CheckpointEvery = Annotated[
    int | None,
    run_option(help="Also write a checkpoint every so many steps.", **COUNT),
]
Keep = Annotated[
    int,
    run_option(
        help="Number of most recent evaluated checkpoints to keep, besides the best one.",
        **COUNT,
    ),
]
OnNan = Annotated[
    Literal["stop", "skip"],
    run_option(help="At a loss or gradients that are not finite, stop, or skip the step."),
]
Mesh = Annotated[
    str | None,
    run_option(
        help="Devices by axis, such as data=2,fsdp=4; fsdp shards the parameters. (default: all "
        "devices on the data axis)"
    ),
]

Distributed = Annotated[
    bool,
    process_option(
        "--distributed", help="Join the processes that SLURM, Open MPI or Kubernetes started."
    ),
]
Coordinator = Annotated[str | None, process_option(help="HOST:PORT of process 0.")]
NumProcesses = Annotated[int | None, process_option(help="Number of processes.", **SIZE)]
ProcessId = Annotated[
    int | None, process_option(help="Number of this process, from 0.", min=0, max=MAX_SIZE)
]
HeartbeatTimeout = Annotated[
    int,
    process_option(help="Seconds of silence after which a process counts as dead.", **COUNT),
]

NAME_WIDTH = 30  # of the first column of the help


class Command(typer.core.TyperCommand):
    """A command whose help has the same two columns in all panels.

    Typer chooses the columns of each panel separately, and truncates long names.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Column, Table
        from rich.text import Text

        panels: dict[str, Table] = {}
        for param in self.get_params(ctx):
            names, text = param.get_help_record(ctx) or ("", "")
            title = getattr(param, "rich_help_panel", None) or "Options"
            if title not in panels:
                panels[title] = Table.grid(Column(width=NAME_WIDTH), Column(), padding=(0, 2, 0, 0))
            text = text.replace("[default: ", "[default:\N{NO-BREAK SPACE}")
            text = re.sub(f"1<=x<=({MAX_SIZE}|{MAX_COUNT})", "x>=1", text)
            panels[title].add_row(Text(names.replace(" range>", ">")), Text(text))
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        console = Console()
        with console.capture() as output:
            for title, table in panels.items():
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        formatter.write(f"\n{output.get()}")
