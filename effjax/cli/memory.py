"""`effjax memory`: its options, and the training steps that they name."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..train.errors import TrainError
from ..train.images.config import Config
from ..train.lm.config import LMConfig
from ..train.options import COUNT, MODEL, Option, check
from .options import fail, one_line_errors, option, parameters_of, take
from .own_steps import own_steps, said, shortened

if TYPE_CHECKING:
    from .plans import Steps

IMAGENET = (224, 1000)  # side and classes
CIFAR = (32, 10)


@dataclasses.dataclass(frozen=True)
class OfImages:
    """Options of models of images; None: the model's own."""

    depth: Annotated[int | None, Option("Depth of densenet.", MODEL, COUNT, unset="22")] = None
    growth_rate: Annotated[
        int | None, Option("New channels of a layer.", MODEL, COUNT, unset="12, or the model's")
    ] = None
    image_size: Annotated[
        int | None, Option("Side of the images.", MODEL, COUNT, unset="32, or 224 for ImageNet's")
    ] = None
    num_classes: Annotated[
        int | None, Option("Classes.", MODEL, COUNT, unset="10, or 1000 for ImageNet's")
    ] = None


@dataclasses.dataclass(frozen=True)
class OfText:
    """Options of the language model; None: those of `effjax train lm`."""

    layers: Annotated[int | None, Option("Layers of lm.", MODEL, COUNT, unset="4")] = None
    width: Annotated[int | None, Option("Channels of lm.", MODEL, COUNT, unset="128")] = None
    context: Annotated[int | None, Option("Bytes an example of lm.", MODEL, COUNT, unset="128")] = (
        None
    )
    lora: Annotated[int | None, Option("Rank of adapters of lm.", MODEL, COUNT, unset="none")] = (
        None
    )
    num_microbatches: Annotated[
        int | None, Option("Of the offloaded forms of lm.", MODEL, COUNT, unset="1")
    ] = None
    policy: Annotated[
        Literal["recompute", "dots", "everything"] | None,
        Option("What these keep for the backward pass.", MODEL, unset="recompute"),
    ] = None


@take([*parameters_of(OfImages), *parameters_of(OfText)])
def memory(
    model: Annotated[
        str,
        typer.Argument(
            help="densenet, densenet121, …, resnet50, …, lm, or MODULE:FUNCTION of "
            "your own: it takes a batch size and returns (fun, *args), or a dict of such by name."
        ),
    ],
    *,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        option(f"Of the computation. (default: {Config.dtype})", MODEL),
    ] = None,
    batch_size: Annotated[int, option("Examples of a step, over all devices.")] = Config.batch_size,
    target: Annotated[
        str,
        option("h200, h100, gh200, b200, a100-80, a100-40, l4, or a GpuTargetConfigProto's text."),
    ] = "h200",
    num_devices: Annotated[
        int | None,
        option(
            "GPUs that share the step. A step of your own that says nothing of devices is split "
            "over the batch. (default: 1, or what your step spans)"
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        option("These GPUs by axis, like data=2,fsdp=4: parameters are split over fsdp."),
    ] = None,
    memory_fraction: Annotated[float, option("Share of the GPU's memory that JAX takes.")] = 0.75,
    host_memory_gb: Annotated[
        int | None,
        option(
            "GiB of pinned host memory for all GPUs. (default: what "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says, or 64)"
        ),
    ] = None,
    max_batch: Annotated[
        bool, option("Find the largest batch that fits.", name="--max-batch")
    ] = False,
    multiple_of: Annotated[
        int | None, option("Batches that --max-batch tries. (default: the number of devices)")
    ] = None,
    only: Annotated[
        list[str] | None, option("Only the form of this name; can be given several times.")
    ] = None,
    as_json: Annotated[bool, option("Print it as JSON.", name="--json")] = False,
    plot: Annotated[Path | None, option("Draw it into this file.")] = None,
    **of_models: Any,
) -> None:
    """Compile a training step for a GPU that need not be there, and show where its memory goes.

    A DenseNet is planned in four forms: plain, jax.checkpoint, effjax conv, effjax features. A
    language model: in memory, with jax.checkpoint, updated in the backward pass, and with its
    activations, its parameters and optimizer state, or both offloaded. A ResNet: plain, effjax
    conv, effjax features.
    """
    with one_line_errors():
        if mesh is not None:
            num_devices = _number_of(mesh, num_devices)
        counts = dict(
            batch_size=batch_size, num_devices=num_devices, multiple_of=multiple_of,
            host_memory_gb=host_memory_gb,
        )  # fmt: skip
        for name, count in counts.items():
            if count is not None and count < 1:
                raise TrainError(f"{name} (={count}) must be at least 1")
        if batch_size % (num_devices or 1):
            raise TrainError(
                f"batch_size (={batch_size}) must be divisible by num_devices (={num_devices})"
            )
        if not 0 < memory_fraction <= 1:
            raise TrainError(f"memory_fraction (={memory_fraction}) must lie in (0, 1]")
        if multiple_of and not max_batch:
            raise TrainError("--multiple-of is an option of --max-batch")
        _check_options(model, {"dtype": dtype, "mesh": mesh} | of_models)
        _run(
            model, dtype or Config.dtype, mesh, of_models, batch_size=batch_size, only=only or (),
            max_batch=max_batch, multiple_of=multiple_of, as_json=as_json, plot=plot,
            target=target, num_devices=num_devices, memory_fraction=memory_fraction,
            host_memory_bytes=None if host_memory_gb is None else host_memory_gb * 2**30,
        )  # fmt: skip


def _number_of(mesh: str, num_devices: int | None) -> int:
    """Of the devices of a mesh; `TrainError` if another number was asked for."""
    from ..train.mesh import abstract_mesh, axes_of

    found = math.prod(axes_of(mesh).values())
    return abstract_mesh(mesh, num_devices or found).size


def _check_options(model: str, given: dict[str, Any]) -> None:
    """An option of another kind of model is an error; of steps of one's own all are."""
    if model == "lm":
        others = _names(OfImages)
    elif ":" in model:
        others = {"dtype", "mesh"} | _names(OfImages) | _names(OfText)
    else:
        others = _names(OfText) | ({"depth", "growth_rate"} if "resnet" in model else set())
    for name, value in given.items():
        if value is not None and name in others:
            what = "a step of your own, which has what you give it" if ":" in model else model
            raise TrainError(f"--{name.replace('_', '-')} is not an option of {what}")


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _run(
    model: str, dtype: Any, mesh: str | None, of_models: dict[str, Any], **options: Any
) -> None:
    """Plans and prints. What cannot be planned is one line, and so is an error of the user's own
    code, with its line."""
    from ..memory import PlanError
    from .plans import run

    own = ":" in model
    try:
        if own:
            steps = own_steps(model)
        else:
            size, devices = options["batch_size"], options["num_devices"] or 1
            shared = dict(dtype=dtype, batch_size=size, mesh=mesh)
            steps = _steps(model, shared, devices, of_models)
        run(steps, own=own, **options)
    except (TrainError, typer.Exit):
        raise
    except PlanError as error:
        fail(shortened(str(error)), 1)
    except Exception as error:
        if own:
            fail(said(error), 1)
        if isinstance(error, (ValueError, TypeError)):
            fail(shortened(str(error)), 2)
        raise


def _steps(
    model: str, shared: dict[str, Any], num_devices: int, of_models: dict[str, Any]
) -> "Steps":
    """Those of a model of effjax's."""
    images = OfImages(**{name: of_models[name] for name in _names(OfImages)})
    text = OfText(**{name: of_models[name] for name in _names(OfText)})
    check(images)
    check(text)
    if model == "lm":
        return text_steps(text, shared, num_devices)
    if not model.replace("-", "").isalnum():
        raise TrainError(
            f"{model!r} is no model; a step of your own is MODULE:FUNCTION, such as "
            "my_module:my_step"
        )
    name = "densenet-bc" if model == "densenet" else model
    return image_steps(name, images, shared, num_devices)


def image_steps(model: str, given: OfImages, shared: dict[str, Any], num_devices: int) -> "Steps":
    """The forms of a model; images and classes are those of CIFAR or of ImageNet by default."""
    from ..models import DENSENETS
    from ..train.images.forms import training_steps

    config = Config(model=model, depth=given.depth, growth_rate=given.growth_rate, **shared)
    small = model in ("densenet-bc", "resnet8") or "small_inputs" in DENSENETS.get(model, ())
    side, classes = CIFAR if small else IMAGENET
    side, classes = given.image_size or side, given.num_classes or classes
    return training_steps(config, (side, side, 3), classes, num_devices)


def text_steps(given: OfText, shared: dict[str, Any], num_devices: int) -> "Steps":
    """The forms of the language model; a head for each 128 channels, four at least."""
    from ..train.lm.forms import lm_steps

    chosen = {name: value for name, value in vars(given).items() if value is not None}
    config = LMConfig(
        **chosen,
        **shared,
        heads=max(chosen.get("width", LMConfig.width) // 128, LMConfig.heads),
        offload="all" if {"num_microbatches", "policy"} & chosen.keys() else "none",
    )
    return lm_steps(config, num_devices)
