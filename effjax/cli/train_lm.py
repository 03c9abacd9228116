"""`effjax train lm`."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..train.lm.config import LMConfig
from . import options
from .distributed import end_all_on_error
from .fit import Fit, fit_decoder, text_choices
from .options import data_option, model_option, optimization_option, run_option
from .training import RunRequest, given_options, make_console, request_run, train

if TYPE_CHECKING:
    from rich.console import Console

    from ..memory import MemoryPlan


def train_lm(
    ctx: typer.Context,
    data: Annotated[
        str, data_option(help="pydoc (the help of Python), or text:PATH of a file or a folder.")
    ] = LMConfig.data,
    validation: Annotated[
        float,
        data_option(
            help="Bytes held out to select the best parameters: a share of the whole text, or a "
            "number."
        ),
    ] = LMConfig.validation,
    context: Annotated[
        int, data_option(help="Context length in bytes.", **options.SIZE)
    ] = LMConfig.context,
    layers: Annotated[
        int, model_option(help="Number of layers.", **options.SIZE)
    ] = LMConfig.layers,
    width: Annotated[
        int, model_option(help="Channels of each layer.", **options.SIZE)
    ] = LMConfig.width,
    heads: Annotated[int, model_option(help="Attention heads.", **options.SIZE)] = LMConfig.heads,
    offload: options.Offload = LMConfig.offload,
    fuse_update: options.FuseUpdate = LMConfig.fuse_update,
    policy: options.Policy = LMConfig.policy,
    num_microbatches: options.NumMicrobatches = LMConfig.num_microbatches,
    steps: Annotated[
        int, optimization_option(help="Steps to train.", **options.COUNT)
    ] = LMConfig.steps,
    report_every: Annotated[
        int,
        optimization_option(
            help="Steps between validations, each with a checkpoint.", **options.COUNT
        ),
    ] = LMConfig.report_every,
    batch_size: options.BatchSize = LMConfig.batch_size,
    learning_rate: options.LearningRate = LMConfig.learning_rate,
    weight_decay: options.WeightDecay = LMConfig.weight_decay,
    clip_norm: options.ClipNorm = LMConfig.clip_norm,
    dtype: options.DType = LMConfig.dtype,
    seed: options.Seed = LMConfig.seed,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = LMConfig.checkpoint_every,
    keep: options.Keep = LMConfig.keep,
    on_nan: options.OnNan = LMConfig.on_nan,
    mesh: options.Mesh = LMConfig.mesh,
    plan: Annotated[
        bool,
        run_option("--plan", help="Plan the memory of the step on an H200 at the end."),
    ] = False,
    fit: Fit = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a decoder on the bytes of a text, and test it on the last tenth of the text."""
    with end_all_on_error(heartbeat_timeout):
        request = request_run(ctx, LMConfig, changeable=["steps", "plan"])
        _train(fit_decoder(request, fit, given_options(ctx), text_choices), plan)


def _train(request: RunRequest, plan: bool) -> None:
    from ..train.lm.report import describe, result_rows
    from ..train.lm.task import prepare
    from ..train.report import print_line, print_table

    task, console = prepare(request.config), make_console()
    run, result = train(request, task, describe(task), console, "--offload all --fuse-update")
    memory = _plan(request.config, task.mesh.size, console) if plan and run.writes else None
    print_table(console, result_rows(result, memory))
    print_line(console, f"written: {run.path}")


def _plan(config: LMConfig, num_devices: int, console: "Console") -> "MemoryPlan | None":
    from ..memory import PlanError, plan
    from ..train.lm.model import lm_training_step
    from ..train.report import print_line
    from .user_steps import shorten

    print_line(console, "planning a step for an H200")
    try:
        return plan(*lm_training_step(config, num_devices if config.mesh else 1))
    except (PlanError, OSError) as error:  # OSError: the temporary folder is full
        print_line(console, f"not planned: {shorten(str(error))}")
        return None
