"""The `effjax memory` command."""

import contextlib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..train.errors import TrainError, printable
from ..train.finetune.config import FinetuneConfig
from ..train.images.config import DenseNetConfig, ResNetConfig
from ..train.lm.config import LMConfig
from .errors import CommandError
from .fit import finetune_choices, image_choices, parse_size, search_options, text_choices
from .options import COUNT, SIZE, model_option
from .user_steps import describe_error, load_steps, shorten

if TYPE_CHECKING:
    from ..memory import Comparison, MaxBatch, OptionSearch
    from ..memory.render import Report

# Maps a batch size to the steps `(fun, *args)` by name.
Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]

USER_FUNCTION = "MODULE:FUNCTION"  # the kind of models that are not effjax's
# The options of models, and the kinds of models that have them.
OPTIONS = {
    "depth": ("densenet",),
    "growth_rate": ("densenet",),
    "image_size": ("densenet", "resnet"),
    "num_classes": ("densenet", "resnet"),
    "layers": ("lm",),
    "width": ("lm",),
    "context": ("lm",),
    "checkpoint": ("finetune",),
    "max_length": ("finetune",),
    "param_dtype": ("finetune",),
    "optimizer": ("finetune",),
    "mlp_chunk_size": ("finetune",),
    "lora": ("finetune",),
    "num_microbatches": ("lm", "finetune"),
    "policy": ("lm", "finetune"),
    "dtype": ("densenet", "resnet", "lm", "finetune"),
    "mesh": ("densenet", "resnet", "lm", "finetune"),
}
IMAGENET = (224, 1000)  # side and classes
CIFAR = (32, 10)
BATCH_SIZE = 64


def _install_compiler(name: Literal["cuda", "tpu"] | None) -> None:
    if name is None:
        return
    with _errors_in_one_line():
        from ..memory._compilers import install_compiler

        print(printable(f"installed: {install_compiler(name)}"))
    raise typer.Exit


def memory(
    ctx: typer.Context,
    model: Annotated[
        str,
        Argument(
            help="densenet, densenet121, …, resnet50, …, lm, finetune, or MODULE:FUNCTION, a "
            "function of the batch size that returns (fun, *args), or a dictionary of such tuples."
        ),
    ],
    checkpoint: Annotated[
        str | None,
        Argument(help="The config.json of a language model, or its folder, for finetune."),
    ] = None,
    depth: Annotated[
        int | None, model_option(help="Depth of densenet. (default: 22)", **SIZE)
    ] = None,
    growth_rate: Annotated[
        int | None,
        model_option(
            help="Channels that each layer adds. (default: 12, or that of the model)",
            **SIZE,
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        model_option(
            help="Side of the images. (default: 32, or 224 for ImageNet's models)",
            **SIZE,
        ),
    ] = None,
    num_classes: Annotated[
        int | None,
        model_option(help="Classes. (default: 10, or 1000 for ImageNet's models)", **SIZE),
    ] = None,
    layers: Annotated[int | None, model_option(help="Layers of lm. (default: 4)", **SIZE)] = None,
    width: Annotated[
        int | None, model_option(help="Channels of lm. (default: 128)", **SIZE)
    ] = None,
    context: Annotated[
        int | None,
        model_option(help="Bytes per example of lm. (default: 128)", **SIZE),
    ] = None,
    max_length: Annotated[
        int | None,
        model_option(help="Tokens of a row of finetune. (default: 2048)", **SIZE),
    ] = None,
    lora: Annotated[
        int | None,
        model_option(help="Rank of the adapters of finetune. (default: none)", **SIZE),
    ] = None,
    param_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        model_option(help="Dtype of the parameters of finetune. (default: bfloat16)"),
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "adamw8bit"] | None,
        model_option(help="Optimizer of finetune. (default: adamw)"),
    ] = None,
    num_microbatches: Annotated[
        int | None,
        model_option(help="Microbatches of lm or finetune. (default: 1)", **SIZE),
    ] = None,
    mlp_chunk_size: Annotated[
        int | None,
        model_option(
            help="Positions that an MLP of finetune processes at a time. (default: all)", **SIZE
        ),
    ] = None,
    policy: Annotated[
        Literal["recompute", "dots", "everything"] | None,
        model_option(help="Residuals of lm or finetune, except in memory. (default: recompute)"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        model_option(
            help="Dtype of the computation. (default: float32; bfloat16 for finetune)",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(help="Examples per step, over all devices. (default: 64; 8 for finetune)", **COUNT),
    ] = None,
    target: Annotated[
        str,
        Option(
            help="h200, h100, gh200, b200, gb200, a100-80, a100-40, l4, l40s, rtx4090, rtx5090, "
            "v4, v5e, v5p, v6e, tpu7x, or a file with a GpuTargetConfigProto."
        ),
    ] = "h200",
    num_devices: Annotated[
        int | None,
        Option(
            help="Devices that share the step. The batch of a step without shardings is split "
            "over them. (default: 1, or as many as the step spans)",
            **SIZE,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        Option(help="Devices by axis, such as data=2,fsdp=4; fsdp shards the parameters."),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        Option(
            help="Share of the device memory that JAX allocates. (default: 0.75 on a GPU, 1 on a "
            "TPU)",
            min=0,
            max=1,
        ),
    ] = None,
    host_memory_gb: Annotated[
        int | None,
        Option(
            help="GiB of pinned host memory for all devices. (default: "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or 64)",
            **SIZE,
        ),
    ] = None,
    max_batch: Annotated[
        bool, Option("--max-batch", help="Find the largest batch that fits.")
    ] = False,
    multiple_of: Annotated[
        int | None,
        Option(
            help="Try multiples of this with --max-batch. (default: the number of devices)",
            **COUNT,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            help="Choose the training options that trade time for memory: the fastest ones that "
            "fit in this memory, such as 24GB. FUNCTION must return its steps in the order of the "
            "memory they need, the largest first."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(help='Plan only this form, such as "offload all, fused". Can be repeated.'),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print it as JSON.")] = False,
    plot: Annotated[Path | None, Option(help="Plot into this file.", dir_okay=False)] = None,
    install_compiler: Annotated[
        Literal["cuda", "tpu"] | None,
        Option(
            help="Download the compiler for GPUs or TPUs, as the first plan does, and exit.",
            callback=_install_compiler,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Compile a training step for a GPU or TPU that need not be present, and show its memory.

    A DenseNet is planned in four forms: plain, jax.checkpoint, effjax conv, effjax features. A
    ResNet is planned in three: plain, effjax conv, effjax features. A language model is planned in
    memory, with jax.checkpoint, updated during the backward pass, and with its activations, its
    parameters and optimizer state, or both offloaded. `finetune CHECKPOINT` does not need the
    weights of the model.
    """
    from ..memory.targets import find_target
    from ..train.mesh import parse_axes

    kind = _kind(model)
    options = _model_options(ctx.params, model, kind)
    if batch_size is None:
        batch_size = FinetuneConfig.batch_size if kind == "finetune" else BATCH_SIZE
    if multiple_of and not max_batch:
        raise TrainError("--multiple-of needs --max-batch.")
    if budget is not None and (max_batch or only or plot):
        other = "max-batch" if max_batch else "only" if only else "plot"
        raise TrainError(f"--budget cannot be combined with --{other}.")
    if plot is not None and not plot.parent.is_dir():
        raise TrainError(f"--plot {plot}: there is no folder {plot.parent}.")
    if mesh is not None:
        num_devices = math.prod(parse_axes(mesh, num_devices).values())
    with _errors_in_one_line():
        gpu = find_target(target)
    limits: dict[str, Any] = {
        "target": gpu,
        "memory_fraction": memory_fraction,
        "host_memory_bytes": None if host_memory_gb is None else host_memory_gb * 2**30,
    }
    with _errors_in_one_line(in_users_code=kind == USER_FUNCTION):
        if budget is not None:
            limits |= {"budget": parse_size("--budget", budget), "num_devices": num_devices}
            found = search_model(model, kind, options, batch_size, limits)
            print(json.dumps(found.to_dict(), indent=1)) if as_json else _print_reports([found])
            return
        if kind == USER_FUNCTION:
            steps = load_steps(model)
        elif kind == "lm":
            steps = _text_steps(options, batch_size, num_devices or 1)
        elif kind == "finetune":
            from ..train.finetune.forms import finetune_steps

            steps = finetune_steps(_finetune_config(options, batch_size), num_devices or 1)
        else:
            steps = _image_steps(model, options, batch_size, num_devices or 1)
        result = plan_steps(
            steps, only or (), batch_size, max_batch, multiple_of, num_devices, **limits
        )
        show(result, as_json, plot)


@contextlib.contextmanager
def _errors_in_one_line(in_users_code: bool = False) -> Iterator[None]:
    from ..memory import PlanError

    try:
        yield
    except (TrainError, CommandError):
        raise
    except PlanError as error:
        raise CommandError(shorten(str(error))) from error
    except Exception as error:
        if in_users_code:
            raise CommandError(describe_error(error)) from error
        if isinstance(error, (ValueError, TypeError)):
            raise TrainError(shorten(str(error))) from error
        raise


def _kind(model: str) -> str:
    """Return the kind of a model."""
    if ":" in model:
        return USER_FUNCTION
    resnet = r"resnet\d+|wide_resnet\w+|resnext\w+"
    patterns = {"densenet": "densenet[0-9_]*", "resnet": resnet, "lm": "lm", "finetune": "finetune"}
    for kind, pattern in patterns.items():
        if re.fullmatch(pattern, model):
            return kind
    raise TrainError(
        f"model {model!r} must be densenet, densenet121, …, resnet50, …, lm, finetune, or "
        f"{USER_FUNCTION}, such as my_module:my_step."
    )


def _model_options(params: Mapping[str, Any], model: str, kind: str) -> dict[str, Any]:
    """Return the options of the model that were given."""
    options = {name: params[name] for name in OPTIONS if params[name] is not None}
    for name in options:
        if kind not in OPTIONS[name]:
            owner = kind if kind == USER_FUNCTION else model
            what = "CHECKPOINT" if name == "checkpoint" else f"--{name.replace('_', '-')}"
            raise TrainError(f"{what} is not an option of {owner}.")
    if kind == "finetune" and "checkpoint" not in options:
        raise TrainError("finetune needs CHECKPOINT, the config.json of a model or its folder.")
    return options


def _image_steps(model: str, options: dict[str, Any], batch_size: int, num_devices: int) -> Steps:
    from ..train.images.forms import training_steps

    return training_steps(*_image_config(model, options, batch_size), num_devices)


def _image_config(
    model: str, options: dict[str, Any], batch_size: int
) -> tuple[DenseNetConfig | ResNetConfig, tuple[int, int, int], int]:
    """Return the configuration, the shape of an image and the number of classes."""
    from ..models.densenet import DENSENET_OPTIONS

    options = dict(options)
    size, classes = options.pop("image_size", None), options.pop("num_classes", None)
    if depth := re.fullmatch(r"resnet(\d+)", model):
        config = ResNetConfig(depth=int(depth[1]), batch_size=batch_size, **options)
    elif not model.startswith("densenet"):  # a wide ResNet or a ResNeXt
        config = ResNetConfig(model=model, batch_size=batch_size, **options)
    else:
        name = "densenet-bc" if model == "densenet" else model
        config = DenseNetConfig(model=name, batch_size=batch_size, **options)
    small = config.network in ("densenet-bc", "resnet8") or "small_inputs" in DENSENET_OPTIONS.get(
        config.network, ()
    )
    default_size, default_classes = CIFAR if small else IMAGENET
    size, classes = size or default_size, classes or default_classes
    return config, (size, size, 3), classes


def _text_steps(options: dict[str, Any], batch_size: int, num_devices: int) -> Steps:
    from ..train.lm.model import lm_steps

    return lm_steps(_text_config(options, batch_size), num_devices)


def _text_config(options: dict[str, Any], batch_size: int) -> LMConfig:
    return LMConfig(
        batch_size=batch_size,
        # One head per 128 channels, at least four.
        heads=max(options.get("width", LMConfig.width) // 128, LMConfig.heads),
        **options,
    )


def _finetune_config(options: dict[str, Any], batch_size: int) -> FinetuneConfig:
    return FinetuneConfig(data="", batch_size=batch_size, **options)


def search_model(
    model: str, kind: str, options: dict[str, Any], batch_size: int, limits: dict[str, Any]
) -> "OptionSearch":
    """Search for the fastest options of a model that fit.

    Args:
        model: The argument of the command.
        kind: Its kind.
        options: The options of the model that were given.
        batch_size: The batch size.
        limits: Other arguments of `choose_options`.
    """
    from ..memory import choose_options

    num_devices = limits["num_devices"] or 1
    if kind == USER_FUNCTION:
        steps = load_steps(model)(batch_size)
        return choose_options(
            lambda step: steps[step], {"step": list(steps)},
            not_by_time=["step"], progress=True, **limits,
        )  # fmt: skip
    if kind == "lm":
        config = _text_config(options, batch_size)
        choices = text_choices(config, options, num_devices)
        return search_options(config, options, choices, **limits)
    if kind == "finetune":
        config = _finetune_config(options, batch_size)
        choices = finetune_choices(config, options, num_devices)
        return search_options(config, options, choices, **limits)
    config, image_shape, classes = _image_config(model, options, batch_size)
    choices = image_choices(image_shape, classes, num_devices)
    return search_options(config, (), choices, **limits)


def plan_steps(
    steps: Steps,
    only: Sequence[str],
    batch_size: int,
    max_batch: bool,
    multiple_of: int | None,
    num_devices: int | None,
    **options: Any,
) -> "Comparison | dict[str, MaxBatch]":
    """Plan steps, or find their largest batch sizes.

    Args:
        steps: The steps.
        only: The names of the steps to plan; empty for all.
        batch_size: The batch size to plan, or the first one to try.
        max_batch: Whether to find the largest batch sizes.
        multiple_of: As in `max_batch_size`.
        num_devices: As in `plan`.
        **options: Other options of `plan`.
    """
    from ..memory import compare, max_batch_size
    from ..memory._lower import DeviceCountError
    from ..memory.batch_size import split_over_devices

    steps = functools.lru_cache(maxsize=2)(steps)  # splitting a step compares two batch sizes
    if multiple_of:
        batch_size = -(-batch_size // multiple_of) * multiple_of
    names = list(steps(batch_size))
    if unknown := set(only) - set(names):
        choices = ", ".join(map(repr, names))
        raise TrainError(f"--only {unknown.pop()!r} must be one of {choices}.")
    by_name: dict[str, Callable[[int], tuple[Any, ...]]] = {
        name: lambda size, name=name: steps(size)[name] for name in names if name in (only or names)
    }

    def plan_all() -> "Comparison | dict[str, MaxBatch]":
        shared: dict[str, Any] = dict(num_devices=num_devices, progress=True, **options)
        if not max_batch:
            return compare({name: step(batch_size) for name, step in by_name.items()}, **shared)
        shared |= dict(multiple_of=multiple_of or num_devices, start=batch_size)
        return {name: max_batch_size(step, **shared) for name, step in by_name.items()}

    try:
        return plan_all()
    except DeviceCountError as error:
        if error.spanned > 1:
            raise TrainError(
                f"--num-devices {num_devices} must be the number of devices in the shardings of "
                f"the step (={error.spanned})."
            ) from error
    assert num_devices is not None
    print(
        f"effjax: splitting the batch of the step over {num_devices} devices; other arguments are "
        "replicated",
        file=sys.stderr,
    )
    by_name = {name: split_over_devices(step, num_devices) for name, step in by_name.items()}
    return plan_all()


def show(result: "Comparison | dict[str, MaxBatch]", as_json: bool, plot: Path | None) -> None:
    """Print plans or batch sizes, and plot the plans into a file."""
    from ..memory import Comparison
    from ..memory.render import MAX_ROWS

    if isinstance(result, Comparison):
        plans = result
        # Of several plans, show a comparison and fewer rows of each.
        reports = [plans.report()] if len(plans) > 1 else []
        rows = MAX_ROWS // 2 if len(plans) > 1 else MAX_ROWS
        reports += [plan.report(name, rows) for name, plan in plans.items()]
    else:
        plans = Comparison({name: largest.plan for name, largest in result.items()})
        reports = [_largest_batches(result)]
    if as_json:
        print(json.dumps({name: record.to_dict() for name, record in result.items()}, indent=1))
    else:
        _print_reports(reports)
    if plot is not None:
        _draw(plans, plot)
        if not as_json:
            print(printable(f"written: {plot}"))


def _largest_batches(results: "Mapping[str, MaxBatch]") -> "Report":
    from ..memory.render import Report, Table, format_bytes

    rows = [
        [
            name,
            str(result.batch_size) if result.batch_size else "none fits",
            format_bytes(result.plan.peak_device_bytes),
            ", ".join(map(str, sorted(result.tried))),
        ]
        for name, result in results.items()
    ]
    return Report([Table(["", "largest batch", "peak", "batches compiled"], rows)])


def _print_reports(reports: "Sequence[Report | OptionSearch]") -> None:
    """Print rich tables on a terminal, and unwrapped plain text otherwise."""
    from rich.console import Console

    console = Console()
    for i, report in enumerate(reports):
        if i:
            print()
        if console.is_terminal:
            console.print(report)
        else:
            print(report)


def _draw(plans: "Comparison", path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")  # without a display
    figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an unknown file format
        raise TrainError(f"--plot {path}: {error}") from error
