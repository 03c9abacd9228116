"""Options that several commands share, as annotated types, and the layout of their help."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer.core
from typer import Option

DATA, MODEL, OPTIMIZATION, RUN = "Data", "Model", "Optimization", "Run"
PROCESSES = "Several processes"

# Data
Validation = Annotated[
    float,
    Option(
        help="Part of the train set that selects the best parameters: a share, or a number of "
        "examples.",
        rich_help_panel=DATA,
    ),
]
ImageData = Annotated[
    str,
    Option(
        help="digits, rotated-digits, cifar10:PATH, cifar100:PATH or folder:PATH.",
        rich_help_panel=DATA,
    ),
]
ImageSize = Annotated[
    int | None,
    Option(help="Resize the images of a folder to this side.", min=1, rich_help_panel=DATA),
]
Augment = Annotated[
    bool | None,
    Option(help="Crop at random, and flip if --flip. (default: on)", rich_help_panel=DATA),
]
Flip = Annotated[
    bool | None,
    Option(
        help="Flip at random when augmenting. (default: on, except for digits)",
        rich_help_panel=DATA,
    ),
]

# Model
SmallInputs = Annotated[
    bool | None,
    Option(help="Use a stem without pooling. (default: up to 64×64 pixels)", rich_help_panel=MODEL),
]
Efficient = Annotated[
    bool,
    Option(help="Recompute in the backward pass instead of keeping.", rich_help_panel=MODEL),
]
Save = Annotated[
    Literal["conv", "features"],
    Option(
        help="What efficient blocks keep for the backward pass: conv is faster, features is "
        "smaller.",
        rich_help_panel=MODEL,
    ),
]

# Optimization
Epochs = Annotated[
    int, Option(help="Passes over the train set.", min=1, rich_help_panel=OPTIMIZATION)
]
BatchSize = Annotated[
    int,
    Option(help="Examples per step, over all devices.", min=1, rich_help_panel=OPTIMIZATION),
]
LearningRate = Annotated[float, Option(help="Largest learning rate.", rich_help_panel=OPTIMIZATION)]
Schedule = Annotated[
    Literal["cosine", "step"],
    Option(
        help="Learning rate: cosine to 0, or a tenth after 1/2 and again after 3/4 of the run.",
        rich_help_panel=OPTIMIZATION,
    ),
]
Momentum = Annotated[float, Option(help="Nesterov momentum of SGD.", rich_help_panel=OPTIMIZATION)]
WeightDecay = Annotated[
    float,
    Option(
        help="Weight decay of kernels. Norms and biases have none.",
        rich_help_panel=OPTIMIZATION,
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16"],
    Option(help="Dtype of the computation. Parameters are float32.", rich_help_panel=OPTIMIZATION),
]
Seed = Annotated[
    int,
    Option(
        help="Seed of parameters, order, augmentation and dropout.",
        min=0,
        max=2**32 - 1,
        rich_help_panel=OPTIMIZATION,
    ),
]

# Run
Out = Annotated[
    Path | None,
    Option(help="Run directory. (default: runs/COMMAND-DATE-TIME)", rich_help_panel=RUN),
]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace the run in --out.", rich_help_panel=RUN)
]
Resume = Annotated[
    Path | None,
    Option(
        help="Continue this run after its last intact checkpoint. Only its length, "
        "--checkpoint-every, --keep, --on-nan and --mesh can change.",
        rich_help_panel=RUN,
    ),
]
CheckpointEvery = Annotated[
    int | None,
    Option(help="Also write a checkpoint every so many steps.", min=1, rich_help_panel=RUN),
]
Keep = Annotated[
    int,
    Option(
        help="Number of last checkpoints to keep, in addition to the best one.",
        min=1,
        rich_help_panel=RUN,
    ),
]
OnNan = Annotated[
    Literal["stop", "skip"],
    Option(
        help="At a loss or gradients that are not finite, stop, or skip the step.",
        rich_help_panel=RUN,
    ),
]
Mesh = Annotated[
    str | None,
    Option(
        help="Devices by axis, such as data=2,fsdp=4; fsdp shards the parameters. (default: all "
        "on data)",
        rich_help_panel=RUN,
    ),
]
Parallel = Annotated[
    Literal["jit", "shard_map", "pmap"],
    Option(help="How the step is distributed over the devices.", rich_help_panel=OPTIMIZATION),
]

# Several processes
Distributed = Annotated[
    bool,
    Option(
        "--distributed",
        help="Join the processes that SLURM, Open MPI or Kubernetes started.",
        rich_help_panel=PROCESSES,
    ),
]
Coordinator = Annotated[
    str | None, Option(help="HOST:PORT of process 0.", rich_help_panel=PROCESSES)
]
NumProcesses = Annotated[
    int | None, Option(help="Number of processes.", min=1, rich_help_panel=PROCESSES)
]
ProcessId = Annotated[
    int | None,
    Option(help="Number of this process, from 0.", min=0, rich_help_panel=PROCESSES),
]
HeartbeatTimeout = Annotated[
    int,
    Option(
        help="Seconds of silence after which a process counts as dead.",
        min=1,
        rich_help_panel=PROCESSES,
    ),
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
            panels[title].add_row(Text(names.replace(" range>", ">")), Text(text))
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        console = Console()
        with console.capture() as output:
            for title, table in panels.items():
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        formatter.write(f"\n{output.get()}")
