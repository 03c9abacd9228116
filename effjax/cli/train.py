"""The commands that train: `effjax train`, and `effjax finetune`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from ..train.config import COUNT, DATA, MODEL, option
from ..train.detection.config import DetectorConfig
from ..train.errors import TrainError
from ..train.images.config import DenseNetRunConfig, ResNetRunConfig
from ..train.text.config import FinetuneConfig
from .fit import fit_config
from .options import RunOptions, command, take
from .training import RunRequest, make_console, request_run, train

if TYPE_CHECKING:
    from ..train.images.task import ImageResult

train_app = typer.Typer(help="Train a network or a detector on images.", no_args_is_help=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetRunOptions(RunOptions):
    """Options of `effjax train resnet` that are not stored with the run."""

    compare_plain: bool = option(
        False, help="Also train the network without --dcn, in OUT-plain.", group=MODEL
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneRunOptions(RunOptions):
    """Options of `effjax finetune` that are not stored with the run."""

    show: int | None = option(
        None,
        help="Print this many rows of each --data, the first ones, as they are trained on, and "
        "end. Text with loss is on lines that begin with +.",
        group=DATA,
        check=COUNT,
    )
    show_ids: bool = option(False, help="With --show, print the tokens and their ids.", group=DATA)


@command(train_app, "densenet", DenseNetRunConfig, RunOptions)
def train_densenet(given: dict[str, Any]) -> None:
    """Train a DenseNet-BC with batch norm over all devices, and report its memory."""
    train_on_images(fit_images(request_run(DenseNetRunConfig, given), given.get("fit")))


@command(train_app, "resnet", ResNetRunConfig, ResNetRunOptions)
def train_resnet(given: dict[str, Any]) -> None:
    """Train a ResNet with batch norm over all devices, and report its memory."""
    request = fit_images(request_run(ResNetRunConfig, given), given.get("fit"))
    if given.get("compare_plain"):
        train_and_compare(request)
    else:
        train_on_images(request)


@command(train_app, "detector", DetectorConfig, RunOptions)
def train_detector(given: dict[str, Any]) -> None:
    """Train an RT-DETR from its weights on images with boxes, and report its average precision.

    At the end, RUN/model holds the best parameters in Hugging Face's layout.
    """
    request = request_run(DetectorConfig, given)
    from ..train.detection.plans import memory_choices
    from ..train.detection.task import describe, prepare, result_rows
    from ..train.report import print_line, print_table

    config, console = fit_steps(request, given.get("fit"), memory_choices), make_console()
    task = prepare(config, resume=request.resume)
    run, result = train(request, task, describe(task), console, memory_options="--save features")
    print_table(console, result_rows(result))
    print_line(console, f"written: {run.path / result.exported}")


def finetune(given: dict[str, Any]) -> None:
    """Train a language model from its checkpoint on rows of JSON.

    At the end, RUN/model holds the best parameters in Hugging Face's layout. With --lora,
    RUN/adapter holds the adapters in PEFT's layout.
    """
    if given.get("show_ids") and "show" not in given:
        raise TrainError("--show-ids needs --show.")
    if "show" in given:
        show(given)
    else:
        train_on_text(given)


def show(given: Mapping[str, Any]) -> None:
    """Print rows as they are trained on."""
    from ..train.text.show import show_rows
    from ..train.text.task import find_tokenizer

    options = FinetuneRunOptions(**take(FinetuneRunOptions, given))
    if options.resume is not None:
        raise TrainError("--show cannot be combined with --resume. Give CHECKPOINT and --data.")
    config, _, tokenizer = find_tokenizer(FinetuneConfig(**take(FinetuneConfig, given)).resolve())
    assert options.show is not None
    show_rows(make_console(), config, tokenizer, options.show, options.show_ids)


def fit_images(request: RunRequest, fit: str | None) -> RunRequest:
    """Return the request with the options that `--fit` chooses, if it is given.

    The choice depends on the shape of the images and, with --init-from, on the file.
    """
    if fit is None:
        return request
    from ..train.images.plans import memory_choices
    from ..train.images.task import prepare

    # The data's shapes decide what fits, so that they are read before the options are chosen.
    task = prepare(request.config)
    size, config = task.mesh.size, task.config
    classes = len(task.dataset.class_names)
    choices = memory_choices(config, request.given, size, task.dataset.image_shape, classes)
    config = fit_config(config, request.given, fit, choices, size)
    return dataclasses.replace(request, config=config)


def fit_steps(request: RunRequest, fit: str | None, memory_choices: Callable[..., Any]) -> Any:
    """Return the configuration with the options that `--fit` chooses, if it is given.

    The choice does not depend on the data.
    """
    config = request.config.resolve()
    if fit is None:
        return config
    from ..train.mesh import make_mesh

    size = make_mesh(config.mesh).size
    choices = memory_choices(config, {*request.given}, size)
    return fit_config(config, request.given, fit, choices, size)


def train_on_images(request: RunRequest) -> "ImageResult":
    """Train a network on images, and print its result."""
    from ..train.images.report import describe, result_rows
    from ..train.images.task import prepare
    from ..train.report import print_line, print_table

    # This checks all options and data. Nothing is written before.
    task, console = prepare(request.config, resume=request.resume), make_console()
    run, result = train(request, task, describe(task), console, memory_options="--save features")
    print_table(console, result_rows(task, result))
    print_line(console, f"written: {run.path}")
    return result


def train_and_compare(request: RunRequest) -> None:
    """Train a ResNet with and without deformable convolutions."""
    from ..train.processes import run_on_first

    dcn = request.config.dcn
    if dcn == "none":
        raise TrainError("--compare-plain needs --dcn v1 or v2.")
    deformable = train_on_images(request)
    path = request.path.with_name(f"{request.path.name}-plain")
    plain_request = dataclasses.replace(
        request,
        config=dataclasses.replace(request.config, dcn="none"),
        path=path,
        resume=request.resume and run_on_first((path / "config.json").exists),
    )
    plain = train_on_images(plain_request)
    make_console().print(
        f"test accuracy: dcn {dcn} {deformable.test_accuracy:.2%}, plain {plain.test_accuracy:.2%}",
        highlight=False,
    )


def train_on_text(given: Mapping[str, Any]) -> None:
    """Fine-tune a language model, and print its result."""
    request = request_run(FinetuneConfig, given)
    from ..train.report import load_bar, print_line, print_table
    from ..train.text.plans import memory_choices
    from ..train.text.report import describe, describe_stops, result_rows
    from ..train.text.task import prepare

    config, console = fit_steps(request, given.get("fit"), memory_choices), make_console()
    with load_bar(console) as update:
        task = prepare(config, load_progress=update, resume=request.resume)
        run, result = train(request, task, describe(task), console, "--fit, or --params-in host")
    print_table(console, result_rows(result))
    for line in (f"written: {run.path / result.exported}", *describe_stops(task)):
        print_line(console, line)
