"""`effjax memory`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..train.errors import TrainError
from ..train.images.config import DenseNetConfig, ResNetConfig
from ..train.lm.config import LMConfig
from .errors import CommandError
from .options import MODEL
from .own_steps import own_steps, said, shortened

if TYPE_CHECKING:
    from .plans import Steps

# The options of each kind of model, apart from --dtype and --mesh, which both have.
IMAGE_OPTIONS = ("depth", "growth_rate", "image_size", "num_classes")
TEXT_OPTIONS = ("layers", "width", "context", "lora", "num_microbatches", "policy")

IMAGENET = (224, 1000)  # side and classes
CIFAR = (32, 10)


def memory(
    ctx: typer.Context,
    model: Annotated[
        str,
        Argument(
            help="densenet, densenet121, …, resnet50, …, lm, or MODULE:FUNCTION of your own, which "
            "takes a batch size and returns (fun, *args), or a dict of such by name."
        ),
    ],
    depth: Annotated[
        int | None, Option(help="Depth of densenet. (default: 22)", min=1, rich_help_panel=MODEL)
    ] = None,
    growth_rate: Annotated[
        int | None,
        Option(
            help="Channels that each layer adds. (default: 12, or that of the model)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        Option(
            help="Side of the images. (default: 32, or 224 for ImageNet's models)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    num_classes: Annotated[
        int | None,
        Option(
            help="Classes. (default: 10, or 1000 for ImageNet's models)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    layers: Annotated[
        int | None, Option(help="Layers of lm. (default: 4)", min=1, rich_help_panel=MODEL)
    ] = None,
    width: Annotated[
        int | None, Option(help="Channels of lm. (default: 128)", min=1, rich_help_panel=MODEL)
    ] = None,
    context: Annotated[
        int | None,
        Option(help="Bytes per example of lm. (default: 128)", min=1, rich_help_panel=MODEL),
    ] = None,
    lora: Annotated[
        int | None,
        Option(help="Rank of the adapters of lm. (default: none)", min=1, rich_help_panel=MODEL),
    ] = None,
    num_microbatches: Annotated[
        int | None,
        Option(
            help="Microbatches of the offloaded forms of lm. (default: 1)",
            min=1,
            rich_help_panel=MODEL,
        ),
    ] = None,
    policy: Annotated[
        Literal["recompute", "dots", "everything"] | None,
        Option(
            help="What these forms keep for the backward pass. (default: recompute)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Dtype of the computation. (default: float32)", rich_help_panel=MODEL),
    ] = None,
    batch_size: Annotated[int, Option(help="Examples per step, over all devices.", min=1)] = 64,
    target: Annotated[
        str,
        Option(help="h200, h100, gh200, b200, a100-80, a100-40, l4, or a GpuTargetConfigProto."),
    ] = "h200",
    num_devices: Annotated[
        int | None,
        Option(
            help="GPUs that share the step. A step of your own without shardings is split over its "
            "batch. (default: 1, or as many as your step spans)",
            min=1,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        Option(help="GPUs by axis, such as data=2,fsdp=4; fsdp shards the parameters."),
    ] = None,
    memory_fraction: Annotated[
        float, Option(help="Share of the GPU memory that JAX allocates.")
    ] = 0.75,
    host_memory_gb: Annotated[
        int | None,
        Option(
            help="GiB of pinned host memory for all GPUs. (default: "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or 64)",
            min=1,
        ),
    ] = None,
    max_batch: Annotated[
        bool, Option("--max-batch", help="Find the largest batch that fits.")
    ] = False,
    multiple_of: Annotated[
        int | None,
        Option(
            help="Try multiples of this with --max-batch. (default: the number of devices)", min=1
        ),
    ] = None,
    only: Annotated[
        list[str] | None, Option(help="Only the form of this name. Can be repeated.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print it as JSON.")] = False,
    plot: Annotated[Path | None, Option(help="Plot into this file.")] = None,
) -> None:
    """Compile a training step for a GPU that need not be present, and show its memory.

    A DenseNet is planned in four forms: plain, jax.checkpoint, effjax conv, effjax features. A
    ResNet is planned in three: plain, effjax conv, effjax features. A language model is planned in
    memory, with jax.checkpoint, updated during the backward pass, and with its activations, its
    parameters and optimizer state, or both offloaded.
    """
    if mesh is not None:
        num_devices = _count_devices(mesh, num_devices)
    if batch_size % (num_devices or 1):
        raise TrainError(
            f"batch_size (={batch_size}) must be divisible by num_devices (={num_devices})"
        )
    if not 0 < memory_fraction <= 1:
        raise TrainError(f"memory_fraction (={memory_fraction}) must lie in (0, 1]")
    if multiple_of and not max_batch:
        raise TrainError("--multiple-of needs --max-batch")
    _check_options(model, ctx.params)
    model_options = {
        name: value
        for name, value in ctx.params.items()
        if name in (*IMAGE_OPTIONS, *TEXT_OPTIONS, "dtype", "mesh") and value is not None
    }
    _plan(
        model, model_options, batch_size=batch_size, only=only or (), max_batch=max_batch,
        multiple_of=multiple_of, as_json=as_json, plot=plot, target=target,
        num_devices=num_devices, memory_fraction=memory_fraction,
        host_memory_bytes=None if host_memory_gb is None else host_memory_gb * 2**30,
    )  # fmt: skip


def _count_devices(mesh: str, num_devices: int | None) -> int:
    from ..train.mesh import abstract_mesh, axes_of

    count = math.prod(axes_of(mesh).values())
    return abstract_mesh(mesh, num_devices or count).size


def _check_options(model: str, arguments: dict[str, Any]) -> None:
    """Raise TrainError for an option of another kind of model."""
    if ":" in model:
        refused = ("dtype", "mesh", *IMAGE_OPTIONS, *TEXT_OPTIONS)
    elif model == "lm":
        refused = IMAGE_OPTIONS
    else:
        refused = TEXT_OPTIONS
        if "resnet" in model:
            refused += ("depth", "growth_rate")
    for name in refused:
        if arguments[name] is not None:
            owner = "a step of your own" if ":" in model else model
            raise TrainError(f"--{name.replace('_', '-')} is not an option of {owner}")


def _plan(model: str, model_options: dict[str, Any], **options: Any) -> None:
    from ..memory import PlanError
    from .plans import run

    is_own_step = ":" in model
    try:
        if is_own_step:
            steps = own_steps(model)
        else:
            steps = _model_steps(
                model, model_options, options["batch_size"], options["num_devices"] or 1
            )
        run(steps, own=is_own_step, **options)
    except (TrainError, CommandError):
        raise
    except PlanError as error:
        raise CommandError(shortened(str(error))) from error
    except Exception as error:
        if is_own_step:
            raise CommandError(said(error)) from error
        if isinstance(error, (ValueError, TypeError)):
            raise TrainError(shortened(str(error))) from error
        raise


def _model_steps(model: str, options: dict[str, Any], batch_size: int, num_devices: int) -> "Steps":
    """Return the training steps of a model of effjax, as a function of the batch size."""
    if model == "lm":
        return _text_steps(options, batch_size, num_devices)
    if not model.replace("-", "").isalnum():
        raise TrainError(
            f"{model!r} is not a model. A step of your own is MODULE:FUNCTION, such as "
            "my_module:my_step."
        )
    return _image_steps(model, options, batch_size, num_devices)


def _image_steps(model: str, options: dict[str, Any], batch_size: int, num_devices: int) -> "Steps":
    from ..models import DENSENETS
    from ..train.images.forms import training_steps

    options = dict(options)
    size, classes = options.pop("image_size", None), options.pop("num_classes", None)
    depth = model.removeprefix("resnet")
    if depth.isdigit():
        config = ResNetConfig(depth=int(depth), batch_size=batch_size, **options)
    else:
        name = "densenet-bc" if model == "densenet" else model
        config = DenseNetConfig(model=name, batch_size=batch_size, **options)
    small = config.network in ("densenet-bc", "resnet8") or "small_inputs" in DENSENETS.get(
        config.network, ()
    )
    default_size, default_classes = CIFAR if small else IMAGENET
    size, classes = size or default_size, classes or default_classes
    return training_steps(config, (size, size, 3), classes, num_devices)


def _text_steps(options: dict[str, Any], batch_size: int, num_devices: int) -> "Steps":
    from ..train.lm.forms import lm_steps

    config = LMConfig(
        batch_size=batch_size,
        # One head per 128 channels, at least four.
        heads=max(options.get("width", LMConfig.width) // 128, LMConfig.heads),
        # Microbatches and policies need a form with offload, and all forms are planned.
        offload="all" if {"num_microbatches", "policy"} & options.keys() else "none",
        **options,
    )
    return lm_steps(config, num_devices)
