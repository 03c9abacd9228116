"""`effjax train densenet`."""

from typing import Annotated

import typer
from typer import Option

from ..train.images.config import DenseNetConfig
from . import options
from .distributed import end_all_on_error
from .options import MODEL
from .training import request_run, train_images


def train_densenet(
    ctx: typer.Context,
    data: options.ImageData = "digits",
    validation: options.Validation = 0.1,
    image_size: options.ImageSize = None,
    augment: options.Augment = None,
    flip: options.Flip = None,
    model: Annotated[
        str,
        Option(help="densenet-bc, or a network such as densenet121.", rich_help_panel=MODEL),
    ] = "densenet-bc",
    depth: Annotated[
        int | None,
        Option(help="Depth of densenet-bc, 6n + 4. (default: 22)", rich_help_panel=MODEL),
    ] = None,
    growth_rate: Annotated[
        int | None,
        Option(
            help="Channels that each layer adds. (default: 12, or that of --model)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    compression: Annotated[
        float | None,
        Option(
            help="Share of the channels that a transition keeps. (default: 0.5)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    bn_size: Annotated[
        int | None,
        Option(
            help="Width of the bottleneck, in growth rates. (default: 4)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    drop_rate: Annotated[
        float, Option(help="Dropout rate of each layer's output.", rich_help_panel=MODEL)
    ] = 0.0,
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
    """Train a DenseNet-BC with batch norm over all devices, and report its memory."""
    with end_all_on_error():
        train_images(request_run(ctx, DenseNetConfig, changeable=["epochs"]))
