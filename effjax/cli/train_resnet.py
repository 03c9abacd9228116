"""`effjax train resnet`."""

import dataclasses
from typing import Annotated, Literal

import typer
from typer import Option

from ..train.errors import TrainError
from ..train.images.config import ResNetConfig
from . import options
from .distributed import end_all_on_error
from .options import MODEL
from .training import RunRequest, make_console, request_run, train_images


def train_resnet(
    ctx: typer.Context,
    data: options.ImageData = "digits",
    validation: options.Validation = 0.1,
    image_size: options.ImageSize = None,
    augment: options.Augment = None,
    flip: options.Flip = None,
    depth: Annotated[
        int,
        Option(
            help="Depth of the network: 18, 34, 50, 101, or 8 for small images.",
            rich_help_panel=MODEL,
        ),
    ] = 18,
    dcn: Annotated[
        Literal["none", "v1", "v2"],
        Option(
            help="Deformable 3×3 convolutions in all stages but the first.", rich_help_panel=MODEL
        ),
    ] = "none",
    compare_plain: Annotated[
        bool,
        Option(
            "--compare-plain",
            help="Also train the network without --dcn, in OUT-plain.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    small_inputs: options.SmallInputs = None,
    efficient: options.Efficient = True,
    save: options.Save = "conv",
    epochs: options.Epochs = 20,
    batch_size: options.BatchSize = 64,
    learning_rate: options.LearningRate = 0.1,
    schedule: options.Schedule = "cosine",
    momentum: options.Momentum = 0.9,
    weight_decay: options.WeightDecay = 1e-3,
    dtype: options.DType = "float32",
    parallel: options.Parallel = "jit",
    seed: options.Seed = 0,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = None,
    keep: options.Keep = 1,
    on_nan: options.OnNan = "stop",
    mesh: options.Mesh = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a ResNet with batch norm over all devices, and report its memory."""
    with end_all_on_error():
        request = request_run(ctx, ResNetConfig, changeable=["epochs", "compare_plain"])
        if not compare_plain:
            train_images(request)
        elif request.config.dcn == "none":
            raise TrainError("--compare-plain needs --dcn v1 or v2")
        else:
            _train_and_compare(request)


def _train_and_compare(request: RunRequest[ResNetConfig]) -> None:
    from ..train.processes import run_on_first

    deformable = train_images(request)
    path = request.path.with_name(f"{request.path.name}-plain")
    plain = train_images(
        dataclasses.replace(
            request,
            config=dataclasses.replace(request.config, dcn="none"),
            path=path,
            resume=request.resume and run_on_first((path / "config.json").exists),
        )
    )
    make_console().print(
        f"test accuracy: dcn {request.config.dcn} {deformable.test_accuracy:.2%}, "
        f"plain {plain.test_accuracy:.2%}",
        highlight=False,
    )
