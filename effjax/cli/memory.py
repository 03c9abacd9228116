"""The `effjax memory` command."""

import contextlib
import functools
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..train.errors import TrainError
from ..train.images.config import DenseNetConfig, ResNetConfig
from ..train.lm.config import LMConfig
from .errors import CommandError
from .options import MODEL
from .user_steps import describe_error, load_steps, shorten

if TYPE_CHECKING:
    from ..memory import Comparison, MaxBatch
    from ..memory.render import Report

# From a batch size to `(fun, *args)` by name.
Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]

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
            help="densenet, densenet121, …, resnet50, …, lm, or MODULE:FUNCTION, a function of the "
            "batch size that returns (fun, *args), or a dictionary of such tuples."
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
            help="Residuals of these forms. (default: recompute)",
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
            help="GPUs that share the step. The batch of a step without shardings is split "
            "over them. (default: 1, or as many as the step spans)",
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
    if plot is not None:
        _check_plot_file(plot)
    is_users = ":" in model
    with _errors_in_one_line(is_users):
        if is_users:
            steps = load_steps(model)
        else:
            options = {
                name: value
                for name, value in ctx.params.items()
                if name in (*IMAGE_OPTIONS, *TEXT_OPTIONS, "dtype", "mesh") and value is not None
            }
            steps = _model_steps(model, options, batch_size, num_devices or 1)
        plan_options: dict[str, Any] = dict(
            target=target, num_devices=num_devices, memory_fraction=memory_fraction,
            host_memory_bytes=None if host_memory_gb is None else host_memory_gb * 2**30,
        )  # fmt: skip
        unit = multiple_of or 1
        result = plan_steps(
            _select(steps, only or ()),
            can_split=is_users,
            batch_size=-(-batch_size // unit) * unit,
            max_batch=max_batch,
            multiple_of=multiple_of,
            **plan_options,
        )
        show(result, as_json, plot)


def _count_devices(mesh: str, num_devices: int | None) -> int:
    from ..train.mesh import parse_axes

    return math.prod(parse_axes(mesh, num_devices).values())


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
            owner = "MODULE:FUNCTION" if ":" in model else model
            raise TrainError(f"--{name.replace('_', '-')} is not an option of {owner}")


@contextlib.contextmanager
def _errors_in_one_line(is_users: bool) -> Iterator[None]:
    from ..memory import PlanError

    try:
        yield
    except (TrainError, CommandError):
        raise
    except PlanError as error:
        raise CommandError(shorten(str(error))) from error
    except Exception as error:
        if is_users:
            raise CommandError(describe_error(error)) from error
        if isinstance(error, (ValueError, TypeError)):
            raise TrainError(shorten(str(error))) from error
        raise


def _select(steps: Steps, only: Sequence[str]) -> Steps:
    """Return the steps with the given names, or all steps without names."""

    @functools.lru_cache(maxsize=2)  # splitting a step compares two batch sizes
    def selected(batch_size: int) -> dict[str, tuple[Any, ...]]:
        by_name = steps(batch_size)
        if unknown := [name for name in only if name not in by_name]:
            raise TrainError(f"--only {unknown[0]!r} must be one of {', '.join(by_name)}")
        return {name: step for name, step in by_name.items() if name in (only or by_name)}

    return selected


def plan_steps(
    steps: Steps,
    *,
    can_split: bool,
    batch_size: int,
    max_batch: bool,
    multiple_of: int | None,
    target: str,
    num_devices: int | None,
    **options: Any,
) -> "Comparison | dict[str, MaxBatch]":
    """Plan steps, or find their largest batch sizes.

    Args:
        steps: the steps.
        can_split: whether to split the batch of a step without shardings over the devices.
        batch_size: the batch size to plan, or the first one to try.
        max_batch: whether to find the largest batch sizes.
        multiple_of: as in `max_batch_size`.
        target: as in `plan`.
        num_devices: as in `plan`.
        **options: other options of `plan`.
    """
    from ..memory import compare, max_batch_size
    from ..memory._lower import DeviceCountError
    from ..memory.batch_size import split_over_devices
    from ..memory.targets import find_target

    try:
        gpu = find_target(target)
    except ValueError as error:
        raise TrainError(str(error)) from error

    def plan_all(split: bool) -> "Comparison | dict[str, MaxBatch]":
        by_name: dict[str, Any] = {
            name: lambda size, name=name: steps(size)[name] for name in steps(batch_size)
        }
        if split:
            assert num_devices is not None
            by_name = {n: split_over_devices(step, num_devices) for n, step in by_name.items()}
        shared: dict[str, Any] = dict(target=gpu, num_devices=num_devices, progress=True, **options)
        if not max_batch:
            return compare({name: step(batch_size) for name, step in by_name.items()}, **shared)
        shared |= dict(multiple_of=multiple_of or num_devices, start=batch_size)
        return {name: max_batch_size(step, **shared) for name, step in by_name.items()}

    try:
        return plan_all(split=False)
    except DeviceCountError as error:
        if not can_split or error.spanned > 1:
            raise TrainError(
                f"--num-devices {num_devices} must be the number of devices in the shardings of "
                f"the step (={error.spanned})"
            ) from error
        print(
            f"effjax: splitting the batch of the step over {num_devices} devices; other arguments "
            "are replicated",
            file=sys.stderr,
        )
        return plan_all(split=True)


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
        figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
        try:
            figure.savefig(plot, dpi=150)
        except OSError as error:
            raise TrainError(f"--plot {plot}: {error}") from error
        if not as_json:
            print(f"written: {plot}")


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


def _print_reports(reports: "Sequence[Report]") -> None:
    """Print tables on a terminal, and text, which is not cut to a width, elsewhere."""
    from rich.console import Console

    console = Console()
    for i, report in enumerate(reports):
        if i:
            print()
        if console.is_terminal:
            console.print(report)
        else:
            print(report)


def _check_plot_file(path: Path) -> None:
    """Raise TrainError for a file that cannot be written, before minutes of compilation."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise TrainError(f"--plot {path}: {what}")
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise TrainError(f"--plot {path}: must end in one of {', '.join(sorted(kinds))}")


def _model_steps(model: str, options: dict[str, Any], batch_size: int, num_devices: int) -> Steps:
    """Return the training steps of a model of effjax, as a function of the batch size."""
    if model == "lm":
        return _text_steps(options, batch_size, num_devices)
    if not model.replace("-", "").isalnum():
        raise TrainError(
            f"{model!r} is not a model. Use MODULE:FUNCTION for a function, such as "
            "my_module:my_step."
        )
    return _image_steps(model, options, batch_size, num_devices)


def _image_steps(model: str, options: dict[str, Any], batch_size: int, num_devices: int) -> Steps:
    from ..models.densenet import DENSENET_OPTIONS
    from ..train.images.forms import training_steps

    options = dict(options)
    size, classes = options.pop("image_size", None), options.pop("num_classes", None)
    depth = model.removeprefix("resnet")
    if depth.isdigit():
        config = ResNetConfig(depth=int(depth), batch_size=batch_size, **options)
    else:
        name = "densenet-bc" if model == "densenet" else model
        config = DenseNetConfig(model=name, batch_size=batch_size, **options)
    small = config.network in ("densenet-bc", "resnet8") or "small_inputs" in DENSENET_OPTIONS.get(
        config.network, ()
    )
    default_size, default_classes = CIFAR if small else IMAGENET
    size, classes = size or default_size, classes or default_classes
    return training_steps(config, (size, size, 3), classes, num_devices)


def _text_steps(options: dict[str, Any], batch_size: int, num_devices: int) -> Steps:
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


def memory_command(task: Any) -> str:
    """Return the command that plans the model, batch and devices of a task, in all forms."""
    config, devices = task.config, task.mesh.size
    if isinstance(config, LMConfig):
        words = ["lm", *_options(config, "layers", "width", "context")]
        words += _changed_options(config, "lora", "num_microbatches", "policy")
    else:
        words = ["densenet" if config.network == "densenet-bc" else config.network]
        if config.COMMAND == "densenet":
            words += _changed_options(config, "depth", "growth_rate")
        height, _, _ = task.dataset.image_shape
        words += ["--image-size", height, "--num-classes", len(task.dataset.class_names)]
    words += _options(config, "batch_size") + _changed_options(config, "dtype")
    if config.mesh is not None:
        words += ["--mesh", config.mesh]
    elif devices > 1:
        words += ["--num-devices", devices]
    return shlex.join(["effjax", "memory", *map(str, words)])


def _options(config: Any, *names: str) -> list[Any]:
    pairs = [(f"--{name.replace('_', '-')}", getattr(config, name)) for name in names]
    return [word for pair in pairs for word in pair]


def _changed_options(config: Any, *names: str) -> list[Any]:
    changed = [name for name in names if getattr(config, name) != getattr(type(config), name)]
    return _options(config, *changed)
