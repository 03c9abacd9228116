"""`effjax train densenet` and `effjax train resnet`."""

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..train.errors import TrainError
from ..train.images.config import DenseNetConfig, ResNetConfig
from . import options
from .distributed import end_all_on_error
from .fit import Fit, fit_config, image_choices
from .options import data_option, model_option, optimization_option
from .training import RunRequest, given_options, make_console, request_run, train

if TYPE_CHECKING:
    from ..train.images.task import ImageResult

Data = Annotated[
    str, data_option(help="digits, rotated-digits, cifar10:PATH, cifar100:PATH or folder:PATH.")
]
Validation = Annotated[
    float,
    data_option(
        help="Images held out to select the best parameters: a share of the train set, or a number."
    ),
]
ImageSize = Annotated[
    int | None,
    data_option(help="Resize the images of a folder to this side.", **options.SIZE),
]
Normalize = Annotated[
    Literal["data", "imagenet"] | None,
    data_option(
        help="Normalize pixels by the mean and standard deviation of the train set or of ImageNet. "
        "(default: data, or imagenet with --init-from)"
    ),
]
Augment = Annotated[
    bool | None, data_option(help="Crop at random, and flip if --flip. (default: on)")
]
Flip = Annotated[
    bool | None,
    data_option(help="Flip at random when augmenting. (default: on, except for digits)"),
]
InitFrom = Annotated[
    str | None,
    model_option(
        help="Start with the weights of this file: torchvision's .pth, .safetensors, or the output "
        "of effjax convert. If the classes differ, the head is new. (default: random weights)"
    ),
]
FreezeStages = Annotated[
    int | None,
    model_option(
        help="With --init-from, do not train the stem and so many stages, and keep the statistics "
        "of their norms. (default: train all)",
        min=0,
        max=options.MAX_SIZE,
    ),
]
SmallInputs = Annotated[
    bool | None,
    model_option(
        help="Use a stem without pooling. (default: up to 64×64 pixels, or that of --init-from)"
    ),
]
Efficient = Annotated[
    bool, model_option(help="Save memory: recompute activations in the backward pass.")
]
Save = Annotated[
    Literal["conv", "features"],
    model_option(
        help="With --efficient, conv keeps outputs of convolutions for the backward pass, and "
        "features recomputes them: slower, less memory."
    ),
]
Epochs = Annotated[int, optimization_option(help="Passes over the train set.", **options.COUNT)]
Schedule = Annotated[
    Literal["cosine", "step"],
    optimization_option(
        help="Learning rate: cosine to 0, or a tenth after 1/2 and again after 3/4 of the run."
    ),
]
Momentum = Annotated[float, optimization_option(help="Nesterov momentum of SGD.")]
Parallel = Annotated[
    Literal["jit", "shard_map", "pmap"],
    optimization_option(help="How the step is distributed over the devices."),
]


def train_densenet(
    ctx: typer.Context,
    data: Data = DenseNetConfig.data,
    validation: Validation = DenseNetConfig.validation,
    image_size: ImageSize = DenseNetConfig.image_size,
    normalize: Normalize = DenseNetConfig.normalize,
    augment: Augment = DenseNetConfig.augment,
    flip: Flip = DenseNetConfig.flip,
    model: Annotated[
        str, model_option(help="densenet-bc, or a network such as densenet121.")
    ] = DenseNetConfig.model,
    depth: Annotated[
        int | None,
        model_option(help="Depth of densenet-bc, 6n + 4. (default: 22)", **options.SIZE),
    ] = DenseNetConfig.depth,
    growth_rate: Annotated[
        int | None,
        model_option(
            help="Channels that each layer adds. (default: 12, or that of --model)",
            **options.SIZE,
        ),
    ] = DenseNetConfig.growth_rate,
    compression: Annotated[
        float | None,
        model_option(help="Share of the channels that a transition keeps. (default: 0.5)"),
    ] = DenseNetConfig.compression,
    bn_size: Annotated[
        int | None,
        model_option(
            help="Width of the bottleneck, in growth rates. (default: 4)",
            **options.SIZE,
        ),
    ] = DenseNetConfig.bn_size,
    drop_rate: Annotated[
        float, model_option(help="Dropout rate of each layer's output.")
    ] = DenseNetConfig.drop_rate,
    init_from: InitFrom = DenseNetConfig.init_from,
    freeze_stages: FreezeStages = DenseNetConfig.freeze_stages,
    small_inputs: SmallInputs = DenseNetConfig.small_inputs,
    efficient: Efficient = DenseNetConfig.efficient,
    save: Save = DenseNetConfig.save,
    epochs: Epochs = DenseNetConfig.epochs,
    batch_size: options.BatchSize = DenseNetConfig.batch_size,
    learning_rate: options.LearningRate = DenseNetConfig.learning_rate,
    schedule: Schedule = DenseNetConfig.schedule,
    momentum: Momentum = DenseNetConfig.momentum,
    weight_decay: options.WeightDecay = DenseNetConfig.weight_decay,
    dtype: options.DType = DenseNetConfig.dtype,
    parallel: Parallel = DenseNetConfig.parallel,
    seed: options.Seed = DenseNetConfig.seed,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = DenseNetConfig.checkpoint_every,
    keep: options.Keep = DenseNetConfig.keep,
    on_nan: options.OnNan = DenseNetConfig.on_nan,
    mesh: options.Mesh = DenseNetConfig.mesh,
    fit: Fit = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a DenseNet-BC with batch norm over all devices, and report its memory."""
    with end_all_on_error(heartbeat_timeout):
        request = request_run(ctx, DenseNetConfig, changeable=["epochs"])
        _train(_fit(request, fit, given_options(ctx)))


def train_resnet(
    ctx: typer.Context,
    data: Data = ResNetConfig.data,
    validation: Validation = ResNetConfig.validation,
    image_size: ImageSize = ResNetConfig.image_size,
    normalize: Normalize = ResNetConfig.normalize,
    augment: Augment = ResNetConfig.augment,
    flip: Flip = ResNetConfig.flip,
    model: Annotated[
        str | None,
        model_option(help="A network such as resnext50_32x4d. (default: the ResNet of --depth)"),
    ] = ResNetConfig.model,
    depth: Annotated[
        int, model_option(help="Depth of the network: 18, 34, 50, 101, 152, or 8 for small images.")
    ] = ResNetConfig.depth,
    dcn: Annotated[
        Literal["none", "v1", "v2"],
        model_option(help="Deformable 3×3 convolutions in all stages but the first."),
    ] = ResNetConfig.dcn,
    compare_plain: Annotated[
        bool,
        model_option("--compare-plain", help="Also train the network without --dcn, in OUT-plain."),
    ] = False,
    init_from: InitFrom = ResNetConfig.init_from,
    freeze_stages: FreezeStages = ResNetConfig.freeze_stages,
    small_inputs: SmallInputs = ResNetConfig.small_inputs,
    efficient: Efficient = ResNetConfig.efficient,
    save: Save = ResNetConfig.save,
    epochs: Epochs = ResNetConfig.epochs,
    batch_size: options.BatchSize = ResNetConfig.batch_size,
    learning_rate: options.LearningRate = ResNetConfig.learning_rate,
    schedule: Schedule = ResNetConfig.schedule,
    momentum: Momentum = ResNetConfig.momentum,
    weight_decay: options.WeightDecay = ResNetConfig.weight_decay,
    dtype: options.DType = ResNetConfig.dtype,
    parallel: Parallel = ResNetConfig.parallel,
    seed: options.Seed = ResNetConfig.seed,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    checkpoint_every: options.CheckpointEvery = ResNetConfig.checkpoint_every,
    keep: options.Keep = ResNetConfig.keep,
    on_nan: options.OnNan = ResNetConfig.on_nan,
    mesh: options.Mesh = ResNetConfig.mesh,
    fit: Fit = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    heartbeat_timeout: options.HeartbeatTimeout = 100,
) -> None:
    """Train a ResNet with batch norm over all devices, and report its memory."""
    with end_all_on_error(heartbeat_timeout):
        request = request_run(ctx, ResNetConfig, changeable=["epochs", "compare_plain"])
        request = _fit(request, fit, given_options(ctx))
        if compare_plain:
            _train_and_compare(request)
        else:
            _train(request)


def _fit(request: RunRequest, fit: str | None, given: Collection[str]) -> RunRequest:
    """Choose the options that `--fit` asks for. They depend on the shape of the images."""
    if fit is None:
        return request
    from ..train.images.task import prepare

    task = prepare(request.config)
    dataset, size = task.dataset, task.mesh.size
    choices = image_choices(dataset.image_shape, len(dataset.class_names), size)
    # With --init-from, some options depend on the file.
    config = fit_config(task.config, given, fit, choices, size, make_console())
    return dataclasses.replace(request, config=config)


def _train(request: RunRequest) -> "ImageResult":
    from ..train.images.report import describe, result_rows
    from ..train.images.task import prepare
    from ..train.report import print_line, print_table

    # This checks all options and data. Nothing is written before.
    task, console = prepare(request.config, resume=request.resume), make_console()
    run, result = train(request, task, describe(task), console, memory_options="--save features")
    print_table(console, result_rows(task, result))
    print_line(console, f"written: {run.path}")
    return result


def _train_and_compare(request: RunRequest) -> None:
    from ..train.processes import run_on_first

    dcn = request.config.dcn
    if dcn == "none":
        raise TrainError("--compare-plain needs --dcn v1 or v2.")
    deformable = _train(request)
    path = request.path.with_name(f"{request.path.name}-plain")
    config = dataclasses.replace(request.config, dcn="none")
    resume = request.resume and run_on_first((path / "config.json").exists)
    plain = _train(RunRequest(config, path, request.overwrite, resume))
    make_console().print(
        f"test accuracy: dcn {dcn} {deformable.test_accuracy:.2%}, plain {plain.test_accuracy:.2%}",
        highlight=False,
    )
