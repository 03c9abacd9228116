"""`effjax finetune`."""

from typing import Annotated, Literal

import typer
from typer import Argument

from ..train.errors import TrainError
from ..train.finetune.config import FULL_RATE, LORA_RATE, FinetuneConfig
from . import options
from .distributed import end_all_on_error
from .fit import Fit, finetune_choices, fit_decoder
from .options import data_option, model_option, optimization_option
from .training import RunRequest, given_options, make_console, request_run, train


def finetune(
    ctx: typer.Context,
    checkpoint: Annotated[
        str | None,
        Argument(
            help="Folder of a Llama, Mistral or Qwen model in Hugging Face's layout: config.json, "
            "tokenizer.json and .safetensors files."
        ),
    ] = None,
    data: Annotated[
        str | None,
        data_option(
            help="A file with a JSON object in each line: `messages`, `prompt` and `completion`, "
            "or `text`."
        ),
    ] = None,
    validation: Annotated[
        float,
        data_option(
            help="Rows held out to select the best parameters: a share, or a number. 0 for none."
        ),
    ] = FinetuneConfig.validation,
    validation_data: Annotated[
        str | None, data_option(help="A second file, whose rows are the validation rows.")
    ] = FinetuneConfig.validation_data,
    max_length: Annotated[
        int,
        data_option(help="Tokens of a sequence. Longer conversations are cut.", **options.SIZE),
    ] = FinetuneConfig.max_length,
    packing: Annotated[
        bool,
        data_option(
            help="Put several sequences into a row. Tokens attend to their own sequence only."
        ),
    ] = FinetuneConfig.packing,
    date: Annotated[
        str | None,
        data_option(help="Date that chat templates write, as in 2026-01-31. (default: today)"),
    ] = FinetuneConfig.date,
    lora: Annotated[
        int | None,
        model_option(
            help="Train only adapters of this rank, of all linear layers. (default: train all)",
            **options.SIZE,
        ),
    ] = FinetuneConfig.lora,
    lora_alpha: Annotated[
        float | None,
        model_option(
            help="The product of adapters is multiplied by alpha / rank. (default: 2 · rank)"
        ),
    ] = FinetuneConfig.lora_alpha,
    param_dtype: Annotated[
        Literal["bfloat16", "float32"],
        model_option(
            help="Dtype of the parameters. Updated bfloat16 parameters are rounded stochastically."
        ),
    ] = FinetuneConfig.param_dtype,
    offload: options.Offload = FinetuneConfig.offload,
    fuse_update: options.FuseUpdate = FinetuneConfig.fuse_update,
    policy: options.Policy = FinetuneConfig.policy,
    num_microbatches: options.NumMicrobatches = FinetuneConfig.num_microbatches,
    mlp_chunk_size: Annotated[
        int | None,
        model_option(
            help="Positions that an MLP processes at a time. (default: all)", **options.COUNT
        ),
    ] = FinetuneConfig.mlp_chunk_size,
    epochs: Annotated[
        int, optimization_option(help="Passes over the rows.", **options.COUNT)
    ] = FinetuneConfig.epochs,
    steps: Annotated[
        int | None,
        optimization_option(help="Steps to train. (default: those of --epochs)", **options.COUNT),
    ] = FinetuneConfig.steps,
    report_every: Annotated[
        int | None,
        optimization_option(
            help="Steps between validations, each with a checkpoint. (default: an epoch)",
            **options.COUNT,
        ),
    ] = FinetuneConfig.report_every,
    batch_size: Annotated[
        int,
        optimization_option(
            help="Rows of --max-length tokens per step, over all devices.", **options.COUNT
        ),
    ] = FinetuneConfig.batch_size,
    optimizer: Annotated[
        Literal["adamw", "adamw8bit"],
        optimization_option(help="AdamW with moments in 32 or in 8 bits."),
    ] = FinetuneConfig.optimizer,
    learning_rate: Annotated[
        float | None,
        optimization_option(
            help=f"Largest learning rate. (default: {FULL_RATE:g}, or {LORA_RATE:g} with --lora)"
        ),
    ] = None,
    warmup: Annotated[
        float,
        optimization_option(
            help="Share of the steps in which the learning rate grows. It then falls as a cosine."
        ),
    ] = FinetuneConfig.warmup,
    weight_decay: Annotated[
        float,
        optimization_option(help="Weight decay of linear layers. Norms and embeddings have none."),
    ] = FinetuneConfig.weight_decay,
    clip_norm: options.ClipNorm = FinetuneConfig.clip_norm,
    dtype: Annotated[
        Literal["float32", "bfloat16"], optimization_option(help="Dtype of the computation.")
    ] = FinetuneConfig.dtype,
    seed: Annotated[
        int,
        optimization_option(
            help="Seed of the order, adapters and stochastic rounding.", min=0, max=2**32 - 1
        ),
    ] = FinetuneConfig.seed,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = FinetuneConfig.checkpoint_every,
    keep: options.Keep = FinetuneConfig.keep,
    on_nan: options.OnNan = FinetuneConfig.on_nan,
    mesh: options.Mesh = FinetuneConfig.mesh,
    fit: Fit = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a language model from its checkpoint on rows of JSON.

    At the end, RUN/model holds the best parameters in Hugging Face's layout. With --lora,
    RUN/adapter holds the adapters in PEFT's layout.
    """
    if resume is None and not (checkpoint and data):
        missing = "--data" if checkpoint else "CHECKPOINT"
        raise TrainError(f"{missing} is missing. Use effjax finetune CHECKPOINT --data FILE.jsonl.")
    with end_all_on_error(heartbeat_timeout):
        request = request_run(ctx, FinetuneConfig, changeable=["steps"])
        _train(fit_decoder(request, fit, given_options(ctx), finetune_choices))


def _train(request: RunRequest) -> None:
    from ..train.finetune.report import describe, result_rows
    from ..train.finetune.task import prepare
    from ..train.report import LoadBar, print_line, print_table

    console = make_console()
    with LoadBar(console) as load_bar:
        task = prepare(request.config, load_progress=load_bar.update, resume=request.resume)
        run, result = train(request, task, describe(task), console, "--fit, or --offload all")
    print_table(console, result_rows(result))
    print_line(console, f"written: {run.path / result.exported}")
