"""What `effjax memory` does with its options."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..memory import report
from ..memory.batch_size import MaxBatch, max_batch_size
from ..memory.compare import Comparison, plan_all
from ..memory.targets import find_target
from ..train.errors import TrainError
from ..train.images.config import Config

Steps = Callable[[int], Mapping[str, tuple[Any, ...]]]

IMAGENET = (224, 1000)  # side and classes
CIFAR = (32, 10)


def model_steps(
    config: Config, image_size: int | None, num_classes: int | None, num_devices: int
) -> Steps:
    """The forms of a model; images and classes are those of CIFAR or of ImageNet by default."""
    from ..models import DENSENETS
    from ..train.images.forms import training_steps

    small = config.model in ("densenet-bc", "deform-resnet") or "small_inputs" in DENSENETS.get(
        config.model, ()
    )
    side, classes = CIFAR if small else IMAGENET
    side, classes = image_size or side, num_classes or classes
    return training_steps(config, (side, side, 3), classes, num_devices)


def lm_steps(
    options: dict[str, int | None], dtype: Any, batch_size: int, num_devices: int
) -> Steps:
    """The forms of the language model; a head for each 128 channels, four at least."""
    from ..train.lm.config import LMConfig
    from ..train.lm.forms import lm_steps

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    width = given.get("width", LMConfig.width)
    heads = max(width // 128, LMConfig.heads)
    offload: Any = "all" if "num_microbatches" in given else "none"
    config = LMConfig(
        **given, heads=heads, dtype=dtype, batch_size=batch_size, offload=offload
    )  # fmt: skip
    return lm_steps(config, num_devices)


def user_steps(name: str) -> Steps:
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


def run(
    steps: Steps,
    *,
    batch_size: int,
    only: Sequence[str],
    max_batch: bool,
    as_json: bool,
    plot: Path | None,
    **options: Any,
) -> None:
    """Plans the steps, and prints what was found."""
    try:
        find_target(options["target"])
    except ValueError as error:
        raise TrainError(str(error)) from error
    if plot is not None and not plot.parent.is_dir():
        raise TrainError(f"--plot {plot}: there is no folder {plot.parent}")
    console = Console()
    progress = Console(stderr=True).is_terminal

    def chosen(size: int) -> dict[str, tuple[Any, ...]]:
        found = steps(size)
        if unknown := [name for name in only if name not in found]:
            raise TrainError(f"--only {unknown[0]!r} must be one of {', '.join(found)}")
        return {name: step for name, step in found.items() if name in (only or found)}

    if max_batch:
        multiple = options.get("num_devices") or 1
        found = {
            name: max_batch_size(
                lambda size, name=name: chosen(size)[name],
                multiple_of=multiple, start=batch_size, progress=progress, **options,
            )
            for name in chosen(multiple)
        }  # fmt: skip
        plans = Comparison({name: result.plan for name, result in found.items()})
        _show_batches(console, found, as_json)
    else:
        plans = plan_all(chosen(batch_size), progress, **options)
        _show_plans(console, plans, as_json)
    if plot is not None:
        _save(plans, plot)
        if not as_json:
            print(f"written: {plot}")


def _show_plans(console: Console, plans: Comparison, as_json: bool) -> None:
    if as_json:
        return print(json.dumps(plans.to_dict(), indent=1))
    shown = report.SHOWN
    if len(plans) > 1:
        _show(console, plans, str(plans))
        shown //= 2
        print()
    for i, (name, plan) in enumerate(plans.items()):
        if i:
            print()
        _show(console, report.plan_tables(plan, name, shown), report.plan_text(plan, name, shown))


def _show_batches(console: Console, found: dict[str, MaxBatch], as_json: bool) -> None:
    if as_json:
        records = {name: result.to_dict() for name, result in found.items()}
        return print(json.dumps(records, indent=1))
    header = ["", "largest batch", "peak", "batches compiled"]
    rows = [
        [
            name,
            str(result.batch_size) if result.batch_size else "none fits",
            report.format_bytes(result.plan.peak_device_bytes),
            ", ".join(map(str, sorted(result.tried))),
        ]
        for name, result in found.items()
    ]
    _show(console, report.table("", header, rows), report.aligned([header, *rows]))


def _show(console: Console, table: Any, text: str) -> None:
    """Tables on a terminal; elsewhere lines, which are not cut to a width."""
    if console.is_terminal:
        console.print(table)
    else:
        print(text)


def _save(plans: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    figure = (plans if len(plans) > 1 else next(iter(plans.values()))).plot().figure
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # an unknown kind of file
        raise TrainError(f"--plot {path}: {error}") from error
