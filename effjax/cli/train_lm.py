"""`effjax train lm`: options in, exit codes out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ..train.lm.config import LMConfig
from .options import DATA, MODEL, OPTIMIZATION, fail, no_other_option, one_line_errors, option

if TYPE_CHECKING:
    from ..memory import MemoryPlan
    from ..train.run_directory import RunDirectory


def train_lm(
    command: typer.Context,
    data: Annotated[
        str,
        option("pydoc (Python's own help), or text:PATH of a file or a folder.", DATA),
    ] = LMConfig.data,
    context: Annotated[
        int, option("Bytes that a prediction can look at.", DATA)
    ] = LMConfig.context,
    layers: Annotated[int, option("Blocks of attention and MLP.", MODEL)] = LMConfig.layers,
    width: Annotated[int, option("Channels of each layer.", MODEL)] = LMConfig.width,
    heads: Annotated[int, option("Heads that share the width.", MODEL)] = LMConfig.heads,
    bias: Annotated[
        bool, option("Biases, and LayerNorm instead of RMSNorm.", MODEL)
    ] = LMConfig.bias,
    dropout: Annotated[
        float, option("Dropout of what each half of a layer adds.", MODEL)
    ] = LMConfig.dropout,
    remat: Annotated[
        bool, option("Compute each layer again in the backward pass.", MODEL)
    ] = LMConfig.remat,
    offload: Annotated[
        Literal["none", "activations", "params", "all"],
        option("What lives in host memory: the layers' inputs, their parameters, or both.", MODEL),
    ] = LMConfig.offload,
    fuse_update: Annotated[
        bool, option("Update each layer within the backward pass.", MODEL)
    ] = LMConfig.fuse_update,
    num_microbatches: Annotated[
        int, option("Parts of a batch that go through a layer while it is loaded.", MODEL)
    ] = LMConfig.num_microbatches,
    steps: Annotated[int, option("Batches to train on.", OPTIMIZATION)] = LMConfig.steps,
    batch_size: Annotated[
        int, option("Windows of text of a step, over all devices.", OPTIMIZATION)
    ] = LMConfig.batch_size,
    learning_rate: Annotated[
        float, option("Adam's rate after the warmup; cosine to a tenth.", OPTIMIZATION)
    ] = LMConfig.learning_rate,
    weight_decay: Annotated[
        float, option("Of kernels; norms, biases, embedding are not decayed.", OPTIMIZATION)
    ] = LMConfig.weight_decay,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        option("Of the computation; parameters are float32.", OPTIMIZATION),
    ] = LMConfig.dtype,
    report_every: Annotated[
        int, option("Steps from one test and checkpoint to the next.")
    ] = LMConfig.report_every,
    seed: Annotated[int, option("Of parameters, order, dropout.")] = LMConfig.seed,
    out: Annotated[Path | None, option("Run directory. (default: runs/lm-DATE-TIME)")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
    resume: Annotated[
        Path | None, option("Go on with this run from its last checkpoint, options as they were.")
    ] = None,
) -> None:
    """Train a transformer on the bytes of a text, and test it on the text's last tenth."""
    given = dict(command.params)
    out, overwrite, resume = given.pop("out"), given.pop("overwrite"), given.pop("resume")
    with one_line_errors("--remat, or --offload all"):
        from ..train.run_directory import RunDirectory, unused

        if resume is None:
            run_lm(LMConfig(**given), unused("lm") if out is None else out, overwrite)
        else:
            no_other_option(command)
            run = RunDirectory.open(resume)
            run_lm(LMConfig.from_json(run.config.get("options")), resume=run)


def run_lm(
    config: LMConfig,
    out: Path | None = None,
    overwrite: bool = False,
    resume: "RunDirectory | None" = None,
) -> None:
    """Checks everything, then writes."""
    from ..train.lm.report import announce, make_progress, show_result
    from ..train.lm.task import prepare
    from ..train.loop import fit
    from ..train.run_directory import RunDirectory

    console = Console()
    task = prepare(config)
    run = resume or RunDirectory.create(out, task.describe(), overwrite)
    announce(console, task, run)
    try:
        result = fit(task, run, make_progress(console, task), resume=resume is not None)
    except KeyboardInterrupt:
        fail(f"interrupted; go on with effjax train lm --resume {run.path}", 130)
    show_result(console, run, result, _planned(config))


def _planned(config: LMConfig) -> "MemoryPlan | None":
    """What a step needs on an H200; None where the planner's compiler is not installed."""
    from ..memory import PlanError, plan
    from ..train.lm.forms import lm_training_step

    try:
        return plan(*lm_training_step(config))
    except PlanError:
        return None
