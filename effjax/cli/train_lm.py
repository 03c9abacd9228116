"""`effjax train lm`."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from ..train.lm.config import LMConfig
from . import options
from .distributed import end_all_on_error
from .options import DATA, MODEL, OPTIMIZATION, RUN
from .training import RunRequest, make_console, request_run, train

if TYPE_CHECKING:
    from rich.console import Console

    from ..memory import MemoryPlan


def train_lm(
    ctx: typer.Context,
    data: Annotated[
        str,
        Option(
            help="pydoc (the help of Python), or text:PATH of a file or a folder.",
            rich_help_panel=DATA,
        ),
    ] = "pydoc",
    validation: options.Validation = 0.1,
    context: Annotated[
        int,
        Option(help="Bytes that a prediction depends on.", min=1, rich_help_panel=DATA),
    ] = 128,
    init_from: Annotated[
        str | None,
        Option(
            help="Start with the best weights of this run. (default: random weights)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    lora: Annotated[
        int | None,
        Option(
            help="Train only low-rank matrices of this rank, added to the kernels of the layers. "
            "(default: train all)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    layers: Annotated[
        int, Option(help="Blocks of attention and MLP.", min=1, rich_help_panel=MODEL)
    ] = 4,
    width: Annotated[
        int, Option(help="Channels of each layer.", min=1, rich_help_panel=MODEL)
    ] = 128,
    heads: Annotated[int, Option(help="Attention heads.", min=1, rich_help_panel=MODEL)] = 4,
    bias: Annotated[
        bool,
        Option(help="Use biases, and LayerNorm instead of RMSNorm.", rich_help_panel=MODEL),
    ] = False,
    dropout: Annotated[
        float,
        Option(help="Dropout rate after attention and MLP.", rich_help_panel=MODEL),
    ] = 0.0,
    remat: Annotated[
        bool, Option(help="Recompute each layer in the backward pass.", rich_help_panel=MODEL)
    ] = False,
    offload: Annotated[
        Literal["none", "activations", "params", "all"],
        Option(
            help="Arrays in host memory: the inputs of the layers, their parameters, or both.",
            rich_help_panel=MODEL,
        ),
    ] = "none",
    fuse_update: Annotated[
        bool,
        Option(help="Update each layer during the backward pass.", rich_help_panel=MODEL),
    ] = False,
    policy: Annotated[
        Literal["recompute", "dots", "everything"],
        Option(
            help="Residuals of layers with --offload or --fuse-update, in addition to their input.",
            rich_help_panel=MODEL,
        ),
    ] = "recompute",
    num_microbatches: Annotated[
        int,
        Option(
            help="Parts of the batch that go through a layer while it is loaded.",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = 1,
    steps: Annotated[
        int, Option(help="Steps to train.", min=1, rich_help_panel=OPTIMIZATION)
    ] = 300,
    report_every: Annotated[
        int,
        Option(
            help="Steps between validations, each with a checkpoint.",
            min=1,
            rich_help_panel=OPTIMIZATION,
        ),
    ] = 100,
    batch_size: options.BatchSize = 8,
    learning_rate: options.LearningRate = 3e-3,
    weight_decay: options.WeightDecay = 0.1,
    dtype: options.DType = "float32",
    seed: options.Seed = 0,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = None,
    keep: options.Keep = 1,
    on_nan: options.OnNan = "stop",
    mesh: options.Mesh = None,
    plan: Annotated[
        bool,
        Option(
            "--plan", help="Plan the memory of the step on an H200 at the end.", rich_help_panel=RUN
        ),
    ] = False,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a transformer on the bytes of a text, and test it on the last tenth of the text."""
    with end_all_on_error():
        _train(request_run(ctx, LMConfig, changeable=["steps", "plan"]), plan)


def _train(request: RunRequest[LMConfig], plan: bool) -> None:
    from ..train.lm import report
    from ..train.lm.task import prepare

    task, console = prepare(request.config, resume=request.resume), make_console()
    if task.base is not None:
        task.base.check_apart(request.path)
    run, result = train(request, task, report, console, saver="--remat, or --offload all")
    memory = _plan(request.config, task.mesh.size, console) if plan and run.writes else None
    report.show_result(console, run, result, memory)


def _plan(config: LMConfig, num_devices: int, console: "Console") -> "MemoryPlan | None":
    from ..memory import PlanError, plan
    from ..train.lm.forms import lm_training_step
    from ..train.report import print_line

    print_line(console, "planning a step for an H200")
    try:
        return plan(*lm_training_step(config, num_devices if config.mesh else 1))
    except (PlanError, OSError) as error:  # OSError: the temporary folder is full
        print_line(console, f"not planned: {error}")
        return None
