"""The commands of `effjax`: options in, exit codes out. Only here is anything printed.

Nothing heavy is imported before a command runs, so that the help comes at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from .. import __version__
from ..train.errors import TrainError
from ..train.images.config import Config
from .options import DATA, MODEL, OPTIMIZATION, fail, no_other_option, one_line_errors, option
from .train_lm import train_lm

if TYPE_CHECKING:
    from ..train.images.task import ImageResult
    from ..train.run_directory import RunDirectory

app = typer.Typer(
    help="Train networks that do not fit in device memory, in JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
train_app = typer.Typer(help="Train a model on real images or text.", no_args_is_help=True)
app.add_typer(train_app, name="train")
train_app.command("lm")(train_lm)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"effjax {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of `effjax` itself."""


@app.command()
def doctor(
    as_json: Annotated[bool, option("Print it as JSON.", name="--json")] = False,
) -> None:
    """Show versions, devices, memory kinds, native kernels, and how to install what is missing."""
    from .doctor import show

    show(as_json)


@app.command()
def memory(
    model: Annotated[
        str,
        typer.Argument(
            help="densenet, densenet121, …, deform-resnet, lm, or MODULE:FUNCTION of your own: it "
            "takes a batch size and returns (fn, *args), or a dict of such by name."
        ),
    ],
    batch_size: Annotated[int, option("Examples of a step, over all devices.")] = Config.batch_size,
    target: Annotated[
        str, option("h200, h100, b200, a100-80, a100-40, l4, or a GpuTargetConfigProto's text.")
    ] = "h200",
    num_devices: Annotated[int | None, option("GPUs that share the step. (default: 1)")] = None,
    memory_fraction: Annotated[float, option("Share of the GPU's memory that JAX takes.")] = 0.75,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Find the largest batch that fits.")
    ] = False,
    only: Annotated[
        list[str] | None, option("Only the form of this name; can be given several times.")
    ] = None,
    as_json: Annotated[bool, option("Print it as JSON.", name="--json")] = False,
    plot: Annotated[Path | None, option("Draw it into this file.")] = None,
    depth: Annotated[int | None, option("Depth of densenet. (default: 22)", MODEL)] = None,
    growth_rate: Annotated[
        int | None, option("New channels of a layer. (default: 12, or the model's)", MODEL)
    ] = None,
    image_size: Annotated[
        int | None, option("Side of the images. (default: 32, or 224 for ImageNet's)", MODEL)
    ] = None,
    num_classes: Annotated[
        int | None, option("Classes. (default: 10, or 1000 for ImageNet's)", MODEL)
    ] = None,
    layers: Annotated[int | None, option("Layers of lm. (default: 4)", MODEL)] = None,
    width: Annotated[int | None, option("Channels of lm. (default: 128)", MODEL)] = None,
    context: Annotated[int | None, option("Bytes an example of lm. (default: 128)", MODEL)] = None,
    num_microbatches: Annotated[
        int | None, option("Of the offloaded forms of lm. (default: 1)", MODEL)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], option("Of the computation.", MODEL)
    ] = Config.dtype,
) -> None:
    """Compile a training step for a GPU that need not be there, and show where its memory goes.

    A DenseNet is planned in four forms: plain, jax.checkpoint, effjax conv, effjax features. A
    language model: in memory, with jax.checkpoint, and with its activations, its parameters and
    optimizer state, or both offloaded.
    """
    from ..memory import PlanError
    from . import planned

    with one_line_errors():
        devices = num_devices or 1
        if devices < 1 or batch_size % devices:
            raise TrainError(
                f"batch_size (={batch_size}) must be divisible by num_devices (={devices})"
            )
        if not 0 < memory_fraction <= 1:
            raise TrainError(f"memory_fraction (={memory_fraction}) must lie in (0, 1]")
        of_lm = {
            "layers": layers, "width": width, "context": context,
            "num_microbatches": num_microbatches,
        }  # fmt: skip
        of_images = {
            "depth": depth, "growth_rate": growth_rate, "image_size": image_size,
            "num_classes": num_classes,
        }  # fmt: skip
        _no_option_of(model, of_images if model == "lm" else of_lm)
        if ":" in model:
            steps = planned.user_steps(model)
        elif model == "lm":
            steps = planned.lm_steps(of_lm, dtype, batch_size, devices)
        else:
            name = "densenet-bc" if model == "densenet" else model
            config = Config(
                model=name, depth=depth, growth_rate=growth_rate, dtype=dtype,
                batch_size=batch_size,
            )  # fmt: skip
            steps = planned.model_steps(config, image_size, num_classes, devices)
        try:
            planned.run(
                steps, batch_size=batch_size, only=only or (), max_batch=max_batch,
                as_json=as_json, plot=plot, target=target, num_devices=num_devices,
                memory_fraction=memory_fraction,
            )  # fmt: skip
        except PlanError as error:
            fail(str(error), 1)
        except ValueError as error:
            if ":" in model:  # the user's own code
                raise
            fail(str(error), 2)


def _no_option_of(model: str, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise TrainError(f"--{name.replace('_', '-')} is not an option of {model}")


@train_app.callback()
def train() -> None:
    """Train a model on real images or text."""


@train_app.command("densenet")
def train_densenet(
    context: typer.Context,
    data: Annotated[
        str, option("digits, cifar10:PATH, cifar100:PATH or folder:PATH.", DATA)
    ] = Config.data,
    image_size: Annotated[
        int | None, option("Resize the images of a folder to this side.", DATA)
    ] = Config.image_size,
    augment: Annotated[
        bool | None, option("Crop at random, and flip where the data allow it. (default: on)", DATA)
    ] = Config.augment,
    flip: Annotated[
        bool | None,
        option("Flip at random when augmenting. (default: on, but not for digits)", DATA),
    ] = Config.flip,
    model: Annotated[str, option("densenet-bc, or a name like densenet121.", MODEL)] = Config.model,
    depth: Annotated[
        int | None, option("Depth of densenet-bc, 6n + 4. (default: 22)", MODEL)
    ] = Config.depth,
    growth_rate: Annotated[
        int | None, option("New channels of a layer. (default: 12, or the model's)", MODEL)
    ] = Config.growth_rate,
    compression: Annotated[
        float | None, option("Share of channels that a transition keeps. (default: 0.5)", MODEL)
    ] = Config.compression,
    bn_size: Annotated[
        int | None, option("Bottleneck width, in growth rates. (default: 4)", MODEL)
    ] = Config.bn_size,
    drop_rate: Annotated[
        float, option("Dropout of each layer's new channels.", MODEL)
    ] = Config.drop_rate,
    small_inputs: Annotated[
        bool | None,
        option("A stem that does not pool. (default: on up to 64×64 pixels)", MODEL),
    ] = Config.small_inputs,
    efficient: Annotated[
        bool, option("Recompute in the backward pass instead of keeping.", MODEL)
    ] = Config.efficient,
    save: Annotated[
        Literal["conv", "features"], option("What efficient blocks keep: fast or least.", MODEL)
    ] = Config.save,
    epochs: Annotated[int, option("Passes over the train set.", OPTIMIZATION)] = Config.epochs,
    batch_size: Annotated[
        int, option("Images of a step, over all devices.", OPTIMIZATION)
    ] = Config.batch_size,
    learning_rate: Annotated[
        float, option("SGD's rate at the start.", OPTIMIZATION)
    ] = Config.learning_rate,
    schedule: Annotated[
        Literal["cosine", "step"],
        option("To zero, or a tenth at 1/2 and at 3/4 of the run.", OPTIMIZATION),
    ] = Config.schedule,
    momentum: Annotated[float, option("Nesterov momentum.", OPTIMIZATION)] = Config.momentum,
    weight_decay: Annotated[
        float, option("Of kernels; batch norm and biases are not decayed.", OPTIMIZATION)
    ] = Config.weight_decay,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        option("Of the computation; parameters are float32.", OPTIMIZATION),
    ] = Config.dtype,
    parallel: Annotated[
        Literal["jit", "shard_map", "pmap"], option("How all local devices are used.")
    ] = Config.parallel,
    seed: Annotated[int, option("Of parameters, order, augmentation, dropout.")] = Config.seed,
    out: Annotated[Path | None, option("Run directory. (default: runs/densenet-DATE-TIME)")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
    resume: Annotated[
        Path | None, option("Go on with this run from its last checkpoint, options as they were.")
    ] = None,
) -> None:
    """Train a DenseNet-BC with batch norm over all devices, and report what it costs in memory."""
    given = dict(context.params)
    out, overwrite, resume = given.pop("out"), given.pop("overwrite"), given.pop("resume")
    with one_line_errors():
        if resume is not None:
            return resume_run(context, resume)
        run_model(Config(**given), out, overwrite)


@train_app.command("deform-resnet")
def train_deform_resnet(
    context: typer.Context,
    data: Annotated[
        str,
        option("rotated-digits, digits, cifar10:PATH, cifar100:PATH or folder:PATH.", DATA),
    ] = "rotated-digits",
    image_size: Annotated[
        int | None, option("Resize the images of a folder to this side.", DATA)
    ] = Config.image_size,
    augment: Annotated[
        bool, option("Crop at random, and flip where the data allow it.", DATA)
    ] = False,
    epochs: Annotated[int, option("Passes over the train set.", OPTIMIZATION)] = 5,
    batch_size: Annotated[
        int, option("Images of a step, over all devices.", OPTIMIZATION)
    ] = Config.batch_size,
    learning_rate: Annotated[float, option("SGD's rate at the start.", OPTIMIZATION)] = 0.05,
    schedule: Annotated[
        Literal["cosine", "step"],
        option("To zero, or a tenth at 1/2 and at 3/4 of the run.", OPTIMIZATION),
    ] = Config.schedule,
    momentum: Annotated[float, option("Nesterov momentum.", OPTIMIZATION)] = Config.momentum,
    weight_decay: Annotated[
        float, option("Of kernels; batch norm and biases are not decayed.", OPTIMIZATION)
    ] = 5e-4,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        option("Of the computation; parameters are float32.", OPTIMIZATION),
    ] = Config.dtype,
    parallel: Annotated[
        Literal["jit", "shard_map", "pmap"], option("How all local devices are used.")
    ] = Config.parallel,
    seed: Annotated[int, option("Of parameters, order, augmentation.")] = Config.seed,
    baseline: Annotated[
        bool, option("Train the same network without deformation too, and compare.")
    ] = True,
    out: Annotated[
        Path | None, option("Run directory. (default: runs/deform-resnet-DATE-TIME)")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the runs in --out.")
    ] = False,
    resume: Annotated[
        Path | None, option("Go on with this run from its last checkpoint, options as they were.")
    ] = None,
) -> None:
    """Train a ResNet with deformable convolutions, and the same one without, on turned digits.

    Each has a run directory of its own in --out: deformable and plain.
    """
    given = dict(context.params)
    out, overwrite, resume = given.pop("out"), given.pop("overwrite"), given.pop("resume")
    names = ("deformable", "plain") if given.pop("baseline") else ("deformable",)
    with one_line_errors():
        if resume is not None:
            return resume_run(context, resume)
        from ..train.run_directory import unused

        out = unused("deform-resnet") if out is None else out
        accuracy = {}
        for name in names:
            config = Config(model="deform-resnet", deformable=name == "deformable", **given)
            accuracy[name] = run_model(config, out / name, overwrite).test_accuracy
        typer.echo(
            "test accuracy: " + ", ".join(f"{name} {value:.2%}" for name, value in accuracy.items())
        )


def resume_run(context: typer.Context, path: Path) -> None:
    """Goes on with a run; no other option may be given."""
    from ..train.run_directory import RunDirectory

    no_other_option(context)
    run = RunDirectory.open(path)
    run_model(Config.from_json(run.config.get("options")), resume=run)


def run_model(
    config: Config,
    out: Path | None = None,
    overwrite: bool = False,
    resume: "RunDirectory | None" = None,
) -> "ImageResult":
    """Checks everything, then writes."""
    from ..train.images.report import announce, make_progress, show_result
    from ..train.images.task import prepare
    from ..train.loop import fit
    from ..train.run_directory import RunDirectory

    console = Console()
    task = prepare(config)
    run = resume or RunDirectory.create(out, task.describe(), overwrite)
    announce(console, task, run)
    try:
        result = fit(task, run, make_progress(console, task), resume=resume is not None)
    except KeyboardInterrupt:
        command = "deform-resnet" if config.model == "deform-resnet" else "densenet"
        fail(f"interrupted; go on with effjax train {command} --resume {run.path}", 130)
    show_result(console, task, run, result)
    return result
