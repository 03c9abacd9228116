"""`effjax memory`: plans of the steps of commands that train, and of a user's function."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..train.config import COUNT, MODEL, PLAN, SIZE, Check, RunConfig, inherit, option
from ..train.detection.config import DetectorConfig
from ..train.errors import TrainError, printable
from ..train.host_memory import pinnable_of
from ..train.images.config import DenseNetRunConfig, ResNetRunConfig
from ..train.text.config import FinetuneConfig
from . import answer
from .fit import DEFAULT_TARGET, parse_size, search_options
from .options import FileOptions, command, take
from .planning import (
    Limits,
    PlannedRun,
    Row,
    compile_rows,
    estimate,
    find_fastest,
    find_nearest,
    find_smaller,
    select,
)
from .shell import training_command
from .user_steps import Steps, errors_in_one_line, load_steps

if TYPE_CHECKING:
    from ..memory import Comparison, OptionSearch
    from ..train.task import MemoryChoices

# Options that a plan does not need.
READ_BY_RUNS = (
    "data", "data_weights", "columns", "chat_template", "validation_data", "init_from",
    "sample_prompts", "sample_tokens", "sample_temperature",
)  # fmt: skip
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
        with errors_in_one_line():
            from ..memory.compiler.packages import install_compiler as install

            print(printable(f"installed: {install(install_compiler)}"))
        raise typer.Exit


@command(memory_app, "densenet", DenseNetRunConfig, ImagePlanOptions)
def plan_densenet(given: dict[str, Any]) -> None:
    """Plan the step of effjax train densenet in four forms.

    The forms are plain, jax.checkpoint, effjax conv and effjax features.
    """
    plan_run(DenseNetRunConfig, given)


@command(memory_app, "resnet", ResNetRunConfig, ImagePlanOptions)
def plan_resnet(given: dict[str, Any]) -> None:
    """Plan the step of effjax train resnet in three forms.

    The forms are plain, effjax conv and effjax features.
    """
    plan_run(ResNetRunConfig, given)


@command(memory_app, "detector", DetectorConfig, PlanOptions)
def plan_detector(given: dict[str, Any]) -> None:
    """Plan the step of effjax train detector in three forms. Of --weights, config.json is read.

    The forms are plain, effjax conv and effjax features.
    """
    plan_run(DetectorConfig, given)


@command(memory_app, "finetune", FinetuneConfig, PlanOptions)
def plan_finetune(given: dict[str, Any]) -> None:
    """Plan the step of effjax finetune in seven forms. Only config.json of CHECKPOINT is read.

    The step is planned in memory, with jax.checkpoint, updated during the backward pass, and with
    its activations, its parameters and optimizer state, or both offloaded.
    """
    plan_run(FinetuneConfig, given)


@command(memory_app, "step", FunctionOptions)
def plan_function(given: dict[str, Any]) -> None:
    """Plan the steps of MODULE:FUNCTION. The module is imported, and the function called.

    Their code runs with your permissions. The step that they return is compiled, and does not run.
    """
    options = FunctionOptions(**given)
    if options.function is None or ":" not in options.function:
        raise TrainError("give MODULE:FUNCTION, such as my_module:my_step.")
    limits = _find_limits(options, options.host_memory_gb and options.host_memory_gb * 2**30)
    # A traceback would have more lines of effjax and JAX than of the user.
    with errors_in_one_line(in_users_code=True):
        steps = load_steps(options.function, options.batch_size)
        plan_all = _search_steps if options.budget else _plan_steps
        fits = _split_if_needed(
            lambda steps: plan_all(steps, options, options.batch_size, limits),
            steps, options.num_devices,
        )  # fmt: skip
    if not fits:
        raise typer.Exit(1)


def plan_run(config_type: type[RunConfig], given: Mapping[str, Any]) -> None:
    """Plan the step of a command that trains, and print the answer."""
    options_type, more = PlanOptions, {}
    if config_type is FinetuneConfig:
        from ..train.text import plans
    elif config_type is DetectorConfig:
        from ..train.detection import plans
    else:
        from ..train.images import plans

        options_type, more = ImagePlanOptions, {"num_classes": given.get("num_classes")}
    own = take(config_type, given)
    config: Any = config_type(**own).resolve()
    options = _plan_options(options_type(**take(options_type, given)), config, given)
    size = options.num_devices or 1
    forms = plans.forms(config, given, size, **more)
    run = PlannedRun(config, own, forms, plans.smaller_configs, size)
    limits = _find_limits(
        options, options.host_memory_gb and pinnable_of(options.host_memory_gb * 2**30), size
    )
    _check_only(options.only, forms)
    # Building the steps of a deep network takes seconds.
    names = [name for name in forms if name in (options.only or forms)]
    print(f"planning for {limits.target.description}: {'; '.join(names)}", file=sys.stderr)
    with errors_in_one_line():
        if options.max_batch:
            steps = {name: _step_of_size(form) for name, form in forms.items()}
            fits = _plan_steps(steps, options, config.batch_size, limits)
        elif options.budget is not None:
            choices = plans.memory_choices(config, {*given}, size, **more)
            fits = _search_run(run, options, limits, choices)
        else:
            fits = _compare_forms(run, options, limits)
    if not fits:
        raise typer.Exit(1)


def _plan_options(options: Any, config: RunConfig, given: Collection[str]) -> Any:
    """Return the options of a plan with the number of devices of the mesh, if there is one."""
    from ..train.mesh import parse_axes

    # A plan takes the options of the command that trains, so that one can edit a single word.
    if unused := [name for name in READ_BY_RUNS if name in given]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        print(f"effjax: a plan reads no data and no weights; unused: {names}", file=sys.stderr)
    if config.mesh is None:
        return options
    size = math.prod(parse_axes(config.mesh, options.num_devices).values())
    return dataclasses.replace(options, num_devices=size)


def _find_limits(
    options: PlanOptions, host_bytes: int | None, num_devices: int | None = None
) -> Limits:
    """Return what a step may use; `host_bytes` is that of the host, if it is given."""
    from ..memory.devices import find_target
    from ..memory.plan import resolve_memory_fraction
    from ..memory.search.budget import fraction_of

    with errors_in_one_line():
        target = find_target(options.target)
        if options.budget is None:
            fraction = resolve_memory_fraction(options.memory_fraction, target)
        else:
            fraction = fraction_of(parse_size("--budget", options.budget), target)
    # A host of TPUs has as much for each of them. `plan` knows how many a user's step spans.
    host_bytes = host_bytes or target.host_bytes_per_device * (num_devices or 0) or None
    return Limits(target, fraction, host_bytes)


def _step_of_size(form: Any) -> Callable[[int], tuple[Any, ...]]:
    return lambda size: form.training_step(dataclasses.replace(form.config, batch_size=size))


def _compare_forms(run: PlannedRun, options: PlanOptions, limits: Limits) -> bool:
    """Plan the forms whose state may fit, print the answer, and return True if one fits."""
    rows, only = estimate(run, limits), options.only or ()
    plans = compile_rows(select(rows, only, options.details or options.plot is not None), run)
    shown = [row for row in rows if not only or row.name in only]
    text, command = _conclude(run, shown)
    if options.json:
        print(json.dumps(answer.to_dict(shown, text, command), indent=1))
    else:
        answer.print_reports([answer.forms_report(shown, run.config)])
        answer.print_answer(text, command)
        if options.details and plans:
            print()
            phases = answer.phases_report([row for row in rows if row.name in plans])
            answer.print_reports([phases, *answer.plans_reports(plans)])
    _plot(plans, options)
    return any(row.fits for row in shown)


def _conclude(run: PlannedRun, rows: list[Row]) -> tuple[str, str]:
    """Return sentences, and the command that trains with what fits; empty if nothing does."""
    if chosen := find_fastest(rows):
        text = answer.describe_fastest(chosen)
    elif nearest := find_nearest(rows):
        chosen = find_smaller(nearest, run)
        text = f"{answer.describe_nearest(nearest)} {answer.describe_smaller(nearest, chosen)}"
    else:
        text = "The compiler refuses the forms that a command trains."
    if chosen is None:
        return text, ""
    command = training_command(type(run.config), run.given, chosen.form.config, chosen.limits)
    return f"{text}{answer.describe_weights(run)}", command


def _search_run(
    run: PlannedRun, options: PlanOptions, limits: Limits, choices: "MemoryChoices"
) -> bool:
    """Search for the fastest options that fit, print the answer, and return True if some fit."""
    found = search_options(
        run.config, run.given, choices, num_devices=run.num_devices, **limits.arguments
    )
    _show_search(found, options)
    if options.json:  # that of the search, which has no command
        return found.options is not None
    if found.options is not None:
        config = choices.change(**found.options)
        command = training_command(type(config), run.given, config, limits)
        answer.print_answer(f"These options fit.{answer.describe_weights(run)}", command)
    else:
        answer.print_answer(*_conclude(run, estimate(run, limits)))
    return found.options is not None


def _plan_steps(steps: Steps, options: PlanOptions, batch_size: int, limits: Limits) -> bool:
    """Plan steps, or find their largest batch sizes; print them and return True if one fits."""
    from ..memory import Comparison, compare, max_batch_size

    _check_only(options.only, steps)
    steps = {name: step for name, step in steps.items() if name in (options.only or steps)}
    shared: Any = {"num_devices": options.num_devices, "progress": True, **limits.arguments}
    if options.max_batch:
        largest = {
            name: max_batch_size(step, multiple_of=options.multiple_of, start=batch_size, **shared)
            for name, step in steps.items()
        }
        plans = Comparison({name: found.plan for name, found in largest.items()})
        record = {name: found.to_dict() for name, found in largest.items()}
        reports = [answer.batches_report(largest)]
    else:
        plans = compare({name: step(batch_size) for name, step in steps.items()}, **shared)
        record, reports = plans.to_dict(), answer.plans_reports(plans)
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        answer.print_reports(reports)
    _plot(plans, options)
    return any(plan.fits for plan in plans.values())


def _search_steps(steps: Steps, options: PlanOptions, batch_size: int, limits: Limits) -> bool:
    """Search for the fastest step that fits, print it, and return True if one fits."""
    from ..memory import choose_options

    found = choose_options(
        lambda step: steps[step](batch_size), {"step": list(steps)},
        not_by_time=["step"], num_devices=options.num_devices, progress=True, **limits.arguments,
    )  # fmt: skip
    _show_search(found, options)
    return found.options is not None


def _show_search(found: "OptionSearch", options: PlanOptions) -> None:
    if options.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        answer.print_reports([found])


def _plot(plans: "Comparison", options: PlanOptions) -> None:
    if options.plot is not None and plans:
        answer.save_plot(plans, options.plot)
        if not options.json:
            print(printable(f"written: {options.plot}"))


def _split_if_needed(
    plan_all: Callable[[Steps], Result], steps: Steps, num_devices: int | None
) -> Result:
    """Plan steps; if they have no shardings, split their batch over the devices and plan again."""
    # Whether a step has shardings is only known when it has been traced: those of a mesh in
    # `jax.jit` or `jax.set_mesh` are not in its arguments.
    from ..memory.compiler.lower import DeviceCountError
    from ..memory.search.batch_size import split_over_devices

    try:
        return plan_all(steps)
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
    return plan_all({name: split_over_devices(step, num_devices) for name, step in steps.items()})


def _check_only(only: Collection[str] | None, names: Collection[str]) -> None:
    if unknown := {*(only or ())} - {*names}:
        choices = ", ".join(map(repr, names))
        raise TrainError(f"--only {unknown.pop()!r:.120} must be one of {choices}.")
