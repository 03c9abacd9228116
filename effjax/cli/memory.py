"""`effjax memory`: its options, and the training steps that they name."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..train.errors import TrainError
from ..train.images.config import Config
from ..train.lm.config import LMConfig
from ..train.options import MODEL, Option
from .options import fail, one_line_errors, option, parameters_of, take

if TYPE_CHECKING:
    from .plans import Steps

IMAGENET = (224, 1000)  # side and classes
CIFAR = (32, 10)


@dataclasses.dataclass(frozen=True)
class OfImages:
    """Options of models of images; None: the model's own."""

    depth: Annotated[int | None, Option("Depth of densenet.", MODEL, unset="22")] = None
    growth_rate: Annotated[
        int | None, Option("New channels of a layer.", MODEL, unset="12, or the model's")
    ] = None
    image_size: Annotated[
        int | None, Option("Side of the images.", MODEL, unset="32, or 224 for ImageNet's")
    ] = None
    num_classes: Annotated[
        int | None, Option("Classes.", MODEL, unset="10, or 1000 for ImageNet's")
    ] = None


@dataclasses.dataclass(frozen=True)
class OfText:
    """Options of the language model; None: those of `effjax train lm`."""

    layers: Annotated[int | None, Option("Layers of lm.", MODEL, unset="4")] = None
    width: Annotated[int | None, Option("Channels of lm.", MODEL, unset="128")] = None
    context: Annotated[int | None, Option("Bytes an example of lm.", MODEL, unset="128")] = None
    num_microbatches: Annotated[
        int | None, Option("Of the offloaded forms of lm.", MODEL, unset="1")
    ] = None


@take([*parameters_of(OfImages), *parameters_of(OfText)])
def memory(
    model: Annotated[
        str,
        typer.Argument(
            help="densenet, densenet121, …, deform-resnet, lm, or MODULE:FUNCTION of your own: it "
            "takes a batch size and returns (fn, *args), or a dict of such by name."
        ),
    ],
    *,
    dtype: Annotated[
        Literal["float32", "bfloat16"], option("Of the computation.", MODEL)
    ] = Config.dtype,
    batch_size: Annotated[int, option("Examples of a step, over all devices.")] = Config.batch_size,
    target: Annotated[
        str, option("h200, h100, b200, a100-80, a100-40, l4, or a GpuTargetConfigProto's text.")
    ] = "h200",
    num_devices: Annotated[int | None, option("GPUs that share the step. (default: 1)")] = None,
    memory_fraction: Annotated[float, option("Share of the GPU's memory that JAX takes.")] = 0.75,
    max_batch: Annotated[
        bool, option("Find the largest batch that fits.", name="--max-batch")
    ] = False,
    only: Annotated[
        list[str] | None, option("Only the form of this name; can be given several times.")
    ] = None,
    as_json: Annotated[bool, option("Print it as JSON.", name="--json")] = False,
    plot: Annotated[Path | None, option("Draw it into this file.")] = None,
    **of_models: Any,
) -> None:
    """Compile a training step for a GPU that need not be there, and show where its memory goes.

    A DenseNet is planned in four forms: plain, jax.checkpoint, effjax conv, effjax features. A
    language model: in memory, with jax.checkpoint, and with its activations, its parameters and
    optimizer state, or both offloaded.
    """
    with one_line_errors():
        if (num_devices or 1) < 1 or batch_size % (num_devices or 1):
            raise TrainError(
                f"batch_size (={batch_size}) must be divisible by num_devices (={num_devices or 1})"
            )
        if not 0 < memory_fraction <= 1:
            raise TrainError(f"memory_fraction (={memory_fraction}) must lie in (0, 1]")
        steps = _steps(model, dtype, batch_size, num_devices or 1, of_models)
        _run(
            model, steps, batch_size=batch_size, only=only or (), max_batch=max_batch,
            as_json=as_json, plot=plot, target=target, num_devices=num_devices,
            memory_fraction=memory_fraction,
        )  # fmt: skip


def _run(model: str, steps: "Steps", **options: Any) -> None:
    """Plans and prints; what cannot be planned is one line, a bug of the user's own code is not."""
    from ..memory import PlanError
    from .plans import run

    try:
        run(steps, **options)
    except PlanError as error:
        fail(str(error), 1)
    except ValueError as error:
        if ":" in model:
            raise
        fail(str(error), 2)


def _steps(
    model: str, dtype: Any, batch_size: int, num_devices: int, of_models: dict[str, Any]
) -> "Steps":
    """Those of the model; an option of another kind of model is an error."""
    images, text = (
        {field.name: of_models[field.name] for field in dataclasses.fields(kind)}
        for kind in (OfImages, OfText)
    )
    for name, value in (images if model == "lm" else text).items():
        if value is not None:
            raise TrainError(f"--{name.replace('_', '-')} is not an option of {model}")
    if ":" in model:
        return user_steps(model)
    if model == "lm":
        return text_steps(OfText(**text), dtype, batch_size, num_devices)
    name = "densenet-bc" if model == "densenet" else model
    return image_steps(name, OfImages(**images), dtype, batch_size, num_devices)


def image_steps(
    model: str, given: OfImages, dtype: Any, batch_size: int, num_devices: int
) -> "Steps":
    """The forms of a model; images and classes are those of CIFAR or of ImageNet by default."""
    from ..models import DENSENETS
    from ..train.images.forms import training_steps

    config = Config(
        model=model, depth=given.depth, growth_rate=given.growth_rate, dtype=dtype,
        batch_size=batch_size,
    )  # fmt: skip
    small = model in ("densenet-bc", "deform-resnet") or "small_inputs" in DENSENETS.get(model, ())
    side, classes = CIFAR if small else IMAGENET
    side, classes = given.image_size or side, given.num_classes or classes
    return training_steps(config, (side, side, 3), classes, num_devices)


def text_steps(given: OfText, dtype: Any, batch_size: int, num_devices: int) -> "Steps":
    """The forms of the language model; a head for each 128 channels, four at least."""
    from ..train.lm.forms import lm_steps

    chosen = {name: value for name, value in vars(given).items() if value is not None}
    config = LMConfig(
        **chosen,
        heads=max(chosen.get("width", LMConfig.width) // 128, LMConfig.heads),
        dtype=dtype,
        batch_size=batch_size,
        offload="all" if "num_microbatches" in chosen else "none",
    )
    return lm_steps(config, num_devices)


def user_steps(name: str) -> "Steps":
    """Steps from `module:function`, a function of the batch size that returns `(fn, *args)`, or
    several such by name."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and module_name.startswith(error.name)):
            raise
        raise TrainError(f"{name!r}: there is no module {error.name}") from error
    finally:
        del sys.path[0]
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise TrainError(f"{name!r}: {module_name} has no function {function_name!r}")

    def steps(batch_size: int) -> dict[str, tuple[Any, ...]]:
        made = factory(batch_size)
        found: dict[str, Any] = dict(made) if isinstance(made, Mapping) else {function_name: made}
        for step in found.values():
            if not (isinstance(step, Sequence) and step and callable(step[0])):
                raise TrainError(
                    f"{name!r} must return (fn, *args) or a dict of such by name, not "
                    f"{type(step).__name__}"
                )
        return found

    return steps
