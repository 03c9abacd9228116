"""`effjax memory`: plans of the steps of commands that train, and of a user's function."""

import contextlib
import dataclasses
import functools
import json
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..train.config import COUNT, MODEL, PLAN, SIZE, Check, RunConfig, inherit, option
from ..train.errors import TrainError, printable
from ..train.host_memory import pinnable_of
from ..train.images.config import DenseNetRunConfig, ImageConfig, ResNetRunConfig
from ..train.text.config import FinetuneConfig
from . import answer
from .errors import CommandError
from .fit import DEFAULT_TARGET, parse_size, search_options
from .options import FileOptions, command, take
from .user_steps import describe_error, load_steps, shorten

if TYPE_CHECKING:
    from ..memory import Comparison, MaxBatch, OptionSearch
    from ..memory.render import Report
    from ..train.task import Form, MemoryChoices

# Options that a plan does not need.
READ_BY_RUNS = (
    "data", "data_weights", "columns", "chat_template", "validation_data", "init_from",
    "sample_prompts", "sample_tokens", "sample_temperature",
)  # fmt: skip
# Maps a batch size to the steps `(fun, *args)` by name.
Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]
# Maps each name to a function from a batch size to the step.
StepsByName = Mapping[str, Callable[[int], tuple[Any, ...]]]
Result = TypeVar("Result")

memory_app = typer.Typer(
    help="Compile a training step for a GPU or TPU that need not be present, and show its memory.",
    no_args_is_help=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(FileOptions):
    """Options of all plans."""

    target: str = option(
        DEFAULT_TARGET,
        help="h200, h100, gh200, b200, gb200, a100-80, a100-40, l4, l40s, rtx4090, rtx5090, v4, "
        "v5e, v5p, v6e, tpu7x, or a file with a GpuTargetConfigProto.",
        group=PLAN,
    )
    num_devices: int | None = option(
        None,
        help="Devices that share the step. The batch of a step without shardings is split over "
        "them. (default: 1, or as many as the step spans)",
        group=PLAN,
        check=SIZE,
    )
    memory_fraction: float | None = option(
        None,
        help="Share of the device memory that JAX allocates. (default: 0.75 on a GPU, 1 on a TPU)",
        group=PLAN,
        check=Check("lie in [0, 1]", lambda value: 0 <= value <= 1),
    )
    host_memory_gb: int | None = option(
        None,
        help="GiB of memory of the machine, 4 of them for the process. (default: a GPU's machine "
        "may have any size)",
        group=PLAN,
        check=SIZE,
    )
    max_batch: bool = option(False, help="Find the largest batch that fits.", group=PLAN)
    multiple_of: int | None = option(
        None,
        help="Try multiples of this with --max-batch. (default: the number of devices)",
        group=PLAN,
        check=COUNT,
    )
    budget: str | None = option(
        None,
        help="Choose the training options that trade time for memory: the fastest ones that fit in "
        "this memory, such as 24GB. Options that are given do not change.",
        group=PLAN,
    )
    only: list[str] | None = option(
        None,
        help='Plan only this form, such as "offload all, fused". Can be repeated.',
        group=PLAN,
    )
    details: bool = option(
        False, help="Also print the buffers, transfers and modelled time of each form.", group=PLAN
    )
    json: bool = option(False, help="Print it as JSON.", group=PLAN)
    plot: Path | None = option(None, help="Plot into this file.", group=PLAN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiple_of and not self.max_batch:
            raise TrainError("--multiple-of needs --max-batch.")
        if self.budget is not None:
            for other in ("max_batch", "only", "plot", "memory_fraction"):
                if getattr(self, other) not in (None, False, []):
                    raise TrainError(f"`budget` cannot be combined with `{other}`.")
        if self.plot is not None and (self.plot.is_dir() or not self.plot.parent.is_dir()):
            raise TrainError(f"--plot {self.plot}: must be a file in an existing folder.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePlanOptions(PlanOptions):
    """Options of plans of networks for images."""

    num_classes: int | None = option(
        None,
        help="Classes. (default: 10, or 1000 for ImageNet's models)",
        group=MODEL,
        check=SIZE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionOptions(PlanOptions):
    """Options of the plan of a function."""

    function: str | None = option(
        None,
        help="MODULE:FUNCTION, a function of the batch size that returns (fun, *args), or a "
        "dictionary of such tuples.",
        positional=True,
    )
    batch_size: int = option(64, help="The argument of the function.", check=COUNT, group=PLAN)
    host_memory_gb: int | None = inherit(
        PlanOptions,
        "host_memory_gb",
        help="GiB of host memory for all devices. (default: a GPU's machine may have any size)",
    )
    budget: str | None = inherit(
        PlanOptions,
        "budget",
        help="Find the fastest step that fits in this memory, such as 24GB. The function must "
        "return its steps in the order of the memory they need, the largest first.",
    )


@memory_app.callback(invoke_without_command=True)
def install(
    install_compiler: Annotated[
        Literal["cuda", "tpu"] | None,
        typer.Option(
            help="Download the compiler for GPUs or TPUs, as the first plan does, and exit."
        ),
    ] = None,
) -> None:
    """Install the compiler that `--install-compiler` names."""
    if install_compiler is not None:
        with _errors_in_one_line():
            from ..memory.compiler.packages import install_compiler as install

            print(printable(f"installed: {install(install_compiler)}"))
        raise typer.Exit


@command(memory_app, "densenet", DenseNetRunConfig, ImagePlanOptions)
def plan_densenet(given: dict[str, Any]) -> None:
    """Plan the step of effjax train densenet in four forms.

    The forms are plain, jax.checkpoint, effjax conv and effjax features.
    """
    plan_images(DenseNetRunConfig, given)


@command(memory_app, "resnet", ResNetRunConfig, ImagePlanOptions)
def plan_resnet(given: dict[str, Any]) -> None:
    """Plan the step of effjax train resnet in three forms.

    The forms are plain, effjax conv and effjax features.
    """
    plan_images(ResNetRunConfig, given)


@command(memory_app, "finetune", FinetuneConfig, PlanOptions)
def plan_finetune(given: dict[str, Any]) -> None:
    """Plan the step of effjax finetune in seven forms. Only config.json of CHECKPOINT is read.

    The step is planned in memory, with jax.checkpoint, updated during the backward pass, and with
    its activations, its parameters and optimizer state, or both offloaded.
    """
    plan_text(given)


@command(memory_app, "step", FunctionOptions)
def plan_function(given: dict[str, Any]) -> None:
    """Plan the steps of MODULE:FUNCTION."""
    options = FunctionOptions(**given)
    if options.function is None or ":" not in options.function:
        raise TrainError("give MODULE:FUNCTION, such as my_module:my_step.")
    limits = _limits(options)
    with _errors_in_one_line(in_users_code=True):
        steps = load_steps(options.function)
        if options.budget is not None:
            from ..memory import OptionSearch, choose_options

            budget = parse_size("--budget", options.budget)

            def search(by_name: StepsByName) -> OptionSearch:
                return choose_options(
                    lambda step: by_name[step](options.batch_size), {"step": list(by_name)},
                    not_by_time=["step"], budget=budget, num_devices=options.num_devices,
                    progress=True, **limits,
                )  # fmt: skip

            by_name = separate_steps(steps, list(steps(options.batch_size)))
            found = split_if_needed(search, by_name, options.num_devices)
            show_search(found, options)
            fits = found.options is not None
        else:
            result = plan_steps(steps, options, options.batch_size, **limits)
            show(result, options)
            fits = any_fits(result)
    if not fits:
        raise typer.Exit(1)


def plan_images(config_type: type[ImageConfig], given: Mapping[str, Any]) -> None:
    """Plan the steps of a network for images."""
    from ..train.images import plans

    config = config_type(**take(config_type, given)).resolve()
    options = _plan_options(ImagePlanOptions, config, given)
    num_devices, classes = options.num_devices or 1, options.num_classes
    forms = plans.forms(config, given, num_devices, classes)
    _plan(
        config, given, options, forms, plans,
        lambda: plans.memory_choices(config, num_devices, num_classes=classes),
    )  # fmt: skip


def plan_text(given: Mapping[str, Any]) -> None:
    """Plan the steps of a decoder."""
    from ..train.text import plans

    config = FinetuneConfig(**take(FinetuneConfig, given)).resolve()
    options = _plan_options(PlanOptions, config, given)
    num_devices = options.num_devices or 1
    forms = plans.forms(config, given, num_devices)
    _plan(
        config, given, options, forms, plans,
        lambda: plans.memory_choices(config, {*given}, num_devices),
    )  # fmt: skip


def _plan_options(options_type: type[Any], config: RunConfig, given: Mapping[str, Any]) -> Any:
    """Return the options of a plan; a mesh determines the number of devices."""
    from ..train.mesh import parse_axes

    options = options_type(**take(options_type, given))
    if unused := [name for name in READ_BY_RUNS if name in given]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        print(f"effjax: a plan reads no data and no weights; unused: {names}", file=sys.stderr)
    if config.mesh is None:
        return options
    size = math.prod(parse_axes(config.mesh, options.num_devices).values())
    return dataclasses.replace(options, num_devices=size)


def _limits(options: PlanOptions, of_run: bool = False) -> dict[str, Any]:
    """Return the arguments of `plan` that describe the device.

    A run needs host memory for its process, too.
    """
    from ..memory.devices import find_target

    host_bytes = None if options.host_memory_gb is None else options.host_memory_gb * 2**30
    if host_bytes is not None and of_run:
        host_bytes = pinnable_of(host_bytes)
    with _errors_in_one_line():
        target = find_target(options.target)
    return {
        "target": target,
        "memory_fraction": options.memory_fraction,
        "host_memory_bytes": host_bytes,
    }


def _plan(
    config: RunConfig,
    given: Mapping[str, Any],
    options: PlanOptions,
    forms: "Mapping[str, Form]",
    plans: Any,
    make_choices: Callable[[], "MemoryChoices"],
) -> None:
    """Plan the forms of a run, or search for its options with `--budget`; print the answer.

    Args:
        config: The options of the run.
        given: The options that are given.
        options: The options of the plan.
        forms: The forms of the run.
        plans: The module of the task, see `answer.conclude`.
        make_choices: Returns what `--budget` chooses from.
    """
    limits, num_devices = _limits(options, of_run=True), options.num_devices
    own = take(type(config), given)
    only = options.only or ()
    _check_only(only, list(forms))
    budget = None if options.budget is None else parse_size("--budget", options.budget)
    # Building the steps of a deep network takes seconds.
    names = [name for name in forms if not only or name in only]
    print(f"planning for {limits['target'].description}: {'; '.join(names)}", file=sys.stderr)
    with _errors_in_one_line():
        if options.max_batch:
            sized = lambda size: {  # noqa: E731
                name: form.training_step(dataclasses.replace(form.config, batch_size=size))
                for name, form in forms.items()
            }
            result = plan_steps(sized, options, config.batch_size, **limits)
            show(result, options)
            fits = any_fits(result)
        elif budget is not None:
            fits = _search(config, own, options, budget, forms, plans, make_choices(), limits)
        else:
            rows = answer.estimate(forms, _row_limits(limits, num_devices), num_devices)
            fits = _compare_forms(config, own, options, rows, only, plans, limits)
    if not fits:
        raise typer.Exit(1)


def _compare_forms(
    config: RunConfig,
    given: Mapping[str, Any],
    options: PlanOptions,
    rows: "dict[str, answer.Row]",
    only: Collection[str],
    plans: Any,
    limits: Mapping[str, Any],
) -> bool:
    """Plan the forms whose state may fit, print the answer, and return True if one fits."""
    from ..memory import Comparison, compare
    from ..memory.compiler.cache import default_folder

    compare_all = options.details or options.plot is not None
    names = answer.select(rows, only, compare_all)
    steps = {name: rows[name].step for name in names}
    compiled = Comparison()
    if steps:
        compiled = compare(
            steps, num_devices=options.num_devices, progress=True, cache=default_folder(), **limits
        )
    for name, plan in compiled.items():
        rows[name].plan = plan
    for name, error in compiled.errors.items():
        rows[name].error = shorten(str(error))
    shown = [row for name, row in rows.items() if not only or name in only]
    sentence, command = answer.conclude(shown, type(config), given, plans, options.num_devices)
    command = _for_the_same_machine(command, options)
    if options.json:
        print(json.dumps(answer.to_dict(shown, sentence, command), indent=1))
    else:
        _print_reports([answer.make_report(shown, config)])
        _print_answer(sentence, command)
    if options.details and compiled and not options.json:
        print()
        _print_reports([answer.phases_report([rows[name] for name in compiled])])
        print()
        show(compiled, options)
    elif options.plot is not None and compiled:
        _plot(compiled, options)
    return any(row.fits for row in shown)


def _search(
    config: RunConfig,
    given: Mapping[str, Any],
    options: PlanOptions,
    budget: int,
    forms: "Mapping[str, Form]",
    plans: Any,
    choices: "MemoryChoices",
    limits: Mapping[str, Any],
) -> bool:
    """Search for the fastest options that fit, print the answer, and return True if some fit."""
    found = search_options(
        config, given, choices, budget=budget, num_devices=options.num_devices, **limits
    )
    show_search(found, options)
    row_limits = dataclasses.replace(_row_limits(limits, options.num_devices), device=budget)
    if found.options is not None:
        sentence = "Train with:"
        changed = choices.change(**found.options)
        command = answer.write_command(type(config), given, changed, row_limits)
    else:
        rows = list(answer.estimate(forms, row_limits, options.num_devices).values())
        sentence, command = answer.advise(rows, type(config), given, plans, options.num_devices)
        command = _for_the_same_machine(command, options)
    if not options.json:
        _print_answer(sentence, command)
    return found.options is not None


def _for_the_same_machine(command: str, options: PlanOptions) -> str:
    """Return a command that plans, with the options of the device and the host that were given."""
    if not command.startswith("effjax memory "):
        return command
    names = "target", "num_devices", "memory_fraction", "host_memory_gb", "budget", "num_classes"
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            command += f" --{field.name.replace('_', '-')} {shlex.quote(str(value))}"
    return command


def _print_answer(sentence: str, command: str) -> None:
    print(f"\n{printable(sentence)}")
    if command:
        print(f"  {printable(command)}")


def _row_limits(limits: Mapping[str, Any], num_devices: int | None) -> "answer.Limits":
    from ..memory.plan import resolve_memory_fraction

    target, host = limits["target"], limits["host_memory_bytes"]
    fraction = resolve_memory_fraction(limits["memory_fraction"], target)
    host = host or target.host_bytes_per_device * (num_devices or 1) or None
    return answer.Limits(target, int(fraction * target.memory_bytes), host)


def _check_only(only: Collection[str], names: Sequence[str]) -> None:
    if unknown := set(only) - set(names):
        choices = ", ".join(map(repr, names))
        raise TrainError(f"--only {unknown.pop()!r:.120} must be one of {choices}.")


def any_fits(result: "Comparison | dict[str, MaxBatch]") -> bool:
    """Return True if a plan, or a batch size, fits."""
    from ..memory import MaxBatch

    return any(
        each.batch_size > 0 if isinstance(each, MaxBatch) else each.fits for each in result.values()
    )


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


def plan_steps(
    steps: Steps, options: PlanOptions, batch_size: int, **limits: Any
) -> "Comparison | dict[str, MaxBatch]":
    """Plan steps, or find their largest batch sizes.

    Args:
        steps: The steps.
        options: The options of the plan.
        batch_size: The batch size to plan, or the first one to try.
        **limits: Other arguments of `plan`.
    """
    from ..memory import compare, max_batch_size

    only, multiple_of = options.only or (), options.multiple_of
    if multiple_of:
        batch_size = -(-batch_size // multiple_of) * multiple_of
    names = list(steps(batch_size))
    _check_only(only, names)
    shared: dict[str, Any] = dict(num_devices=options.num_devices, progress=True, **limits)

    def plan_all(by_name: StepsByName) -> "Comparison | dict[str, MaxBatch]":
        if not options.max_batch:
            return compare({name: step(batch_size) for name, step in by_name.items()}, **shared)
        return {
            name: max_batch_size(step, multiple_of=multiple_of, start=batch_size, **shared)
            for name, step in by_name.items()
        }

    by_name = separate_steps(steps, [name for name in names if name in (only or names)])
    return split_if_needed(plan_all, by_name, options.num_devices)


def separate_steps(steps: Steps, names: Sequence[str]) -> StepsByName:
    """Return a function of the batch size for each of the named steps."""
    steps = functools.lru_cache(maxsize=2)(steps)  # splitting a step compares two batch sizes
    return {name: lambda size, name=name: steps(size)[name] for name in names}


def split_if_needed(
    plan_all: Callable[[StepsByName], Result], by_name: StepsByName, num_devices: int | None
) -> Result:
    """Plan steps; if they have no shardings, split their batch over the devices and plan again."""
    from ..memory.compiler.lower import DeviceCountError
    from ..memory.search.batch_size import split_over_devices

    try:
        return plan_all(by_name)
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
    return plan_all({name: split_over_devices(step, num_devices) for name, step in by_name.items()})


def show_search(found: "OptionSearch", options: PlanOptions) -> None:
    """Print the options that a search found."""
    print(json.dumps(found.to_dict(), indent=1)) if options.json else _print_reports([found])


def show(result: "Comparison | dict[str, MaxBatch]", options: PlanOptions) -> None:
    """Print plans or batch sizes, and plot the plans into a file."""
    from ..memory import Comparison
    from ..memory.render import MAX_ROWS

    if isinstance(result, Comparison):
        plans, records = result, result.to_dict()
        # Of several plans, show a comparison and fewer rows of each.
        reports = [plans.report()] if len(plans) > 1 or plans.errors else []
        rows = MAX_ROWS // 2 if len(plans) > 1 else MAX_ROWS
        reports += [plan.report(name, rows) for name, plan in plans.items()]
    else:
        plans = Comparison({name: largest.plan for name, largest in result.items()})
        records = {name: largest.to_dict() for name, largest in result.items()}
        reports = [_largest_batches(result)]
    if options.json:
        print(json.dumps(records, indent=1))
    else:
        _print_reports(reports)
    if options.plot is not None:
        _plot(plans, options)


def _plot(plans: "Comparison", options: PlanOptions) -> None:
    assert options.plot is not None
    _draw(plans, options.plot)
    if not options.json:
        print(printable(f"written: {options.plot}"))


def _largest_batches(results: "Mapping[str, MaxBatch]") -> "Report":
    from ..memory.render import Report, ReportTable, format_bytes

    rows = [
        [
            name,
            str(result.batch_size) if result.batch_size else "none fits",
            format_bytes(result.plan.peak_device_bytes),
            ", ".join(map(str, sorted(result.tried))),
        ]
        for name, result in results.items()
    ]
    return Report([ReportTable(["", "largest batch", "peak", "batches compiled"], rows)])


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
